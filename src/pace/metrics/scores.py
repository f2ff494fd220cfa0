"""`Score`, a metric's value with interval and meaning, and `Scores`, all of one explanation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pace.files import expect

Better = Literal["higher", "lower"]

_MAIN = (
    "faithfulness", "stability", "stability_ratio", "sparsity", "leading_area", "within_image_information", "warp_gain",
)  # fmt: skip


@dataclass(frozen=True)
class Score:
    """`low` and `high` are its 95 % bootstrap interval over images, None where there is none.

    `better` is None where neither direction is good as such. `range` is the range of possible values.
    """

    name: str
    title: str
    value: float
    low: float | None
    high: float | None
    better: Better | None
    range: tuple[float, float]
    meaning: str

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            whole = self.value.is_integer() and not 0 <= self.value <= 1  # a count
            return f"{self.title}: {self.value:.0f}" if whole else f"{self.title}: {_short(self.value)}"
        return f"{self.title}: {_short(self.value)} [{_short(self.low)}, {_short(self.high)}]"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; an infinite end of the range is None."""
        return {**asdict(self), "range": [end if math.isfinite(end) else None for end in self.range]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Score:
        lowest, highest = values["range"]
        ends = (-math.inf if lowest is None else lowest, math.inf if highest is None else highest)
        return cls(**{**values, "range": ends})


_NUMBER = float | int | None
_SCORE = {"name": str, "title": str, "value": float | int, "low": _NUMBER, "high": _NUMBER, "better": str | None,
          "range": [_NUMBER], "meaning": str}  # fmt: skip
_PATTERN = {"scores": {str: _SCORE}, "warnings": [str], "verdict": str}


class Scores(dict[str, Score]):
    """Scores by name, in reading order, `warnings` in plain words, and the `verdict`: one line that says what to believe."""

    def __init__(self, scores: Iterable[Score], warnings: Iterable[str] = (), verdict: str = "") -> None:
        super().__init__({score.name: score for score in scores})
        self.warnings, self.verdict = list(warnings), verdict

    def __repr__(self) -> str:
        warnings = (f"warning: {warning}" for warning in self.warnings)
        return "\n".join([*map(str, self.values()), *warnings, *filter(None, [self.verdict])])

    @property
    def main(self) -> list[Score]:
        """Those to read first."""
        return [self[name] for name in _MAIN if name in self]

    def as_dict(self) -> dict[str, Any]:
        scores = {name: score.as_dict() for name, score in self.items()}
        return {"scores": scores, "warnings": self.warnings, "verdict": self.verdict}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Scores:
        """The inverse of `as_dict`, also after a round trip through JSON. Other content is a ValueError."""
        expect(values, _PATTERN, "the scores")
        return cls(map(Score.from_dict, values["scores"].values()), values["warnings"], values["verdict"])


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"
