"""Bad inputs in Python: each is refused by one line of ours that names it, or gives finite results, in seconds. Part of
robustness.py."""

from __future__ import annotations

import resource
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse

import pace
from pace import PACE, Observations
from pace.images import open_images

HOME = str(Path(pace.__file__).parent)
HANGING = 60  # seconds
M, J, D, N = 12, 10, 4, 3  # images, tokens (3 x 3 patches and CLS), dimensions, classes
THINGS: list[Any] = [
    None, "abc", b"abc", "", -1, 0, 1.5, 1e300, 1e-300, float("nan"), float("inf"), True, 1j, [], [1], {}, {1: 2}, object(),
    len, Decimal("1.5"), [1, 2, 3], ["a"], np.array("x"), np.ones((2, 2)), torch.ones(2), torch.device("cpu"), range(3),
    "9" * 5000, "\x1b[2J", 10**30,
]  # fmt: skip


def at(value: float) -> Callable[[Any, Any], Any]:
    """One value of an array, at a place by lot, becomes this one."""

    def change(array: Any, rng: Any) -> Any:
        array.reshape(-1)[rng.integers(array.size)] = value
        return array

    return change


ARRAYS: dict[str, Callable[[Any, Any], Any]] = {
    **{f"one {value}": at(value) for value in (np.nan, np.inf, -np.inf, 1e20, -1e30, 1e300, -1.0, 1e12, 1e6)},
    "times 1e19": lambda array, rng: array * 1e19,
    "times 1e-30": lambda array, rng: array * 1e-30,
    "times 1e-320": lambda array, rng: array * 1e-320,
    "zeros": lambda array, rng: array * 0,
    "complex": lambda array, rng: array + 1j,
    "complex tensor": lambda array, rng: torch.tensor(array + 1j),
    "longdouble": lambda array, rng: array.astype(np.longdouble),
    "strings": lambda array, rng: array.astype(str),
    "bytes": lambda array, rng: array.astype("S8"),
    "objects": lambda array, rng: array.astype(object),
    "dates": lambda array, rng: array.astype("int64").astype("datetime64[s]"),
    "records": lambda array, rng: np.zeros(array.shape, [("a", float)]),
    "masked": lambda array, rng: np.ma.masked_array(array, array > array.mean()),
    "ragged": lambda array, rng: [row.tolist()[: 1 + n % 2] for n, row in enumerate(array)],
    "half a list": lambda array, rng: [*array.tolist()[:-1], None],
    "meta": lambda array, rng: torch.tensor(array, device="meta"),
    "sparse tensor": lambda array, rng: torch.tensor(array).to_sparse(),
    "sparse": lambda array, rng: sparse.csr_matrix(array.reshape(len(array), -1)),
    "transposed": lambda array, rng: array.T,
    "flat": lambda array, rng: array.reshape(-1),
    "one axis more": lambda array, rng: array[None],
    "an image less": lambda array, rng: array[:-1],
    "empty": lambda array, rng: array[:0],
    "quantized": lambda array, rng: torch.quantize_per_tensor(torch.tensor(array).float(), 0.1, 0, torch.qint8),
}


class Outcome(NamedTuple):
    case: str
    verdict: str  # "refused", "finite", or what is wrong
    seconds: float


def good(rng: Any) -> dict[str, Any]:
    left, width = rng.uniform(0, 0.4, (2, M, 2))
    arrays = {
        "embeddings": rng.normal(size=(M, J, D)),
        "attention": rng.dirichlet(np.ones(J), M),
        "predictions": rng.dirichlet(np.ones(N), M),
        "crops": np.concatenate([left, left + width + 0.1], 1),
    }
    return {**arrays, "grid": (3, 3), "prefix_tokens": 1}


def case(rng: Any) -> tuple[str, Callable[[], list[Any]]]:
    """A bad input by lot: its name, and what to do with it, which gives arrays that must be finite."""
    data, kind = good(rng), rng.integers(7)
    how: dict[str, Any] = {"n_concepts": 3, "n_init": 1, "max_iter": 3, "progress": False}
    how["covariance"] = str(rng.choice(["tied", "diag", "full", "low_rank"]))
    thing = THINGS[rng.integers(len(THINGS))]
    plain = good(rng)
    if kind in (0, 1, 5, 6):
        field = str(rng.choice(["embeddings", "attention", "predictions", "crops"]))
        name = str(rng.choice(list(ARRAYS)))
        data[field] = ARRAYS[name](data[field], rng)
        title = f"{field}: {name} ({how['covariance']})"
    elif kind == 2:
        field = str(rng.choice(list(data)))
        data[field] = thing
        title = f"{field}={thing!r:.40}"
    elif kind == 3:
        field = str(rng.choice([name for name in PACE().get_params() if name not in ("progress", "device")]))
        how[field] = thing
        title = f"PACE({field}={thing!r:.40})"
    else:
        return f"open_images({thing!r:.40})", lambda: [len(open_images(thing))]

    def work() -> list[Any]:
        model = PACE(**how)
        if kind > 4:  # only what is explained is bad
            model.fit(Observations(**plain))
        seen = Observations(**data)
        if kind == 6:
            return [model.transform(seen), model.score(seen), model.partial_fit(seen).means_]
        model = model if kind > 4 else model.fit(seen)
        found = model.explain(seen)
        return [
            model.means_,
            model.alpha_,
            model.label_head_,
            found.theta,
            found.phi,
            found.gamma,
            *found.interval(0.9),
        ]

    return title, work


def _hangs(*_: object) -> None:
    raise TimeoutError(f"not done after {HANGING} seconds")


def judged(title: str, work: Callable[[], list[Any]]) -> Outcome:
    began = time.process_time()
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(HANGING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = work()
        verdict = (
            "finite" if all(np.isfinite(one).all() for one in found if one is not None) else "NaN without an error"
        )
    except (ValueError, TypeError, OSError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = last.filename.startswith(HOME) and "raise " in (last.line or "")
        short = len(str(error)) < 2000 and "\n" not in str(error)
        verdict = "refused" if ours and short else f"raw {type(error).__name__}: {str(error)[:120]}"
    except Exception as error:
        verdict = f"raw {type(error).__name__}: {str(error)[:120]}"
    signal.alarm(0)
    return Outcome(title, verdict, time.process_time() - began)


def outcomes(cases: int, seed: int) -> list[Outcome]:
    rng = np.random.default_rng(seed)
    return [judged(*case(rng)) for _ in range(cases)]


def inputs(count: int, seed: int, until: float, names: Sequence[str]) -> dict[str, Any]:
    rng, tally, wrong, longest, most = np.random.default_rng(seed), Counter[str](), dict[str, str](), 0.0, 0
    while tally.total() < count and time.monotonic() < until:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        one = judged(*case(rng))
        longest, most = (
            max(longest, one.seconds),
            max(most, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
        )
        fine = one.verdict in ("refused", "finite")
        tally[one.verdict if fine else "wrong"] += 1
        if not fine:
            wrong.setdefault(one.case, one.verdict)
    return {**tally, "longest, seconds": round(longest, 2), "most memory, MB": most >> 10, "wrong": wrong}
