"""`run`: every method on every dataset, with finished work kept on disk."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pace import __version__
from pace.benchmark.cache import Cache, code_digest, key_of
from pace.benchmark.data import Dataset, Inputs, open_dataset
from pace.benchmark.methods import COLORS, DEFAULT_METHODS, Method, choose_methods
from pace.benchmark.results import Results, Row
from pace.benchmark.scoring import Scoring, score_method
from pace.benchmark.subject import Recipe, color_size, prepare_subject
from pace.benchmark.writing import write_results


def run(
    out: str | os.PathLike[str],
    datasets: Sequence[str] = ("color",),
    methods: Sequence[str] = DEFAULT_METHODS,
    *,
    data_root: str | os.PathLike[str] | None = None,
    recipe: Recipe | None = None,
    shipped_color: bool = False,
    limit: int | None = None,
    concepts: int = 100,
    repeats_shap: int = 100,
    repeats_lime: int = 10,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    scoring: Scoring | None = None,
    seed: int = 0,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    store: bool | None = None,
    others: Sequence[Results] = (),
    report: Callable[[str], None] | None = None,
) -> Results:
    """The paper's tables, from images to pages, in the folder `out`; what is finished there is not computed again.

    Parameters
    ----------
    datasets
        Some of "color", "flower", "cars", "cub" (with `data_root`), or folders with train/ and test/.
    methods
        As `pace benchmark` takes them: names, "references", or ``label=name``.
    recipe, shipped_color
        The model and its fine-tuning. Color is explained with the ViT shipped for it by default, or if `shipped_color`.
    limit, batch_size
        Images per split at most, and those that go through the model together.
    concepts, repeats_shap, repeats_lime, options
        K of all methods that have it; the runs of SHAP and LIME; and by label ``{"pace": {"covariance": "tied"}}``.
    store
        Keep observations on disk, in float16; by default without a GPU, which makes them again in seconds.
    others, report
        Results of other runs for the same tables; and what is called with a line after every stage.
    """
    recipe, scoring, device = recipe or Recipe(), scoring or Scoring(), torch.device(device)
    chosen = choose_methods(methods, concepts, {"shap": repeats_shap, "lime": repeats_lime}, options or {})
    _check(datasets, recipe)
    shipped_color = shipped_color or recipe.name is None
    size = color_size() if shipped_color else None  # scaled down to it, images would have half of the noise
    opened = [open_dataset(source, data_root, limit, seed, size) for source in datasets]
    if len({dataset.name for dataset in opened}) < len(opened):
        raise ValueError("datasets: two have the same name; run them one by one")
    store = device.type != "cuda" if store is None else store
    given = {"datasets": list(datasets), "shipped_color": shipped_color, "limit": limit, "batch_size": batch_size}
    results = Results(settings=_settings(recipe, chosen, scoring, device, **given, seed=seed, store=store))
    say, folder = report or (lambda line: None), Path(out).expanduser()
    started = _Run(folder, chosen, scoring, seed, batch_size, device, store, results, others, say)
    for dataset in opened:
        of_color = shipped_color and dataset.name == "color"
        started.dataset(dataset, Recipe(layer=recipe.layer, count_cls=recipe.count_cls) if of_color else recipe)
    return results.with_others(others)


def _check(datasets: Sequence[str], recipe: Recipe) -> None:
    if not datasets:
        raise ValueError("datasets: expected some of color, flower, cars, cub, or folders; found none")
    if recipe.name is None:
        recipe.refuse_idle()
        if others := [source for source in datasets if source != "color"]:
            raise ValueError(f"{others[0]}: which model? Only Color comes with one; name a backbone")


def _settings(
    recipe: Recipe, methods: list[Method], scoring: Scoring, device: torch.device, **given: Any
) -> dict[str, Any]:
    """Every option of a run, its code and its machine, for results.json."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = {"pace": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        **given,
        "methods": [vars(method) for method in methods],
        "recipe": {**asdict(recipe), "name": recipe.name and Path(recipe.name).name},
        "scoring": asdict(scoring),
        "machine": {"device": f"{device.type}: {name}", **versions},
        "code": code_digest(),
    }


@dataclass
class _Run:
    """The arguments of a run, and its results so far."""

    folder: Path
    methods: list[Method]
    scoring: Scoring
    seed: int
    batch_size: int
    device: torch.device
    store: bool
    results: Results
    others: Sequence[Results]
    report: Callable[[str], None]

    def dataset(self, dataset: Dataset, recipe: Recipe) -> None:
        """All methods on one dataset."""
        methods = [method for method in self.methods if method.name != COLORS or dataset.name == "color"]
        cache, began = Cache(self.folder / dataset.name), time.monotonic()
        try:
            inputs = self._prepare(dataset, recipe, cache)
        except Exception as error:  # the other datasets still count
            self._add([Row(dataset.name, method, failed=_line(error)) for method in methods])
            self.report(f"{dataset.name}: failed: {_line(error)}")
            return
        self.report(f"{dataset.name}: model and observations, {time.monotonic() - began:.1f} s")
        for number, method in enumerate(methods, 1):
            row, took = self._method(method, inputs, cache)
            self._add([row])
            self.report(f"{dataset.name}: {method.label}, {took} ({number} of {len(methods)} methods done)")

    def _add(self, rows: list[Row]) -> None:
        self.results.rows += rows
        write_results(self.results.with_others(self.others), self.folder)

    def _prepare(self, dataset: Dataset, recipe: Recipe, cache: Cache) -> Inputs:
        """What methods get, described in the results. A resumed run observes nothing until a method needs it."""
        subject = prepare_subject(
            recipe, dataset, cache, self.seed, self.device, lambda line: self.report(f"{dataset.name}: {line}")
        )
        store = cache.folder / "observations" if self.store else None
        inputs = Inputs(dataset, subject.backbone, self.seed, self.batch_size, store)
        key = key_of(**inputs.facts)
        known = cache.get("observations", key, dict)
        if known is None:
            known = inputs.describe()
            cache.put("observations", key, known)
        self.results.about[dataset.name] = {"backbone": subject.about, **known}
        return inputs

    def _method(self, method: Method, inputs: Inputs, cache: Cache) -> tuple[Row, str]:
        """Its row, and how long it took."""
        facts = {"method": vars(method), "scoring": asdict(self.scoring), "seed": self.seed}
        key, began = key_of(inputs=inputs.facts, **facts), time.monotonic()
        known = cache.get(method.label, key, Row.from_dict)
        if known is not None:
            return known, "done before"
        try:
            row = score_method(method, inputs, self.scoring, self.seed)
            cache.put(method.label, key, row.as_dict())
        except Exception as error:  # failures are not kept: the next run tries again
            row = Row(inputs.dataset.name, method, failed=_line(error))
        torch.cuda.empty_cache()  # other methods ask how much of it is free
        return row, f"{time.monotonic() - began:.1f} s"


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    expected = isinstance(error, (ValueError, OSError, ImportError)) and text
    return text if expected else f"{type(error).__name__}: {text}"
