"""`run`: every method on every dataset, with finished work kept on disk."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from pace import __version__
from pace.benchmark.cache import Cache, code_of, key_of
from pace.benchmark.data import Dataset, open_dataset
from pace.benchmark.inputs import Inputs
from pace.benchmark.methods import COLORS, PAPER_METHODS, Method, choose_methods
from pace.benchmark.results import Results, Row, Stage
from pace.benchmark.scoring import Scoring, score_method
from pace.benchmark.subject import Recipe, Subject, color_size, prepare_subject
from pace.benchmark.tables import duration
from pace.benchmark.writing import write_results

Report = Callable[[str], None]


def run(
    out: str | os.PathLike[str],
    datasets: Sequence[str] = ("color",),
    methods: Sequence[str] = PAPER_METHODS,
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
    others: Iterable[Results] = (),
    report: Report | None = None,
) -> Results:
    """The paper's tables, from images to pages, in the folder `out`; what is finished there is not computed again.

    Parameters
    ----------
    datasets
        Some of "color", "flower", "cars", "cub" (with `data_root`), or folders with train/ and test/.
    methods
        Names of `pace.baselines.EXPLAINERS`, "true-colors" (on Color), "references" for all reference methods, or
        ``label=name`` for a second configuration of a method.
    recipe
        The model, and how it is fine-tuned. By default Color is explained with the ViT shipped for it.
    shipped_color
        Use that ViT for Color although the recipe names a model.
    limit
        Maximum number of images per split.
    concepts, repeats_shap, repeats_lime
        K of all methods that have it as an option, and the runs of SHAP and LIME.
    options
        Further options of methods, by label: ``{"pace": {"covariance": "tied"}}``.
    batch_size
        Images that go through the model together.
    store
        Keep observations on disk, in float16, rather than in memory; by default without a GPU, which makes them again in
        seconds.
    others
        Results of other runs to show in the same tables.
    report
        Called with a line after every stage, which estimates the time left.
    """
    recipe, scoring = recipe or Recipe(), scoring or Scoring()
    where = torch.device(device)
    chosen = choose_methods(methods, concepts, {"shap": repeats_shap, "lime": repeats_lime}, options)
    _check(datasets, recipe, limit)
    # Color's images at the size the shipped ViT was trained on: scaled down, they would have half of the noise.
    size = color_size() if shipped_color or recipe.name is None else None
    opened = [open_dataset(source, data_root, limit, seed, size) for source in datasets]
    names = [dataset.name for dataset in opened]
    if len(set(names)) < len(names):
        raise ValueError(f"datasets: two are called {max(names, key=names.count)}; run them one by one")
    settings = {
        "datasets": list(datasets),
        "methods": [vars(method) for method in chosen],
        "recipe": {**asdict(recipe), "name": recipe.name and Path(recipe.name).name},
        "shipped_color": shipped_color,
        "limit": limit,
        "scoring": asdict(scoring),
        "seed": seed,
        "batch_size": batch_size,
        "store": store,
        "machine": _machine(where),
        "code": {stage: code_of(stage) for stage in ("observations", "methods")},  # before anybody can edit it
    }
    of_dataset = {
        dataset.name: [method for method in chosen if method.name != COLORS or dataset.name == "color"]
        for dataset in opened
    }
    keep = where.type != "cuda" if store is None else store
    running = _Run(
        Path(out).expanduser(), of_dataset, Results(settings=settings), list(others), report or (lambda line: None),
        scoring, seed, batch_size, where, keep,
    )  # fmt: skip
    for dataset in opened:
        shipped = shipped_color and dataset.name == "color"
        running.dataset(dataset, Recipe(layer=recipe.layer, count_cls=recipe.count_cls) if shipped else recipe)
    return running.all_results()


def _check(datasets: Sequence[str], recipe: Recipe, limit: int | None) -> None:
    if limit is not None and limit < 4:
        raise ValueError(f"limit: expected 4 images or more; found {limit}")
    if not datasets:
        raise ValueError("datasets: expected some of color, flower, cars, cub, or folders; found none")
    if recipe.name is None:
        recipe.refuse_idle()
        for source in datasets:
            if source != "color":
                raise ValueError(
                    f"{source}: which model is to be explained? Only Color comes with one; name a backbone"
                )


@dataclass
class _Run:
    """The state of a run, and how far it is."""

    folder: Path
    methods: dict[str, list[Method]]  # by dataset
    results: Results
    others: list[Results]
    report: Report
    scoring: Scoring
    seed: int
    batch_size: int
    device: torch.device
    keep: bool
    _computed: list[float] = field(default_factory=list)  # seconds of each method that was not cached

    def dataset(self, dataset: Dataset, recipe: Recipe) -> None:
        """All methods on one dataset."""
        began = time.monotonic()
        cache = Cache(self.folder / dataset.name)
        methods = self.methods[dataset.name]
        removed = cache.discard_observations(code_of("observations"))
        if removed:
            self.report(f"{dataset.name}: removed observations that other code made: {', '.join(removed)}")
        try:
            subject, inputs = self._prepare(dataset, recipe, cache)
            self._finished(dataset, "backbone", began)
            self.results.about[dataset.name] = about = self._observe(inputs, subject, cache)
        except Exception as error:  # the other datasets still count
            reason = f"no model to explain: {_line(error)}"
            self.results.rows += [Row(dataset.name, method, failed=reason) for method in methods]
            self._finished(dataset, "backbone", began)
            self._save()
            return
        for method in methods:
            self._method(method, inputs, cache)
            about |= {"seconds": time.monotonic() - began, "resumed": cache.resumed}
            self._save()

    def all_results(self) -> Results:
        """With those of other runs."""
        whole = Results(list(self.results.rows), self.results.about, self.results.settings, list(self.results.stages))
        whole.add(self.others)
        return whole

    def _prepare(self, dataset: Dataset, recipe: Recipe, cache: Cache) -> tuple[Subject, Inputs]:
        subject = prepare_subject(
            recipe, dataset, cache, self.seed, self.device, lambda line: self.report(f"{dataset.name}: {line}")
        )
        store = cache.observations(code_of("observations")) if self.keep else None
        return subject, Inputs(dataset, subject, self.seed, self.batch_size, store, self.scoring.hidden_images)

    def _observe(self, inputs: Inputs, subject: Subject, cache: Cache) -> dict[str, Any]:
        """What results say about model and images. A resumed run observes nothing until a method needs it."""
        began, key = time.monotonic(), key_of(**inputs.facts)
        known = cache.get("observations", key)
        if known is None:
            known = inputs.observe()
            cache.put("observations", key, known)
            self._finished(inputs.dataset, "observations", began)
        return {"backbone": subject.about, **known}

    def _method(self, method: Method, inputs: Inputs, cache: Cache) -> None:
        began = time.monotonic()
        facts = {"method": vars(method), "scoring": asdict(self.scoring), "seed": self.seed}
        key = key_of(inputs=inputs.facts, code=code_of("methods"), **facts)
        known = cache.get(method.label, key)
        if known is not None:
            row = Row.from_dict(known)
        else:
            try:
                if not inputs.observed:  # on a resumed run
                    inputs.observe()
                    self._finished(inputs.dataset, "observations", began)
                    began = time.monotonic()
                row = score_method(method, inputs, self.scoring, self.seed)
                cache.put(method.label, key, row.as_dict())
            except Exception as error:  # failures are not kept: the next run tries again
                row = Row(inputs.dataset.name, method, failed=_line(error))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._computed.append(time.monotonic() - began)
        self.results.rows.append(row)
        self._finished(inputs.dataset, method.label, began, cached=known is not None)

    def _finished(self, dataset: Dataset, name: str, began: float, cached: bool = False) -> None:
        stage = Stage(dataset.name, name, time.monotonic() - began, cached)
        self.results.stages.append(stage)
        done, total = len(self.results.rows), sum(map(len, self.methods.values()))
        took = "done before" if cached else f"{stage.seconds:.1f} s"
        left = (total - done) * sum(self._computed) / max(len(self._computed), 1)
        estimate = f"; about {duration(left)} left" if left else ""
        self.report(f"{dataset.name}: {name}, {took} ({done} of {total} methods done){estimate}")

    def _save(self) -> None:
        write_results(self.all_results(), self.folder)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    expected = isinstance(error, (ValueError, OSError, ImportError)) and text
    return text if expected else f"{type(error).__name__}: {text}"


def _machine(device: torch.device) -> dict[str, Any]:
    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    libraries = {package: of(package) for package in ("torch", "timm", "numpy")}
    return {"device": f"{device.type}: {name}", "pace": __version__, "python": platform.python_version(), **libraries}
