"""A metric is a plain function that declares its direction and range, and can be bootstrapped over images.

Its code returns a `Measure`: a function from weights of the images to values. Weights of 1 give the metric itself; how often
each image was drawn gives a bootstrap replicate, and all replicates are computed together.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, NamedTuple, ParamSpec

import numpy as np
import numpy.typing as npt

from pace.metrics.scores import Better, Score

P = ParamSpec("P")
Array = npt.NDArray[Any]


class Measure(NamedTuple):
    """`values` maps weights (B, M) of the M `images` to B values of the metric, none above `most`."""

    images: int
    values: Callable[[Array], Array]
    most: float = math.inf

    def value(self) -> float:
        """The metric itself: every image counts once."""
        return float(self.values(np.ones((1, self.images)))[0])

    @classmethod
    def mean(cls, by_image: Array) -> Measure:
        """A metric that is the mean of one figure per image; images with NaN do not count."""
        counted = np.isfinite(by_image).astype(np.float64)
        figures = np.where(counted, by_image, 0.0)

        def values(weights: Array) -> Array:
            total = weights @ counted
            found: Array = np.divide(weights @ figures, total, out=np.full(len(weights), np.nan), where=total > 0)
            return found

        return cls(len(by_image), values)

    @classmethod
    def median(cls, by_image: Array) -> Measure:
        """A metric that is the median of one figure per image."""
        order = np.argsort(by_image, kind="stable")
        figures = by_image[order]

        def values(weights: Array) -> Array:
            up_to = weights[:, order].cumsum(1)
            half = up_to[:, -1:] / 2
            last = len(figures) - 1  # between the two in the middle where the weights are even
            lower, upper = (up_to < half).sum(1).clip(0, last), (up_to <= half).sum(1).clip(0, last)
            found: Array = (figures[lower] + figures[upper]) / 2
            return found

        return cls(len(by_image), values)

    @classmethod
    def fixed(cls, value: float) -> Measure:
        """A metric of the method as a whole, without spread over images and so without interval."""
        return cls(1, lambda weights: np.full(len(weights), float(value)))


class Metric(Generic[P]):
    """A function of arrays with a declared direction, range and meaning. Calling it gives the plain figure."""

    def __init__(
        self, function: Callable[P, Measure], title: str, better: Better | None, ends: tuple[float, float], meaning: str
    ) -> None:
        self.measure = function
        self.name: str = function.__name__
        self.title, self.better, self.range, self.meaning = title, better, ends, meaning
        update_wrapper(self, function)
        self.__signature__ = inspect.signature(function).replace(return_annotation=float)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> float:
        return self.measure(*args, **kwargs).value()


METRICS: dict[str, Metric[Any]] = {}  # all declared metrics, by name


def metric(
    *, title: str, better: Better | None, range: tuple[float, float], meaning: str | None = None
) -> Callable[[Callable[P, Measure]], Metric[P]]:
    """Declare a function that returns a `Measure` as a metric.

    `meaning` says in a sentence what the number means, by default the first paragraph of the docstring.
    """

    def declared(function: Callable[P, Measure]) -> Metric[P]:
        first = (function.__doc__ or "").partition("\n\n")[0]
        found = Metric(function, title, better, range, meaning or " ".join(first.split()))
        METRICS[found.name] = found
        return found

    return declared


def bootstrap(metric: Metric[Any], *args: Any, resamples: int = 200, seed: int = 0, **options: Any) -> Score:
    """The metric with its 95 % bootstrap interval, from `resamples` draws of as many images with replacement.

    Repeated images bias figures such as mutual information or an effective number. So the replicates are shifted to have the
    metric itself as their mean; the interval is their central 95 %, clipped to the metric's range. Nothing is fitted again:
    for faithfulness, test images are resampled. The same seed and number of images mean the same draws, so that methods are
    compared on the same images; a metric that takes a seed gets it too. With one image or resamples=0 there is no interval.
    """
    if resamples < 0:
        raise ValueError(f"resamples: expected 0 or more; found {resamples}")
    if "seed" in metric.__signature__.parameters:
        options["seed"] = seed
    measure = metric.measure(*args, **options)
    value = measure.value()
    low = high = None
    if measure.images > 1 and resamples > 1:
        chances = np.full(measure.images, 1 / measure.images)
        draws = np.random.default_rng(seed).multinomial(measure.images, chances, size=resamples)
        replicates = measure.values(draws.astype(np.float64))
        replicates = replicates[np.isfinite(replicates)]
        if len(replicates) > 1:
            ends = np.quantile(replicates - replicates.mean() + value, [0.025, 0.975])
            ends = ends.clip(metric.range[0], min(metric.range[1], measure.most))
            low, high = float(min(ends[0], value)), float(max(ends[1], value))
    return Score(metric.name, metric.title, value, low, high, metric.better, metric.range, metric.meaning)
