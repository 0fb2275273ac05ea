"""Settings of the value loss; imported by the driver, so free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLossConfig:
    """What one critic update minimizes."""

    value_clip: float | None = None
    """Values that moved further than this from those of the step's beginning, towards their return, give no gradient; in units of the
    return. None switches it off."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning.

        Raises:
            ValueError: naming the setting, its value and the allowed range.
        """
        if self.value_clip is not None and not self.value_clip > 0.0:
            raise ValueError(f"value_clip is {self.value_clip}; it must be above 0, or None to switch it off")
