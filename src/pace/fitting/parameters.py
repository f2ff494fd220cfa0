"""The parameters of PACE in one table: what each may be, and how the command line offers it.

The estimator checks its arguments with it, and `pace fit` makes its options from it. It imports no torch, so that
`--help` is quick.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from typing import Any

import numpy as np

from pace.terminal import one_line

_SIZE = re.compile(r"([0-9]*\.?[0-9]+(?:e\+?[0-9]+)?)\s*(?:([kmgt])(ib|b)?|b)?", re.IGNORECASE)


@dataclass(frozen=True)
class Parameter:
    """One argument of `PACE`."""

    name: str
    default: Any
    expected: str  # in words, for messages
    accepts: Callable[[Any], bool]
    option: str | None = None  # on the command line; None: in Python only
    metavar: str | None = None
    help: str = ""

    def check(self, value: Any) -> None:
        if not self.accepts(value):
            raise ValueError(f"{self.name}: expected {self.expected}; found {one_line(repr(value))}")


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _whole(least: int, *also: str | None, most: float = inf) -> tuple[str, Callable[[Any], bool]]:
    """A whole number of at least `least`, or one of `also`."""
    words = ("" if most == inf else f" and at most {most}") + "".join(f" or {other!r}" for other in also)

    def accepts(value: Any) -> bool:
        if isinstance(value, (str, type(None))):
            return value in also
        return _is_number(value, Integral) and least <= value <= most

    return f"a whole number of at least {least}{words}", accepts


def _one_of(*values: Any) -> tuple[str, Callable[[Any], bool]]:
    words = [repr(value) for value in values]

    def accepts(value: Any) -> bool:
        return isinstance(value, (str, bool, np.bool_, type(None))) and value in values

    return ", ".join(words[:-1]) + f" or {words[-1]}", accepts


def _is_alpha(value: Any) -> bool:
    if value is None or isinstance(value, str):
        return value in (None, "learn")
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return False
    return numbers.ndim <= 1 and bool(((numbers >= 1e-12) & (numbers <= 1e12)).all())  # else θ is NaN


def memory_in_bytes(value: Any) -> int | None:
    """A budget such as 8e9, '8GB' or '8GiB' in bytes; None for anything else."""
    size = 0.0
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
        number, prefix, unit = found.groups(default="")
        size = float(number) * (1024 if unit.lower() == "ib" else 1000) ** " kmgt".index(prefix.lower() or " ")
    elif _is_number(value, Real):
        size = float(value)
    return int(size) if 1 <= size < float("inf") else None


def _is_memory(value: Any) -> bool:
    return value is None or memory_in_bytes(value) is not None


def _anything(value: Any) -> bool:
    return True  # checked by torch, where it is used


# fmt: off
_TABLE = (
    Parameter("n_concepts", 100, *_whole(1, "auto"), "--concepts", "NUMBER|auto",
              "Number of concepts; auto finds it."),
    Parameter("parts", "auto", *_whole(1, "auto", "none", None), "--parts", "NUMBER|auto|none",
              "Number of parts of which concepts are kinds; none for concepts that are not."),
    Parameter("max_concepts", 300, *_whole(1), "--max-concepts", "NUMBER",
              "Upper limit for --concepts auto; a fit that reaches it warns."),
    Parameter("covariance", "tied", *_one_of("full", "diag", "tied", "low_rank"), "--covariance", None,
              "Shape of a concept."),
    Parameter("updates", "exact", *_one_of("exact", "paper"), "--updates", None,
              "Coordinate ascent, or the rules as the paper prints them."),
    Parameter("alpha", "learn", "one positive number (1e-12 to 1e12), one for every concept, 'learn' or None", _is_alpha,
              "--alpha", "NUMBER|learn", "Dirichlet prior of an image's mixture, in patches."),
    Parameter("prune", "auto", *_one_of(True, False, "auto"), "--prune/--no-prune", None,
              "Leave concepts empty where less than half of them already predict the model's output."),
    Parameter("n_init", 4, *_whole(1, most=1000), "--starts", "NUMBER", "Random starts to compare."),
    Parameter("max_iter", 100, *_whole(1), "--epochs", "NUMBER", "Upper limit for passes over the images."),
    Parameter("refine", "auto", *_whole(0, "auto", most=1_000_000), "--refine", "STEPS|auto",
              "Steps after EM in which faithfulness and stability shape the kinds of parts; needs tied covariances."),
    Parameter("minibatch", None, *_whole(1, None), "--minibatch", "IMAGES",
              "Learn online from this many images at a time: memory does not grow with their number."),
    Parameter("memory", None, "bytes or a size like '8GB' or '8GiB'", _is_memory, "--memory", "SIZE",
              "Memory budget on the device, such as 8GB."),
    Parameter("distributed", False, *_one_of(True, False)),
    Parameter("seed", 0, *_whole(0), "--seed", "NUMBER", "Same seed, same result."),
    Parameter("device", None, "a torch device or None", _anything, "--device", "NAME", "cpu, cuda, cuda:1, …"),
    Parameter("dtype", "float32", "'float32' or 'float64'", _anything),
    Parameter("progress", None, *_one_of(True, False, None)),
)
# fmt: on
PARAMETERS = {parameter.name: parameter for parameter in _TABLE}
