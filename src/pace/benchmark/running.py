"""`run`: every method on every dataset, with what is finished kept on disk."""

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
from pace.benchmark.methods import COLORS, PAPER_METHODS, Method, choose_methods
from pace.benchmark.results import Results, Row, Stage
from pace.benchmark.scoring import Scoring, judge
from pace.benchmark.subject import Recipe, Subject, color_size, prepare_subject
from pace.benchmark.tables import duration
from pace.benchmark.views import Views
from pace.benchmark.writing import write_results

Report = Callable[[str], None]
_SHARED = ("backbone", "observations")  # stages that serve all methods


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
    """The paper's tables, from images to pages, in the folder `out`; what is there already is not done again.

    Parameters
    ----------
    datasets
        Some of "color", "flower", "cars", "cub" (with `data_root`), or folders with train/ and test/.
    methods
        Names of `pace.baselines.EXPLAINERS`, "true-colors" (on Color), "references" for all reference lines, or ``label=name``
        for a second configuration of a method.
    recipe
        The model, and how it is fine-tuned. Without one Color is explained with the ViT that is shipped for it.
    shipped_color
        Use that one for Color although the recipe names a model.
    limit
        Images of each split at most.
    concepts, repeats_shap, repeats_lime
        K of all methods that have one to choose, and runs of those that have chance in them.
    options
        Further options of methods, by label: ``{"pace": {"covariance": "tied"}}``.
    batch_size
        Images the model looks at together.
    store
        Keep observations on disk, in float16, rather than in memory; by default unless there is a GPU, which makes them again
        in seconds.
    others
        Results of other runs to show in the same tables.
    report
        Is told a line after every stage, with the time that is left.
    """
    where = torch.device(device)
    recipe, scoring = recipe or Recipe(), scoring or Scoring()
    if limit is not None and limit < 4:
        raise ValueError(f"limit: expected 4 images or more; found {limit}")
    chosen = choose_methods(methods, concepts, {"shap": repeats_shap, "lime": repeats_lime}, options)
    if not datasets:
        raise ValueError("datasets: expected some of color, flower, cars, cub, or folders; found none")
    for source in datasets:
        if recipe.name is None and source != "color":
            raise ValueError(f"{source}: which model is to be explained? Only Color comes with one; name a backbone")
    if recipe.name is None:
        recipe.refuse_idle()
    # Images as the shipped ViT knows them: scaled down, they would have half of the noise it was trained with.
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
        "code": {stage: code_of(stage) for stage in ("observations", "methods")},  # before any of it can be edited
    }
    results = Results(settings=settings)
    folder = Path(out).expanduser()
    others = list(others)
    plan = _Plan({dataset.name: _methods_of(dataset, chosen) for dataset in opened}, report or (lambda line: None))
    keep = where.type != "cuda" if store is None else store

    def save() -> None:
        whole = Results(list(results.rows), results.about, settings, list(results.stages))
        whole.add(others)
        write_results(whole, folder)

    for dataset in opened:
        own = (
            Recipe(layer=recipe.layer, count_cls=recipe.count_cls)
            if shipped_color and dataset.name == "color"
            else recipe
        )
        _run_dataset(dataset, own, plan, results, save, folder, scoring, seed, batch_size, where, keep)
    results.add(others)
    return results


def _run_dataset(
    dataset: Dataset,
    recipe: Recipe,
    plan: _Plan,
    results: Results,
    save: Callable[[], None],
    folder: Path,
    scoring: Scoring,
    seed: int,
    batch_size: int,
    device: torch.device,
    keep: bool,
) -> None:
    begin = began = time.monotonic()
    cache = Cache(folder / dataset.name)
    methods = plan.methods[dataset.name]

    def done(name: str, began: float, cached: bool = False) -> None:
        now = time.monotonic()
        stage = Stage(dataset.name, name, now - began, cached)
        results.stages.append(stage)
        if dataset.name in results.about:
            results.about[dataset.name] |= {"seconds": now - begin, "resumed": cache.resumed}
        plan.finished(stage)

    removed = cache.discard_observations(code_of("observations"))
    if removed:
        plan.report(f"{dataset.name}: removed observations that other code made: {', '.join(removed)}")
    try:
        subject = prepare_subject(
            recipe, dataset, cache, seed, device, lambda line: plan.report(f"{dataset.name}: {line}")
        )
        views = Views(
            dataset,
            subject,
            seed,
            batch_size,
            cache.folder if keep else None,
            scoring.hidden_images,
            asked=any(method.asks_model for method in methods),
        )
        done("backbone", began)
        about = _observe(views, subject, cache, done)
    except Exception as error:  # the other datasets still count
        results.rows += [Row(dataset.name, method, failed=f"no model to explain: {_line(error)}") for method in methods]
        done("backbone", began)
        save()
        return
    results.about[dataset.name] = about
    for method in methods:
        began = time.monotonic()
        key = key_of(
            views=views.facts, method=vars(method), scoring=asdict(scoring), seed=seed, code=code_of("methods")
        )
        known = cache.get(method.label, key)
        row = None if known is None else Row.from_dict(known)
        if row is None:
            try:
                if not views.observed:  # on a resumed run
                    views.observe()
                    done("observations", began)
                    began = time.monotonic()
                row = judge(method, views, scoring, seed)
                cache.put(method.label, key, row.as_dict())
            except Exception as error:  # a failure is not kept: the next run tries again
                row = Row(dataset.name, method, failed=_line(error))
            if device.type == "cuda":  # now that nothing holds on to what it used
                torch.cuda.empty_cache()
        results.rows.append(row)
        done(method.label, began, cached=known is not None)
        save()


def _observe(views: Views, subject: Subject, cache: Cache, done: Callable[..., None]) -> dict[str, Any]:
    """What results say of the model and the images. On a resumed run nothing is observed until a method asks for it."""
    began, key = time.monotonic(), key_of(**views.facts)
    known = cache.get("observations", key)
    if known is None:
        known = views.observe()
        cache.put("observations", key, known)
        done("observations", began)
    return {"backbone": subject.about, **known}


def _methods_of(dataset: Dataset, methods: Sequence[Method]) -> list[Method]:
    return [method for method in methods if method.name != COLORS or dataset.name == "color"]


@dataclass
class _Plan:
    """What is to be done, and how long it may still take, judged by what it took so far."""

    methods: dict[str, list[Method]]
    report: Report
    _taken: list[Stage] = field(default_factory=list)

    def finished(self, stage: Stage) -> None:
        self._taken.append(stage)
        took = "done before" if stage.cached else f"{stage.seconds:.1f} s"
        left = self._left()
        after = f"; about {duration(left)} left" if left else ""
        self.report(f"{stage.dataset}: {stage.name}, {took} ({len(self._taken)} of {len(self._stages())}){after}")

    def _stages(self) -> set[tuple[str, str]]:
        planned = {
            (dataset, name)
            for dataset, methods in self.methods.items()
            for name in (*_SHARED, *(method.label for method in methods))
        }
        begun = {stage.dataset for stage in self._taken if stage.name not in _SHARED}
        needless = {(dataset, name) for dataset in begun for name in _SHARED}  # where all methods were done before
        return (planned - needless) | {(stage.dataset, stage.name) for stage in self._taken}

    def _left(self) -> float:
        """The same stage of another dataset tells best; failing that, the mean of the methods so far."""
        new = [stage for stage in self._taken if not stage.cached]
        methods = [stage.seconds for stage in new if stage.name not in _SHARED]
        if not methods:
            return 0.0  # nothing to judge by yet
        known = {stage.name: stage.seconds for stage in new}
        ahead = self._stages() - {(stage.dataset, stage.name) for stage in self._taken}
        return sum(known.get(name, sum(methods) / len(methods)) for _, name in ahead)


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
