"""The worker of the recipe's role: plays a countdown by answering what the observation says."""

from __future__ import annotations


class ArcadeWorker:
    """Plain: it knows nothing of Ray."""

    def __init__(self, start: int) -> None:
        self._start = start

    def play(self, seed: int) -> float:
        """The score of one episode."""
        left, score = self._start + seed, 0.0
        while left:
            left, score = left - 1, score + 1.0
        return score
