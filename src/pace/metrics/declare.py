"""What a metric is: a plain function that declares its direction and range, and can be bootstrapped over images.

A metric's own code returns a `Measure`: not one figure but how the figure follows from the weights of the images. Weights of 1
give the metric itself; counts of how often each image was drawn give a bootstrap replicate, all replicates in one go.
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
    """`values` turns weights (B, M) of the M `images` into B values of the metric, none above `most`."""

    images: int
    values: Callable[[Array], Array]
    most: float = math.inf

    def value(self) -> float:
        """The metric itself: every image counts once."""
        return float(self.values(np.ones((1, self.images)))[0])

    @classmethod
    def mean(cls, by_image: Array) -> Measure:
        """A metric that is the mean of one figure per image; images whose figure is NaN do not count."""
        counted = np.isfinite(by_image)
        figures = np.where(counted, by_image, 0.0).astype(np.float64)

        def values(weights: Array) -> Array:
            total = weights @ counted.astype(np.float64)
            found: Array = np.divide(weights @ figures, total, out=np.full(len(weights), np.nan), where=total > 0)
            return found

        return cls(len(by_image), values)

    @classmethod
    def fixed(cls, value: float) -> Measure:
        """A metric of the method as a whole: it has no spread over images, hence no interval."""
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

    def __repr__(self) -> str:
        direction = "neither way better" if self.better is None else f"{self.better} is better"
        return f"<metric {self.name}{self.__signature__}: {direction}, from {self.range[0]:g} to {self.range[1]:g}>"


METRICS: dict[str, Metric[Any]] = {}  # by name, as far as their modules are imported


def metric(
    *, title: str, better: Better | None, range: tuple[float, float], meaning: str
) -> Callable[[Callable[P, Measure]], Metric[P]]:
    """Declare the function below it as a metric."""

    def declared(function: Callable[P, Measure]) -> Metric[P]:
        found = Metric(function, title, better, range, meaning)
        METRICS[found.name] = found
        return found

    return declared


def bootstrap(
    metric: Metric[Any], *args: Any, resamples: int = 200, level: float = 0.95, seed: int = 0, **options: Any
) -> Score:
    """The metric with its bootstrap interval, from `resamples` draws of as many images with replacement.

    Resampling repeats images, which by itself moves figures such as mutual information or an effective number. So the
    replicates are shifted to have the metric itself as their mean, and the interval is their central `level`, cut at the
    metric's range. Nothing is fitted again: of a faithfulness, the test images are drawn. The same seed and number of images
    mean the same draws, so that two methods are compared on the same images; a metric that takes a seed gets it too. With one
    image or no draws there is no interval.
    """
    if resamples < 0 or not 0 < level < 1:
        raise ValueError(f"expected resamples ≥ 0 and a level between 0 and 1; found {resamples} and {level}")
    if "seed" in metric.__signature__.parameters:
        options["seed"] = seed
    measure = metric.measure(*args, **options)
    draws = np.random.default_rng(seed).multinomial(
        measure.images, np.full(measure.images, 1 / measure.images), size=resamples
    )
    value = measure.value()
    replicates = measure.values(draws.astype(np.float64))
    replicates = replicates[np.isfinite(replicates)]
    low = high = None
    if measure.images > 1 and len(replicates) > 1:
        tail = (1 - level) / 2
        ends = np.quantile(replicates - replicates.mean() + value, [tail, 1 - tail])
        ends = ends.clip(metric.range[0], min(metric.range[1], measure.most))
        low, high = float(min(ends[0], value)), float(max(ends[1], value))
    return Score(metric.name, metric.title, value, low, high, metric.better, metric.range, metric.meaning)
