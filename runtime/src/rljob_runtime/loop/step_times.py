"""When each phase of a step ended, and what follows for timeline and metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepTimes:
    """Readings of the clock in one step, each phase's end."""

    started_s: float
    generated_s: float = 0.0
    taken_s: float = 0.0
    ready_s: float = 0.0
    """Engines that share devices have released them."""
    scored_s: float = 0.0
    trained_s: float = 0.0
    saved_s: float = 0.0
    validated_s: float = 0.0
    synced_s: float = 0.0

    def phases(self) -> list[tuple[str, str, float, float]]:
        """Lane, phase, start and end of each."""
        return [
            ("rollout", "generate", self.started_s, self.generated_s),
            ("rewards", "reward", self.generated_s, self.taken_s),
            ("trainer", "score", self.ready_s, self.scored_s),
            ("trainer", "train", self.scored_s, self.trained_s),
            ("trainer", "checkpoint", self.trained_s, self.saved_s),
            ("rollout", "validate", self.saved_s, self.validated_s),
            ("weights", "sync", self.validated_s, self.synced_s),
        ]

    def metrics(self) -> dict[str, float]:
        """Seconds of the step and of each phase; a validation reports its own time, most of which runs beside the training."""
        seconds = {f"time/{phase}_s": end - start for _, phase, start, end in self.phases() if phase != "validate"}
        return {"time/step_s": self.synced_s - self.started_s} | seconds
