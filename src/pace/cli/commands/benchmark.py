"""`pace benchmark`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pace.cli import options
from pace.cli.errors import Problem
from pace.cli.opening import device_of
from pace.cli.output import complain, console, say
from pace.cli.runs import running

if TYPE_CHECKING:
    from pace.benchmark import Recipe, Results

_CPU_LIMIT = 200  # images of each split that a CPU gets through in minutes
_COMPUTE = options.Compute(batch_size=256)
_method = partial(typer.Option, rich_help_panel="Methods")
_model = partial(typer.Option, rich_help_panel="Model")
_DATASETS = typer.Option(metavar="NAMES", help="color, flower, cars, cub, or folders with train/ and test/; by commas.")
_LIMIT = typer.Option(min=0, help="Images of each split; 0 for all.", show_default=f"{_CPU_LIMIT} on a CPU, else all")
_METHODS = _method(
    metavar="NAMES", help="By commas; references for all of them; tied=pace is a second pace named tied."
)
_DEFAULT_METHODS = "pace,pace-paper,shap,lime,saliency,agi,craft,lot,position,attention-rank"  # as in pace.benchmark
_SET = _method("--set", metavar="METHOD.OPTION=VALUE", help="Such as pace.covariance=diag; may be repeated.")
_ADD = typer.Option(metavar="FOLDER", help="Also show the results of this run in the tables; may be repeated.")
_BACKBONE = _model(
    metavar="NAME|FILE", help="The model to explain, as --model elsewhere.", show_default="color's own ViT"
)


@dataclass(frozen=True)
class _Model(options.LayerOptions):
    backbone: Annotated[str | None, _BACKBONE] = None
    finetune: Annotated[bool, _model(help="Fine-tune it on each dataset first.")] = True
    epochs: Annotated[int, _model(min=1, help="Epochs of fine-tuning.")] = 20
    lr: Annotated[float, _model(help="Peak learning rate of fine-tuning.")] = 1e-4
    layer_decay: options.LayerDecay = 1.0

    def recipe(self) -> Recipe:
        from pace.benchmark import Recipe

        given = asdict(self)
        return Recipe(name=given.pop("backbone"), train=given.pop("finetune"), **given)


@dataclass(frozen=True)
class _Scoring:
    bootstrap: options.Bootstrap = 200
    hidden_images: options.HiddenImages = 128
    patch_images: Annotated[int, typer.Option(min=1, help="Test images for patch-level scores.")] = 1000
    second_fit: Annotated[bool, typer.Option(help="Fit again from another start, to see if the concepts stay.")] = True
    repeat_seconds: Annotated[float | None, _method(min=0, help="Start no run of a method after this time.")] = None


def benchmark(
    ctx: typer.Context,
    *,
    datasets: Annotated[str, _DATASETS] = "color",
    methods: Annotated[str, _METHODS] = _DEFAULT_METHODS,
    data_root: options.DataRoot = None,
    limit: Annotated[int | None, _LIMIT] = None,
    model: _Model,
    concepts: Annotated[int, _method("--concepts", "-k", min=1, help="Concepts of methods that have them.")] = 100,
    repeats_shap: Annotated[int, _method(min=1, help="Runs of SHAP.")] = 100,
    repeats_lime: Annotated[int, _method(min=1, help="Runs of LIME.")] = 10,
    settings: Annotated[list[str] | None, _SET] = None,
    scoring: _Scoring,
    add: Annotated[list[str] | None, _ADD] = None,
    seed: options.Seed = 0,
    compute: options.Compute = _COMPUTE,
) -> dict[str, Any]:
    """Reproduce the paper's tables.

    \b
    Example:
      pace benchmark --datasets color
      pace benchmark --datasets color,flower,cub --data-root data --backbone vit_base_patch16_224

    If it is stopped, the same command with the same --out resumes it.
    """
    device = device_of(compute.device)
    from pace import benchmark as library

    if limit is None and device.type == "cpu":
        limit = _CPU_LIMIT
        complain("note", f"on a CPU at most {limit} images of each split are used; --limit 0 uses all")
    with running(ctx, datasets.replace(",", "-"), device=device) as run:
        results = library.run(
            run.folder,
            _names(datasets),
            _names(methods),
            data_root=data_root,
            recipe=model.recipe(),
            limit=limit or None,
            concepts=concepts,
            repeats_shap=repeats_shap,
            repeats_lime=repeats_lime,
            options=_options(settings or ()),
            scoring=library.Scoring(**asdict(scoring)),
            seed=seed,
            batch_size=compute.batch_size,
            device=device,
            others=[library.Results.load(path) for path in add or ()],
            report=lambda line: complain("benchmark", line),
        )
        run.record["results"] = results.as_dict()
    _show(results)
    say(f"written to {run.folder}: results.md, results.csv, results.json")
    return run.record


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _options(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``pace.covariance=tied`` as ``{"pace": {"covariance": "tied"}}``; values are JSON or text."""
    found: dict[str, dict[str, Any]] = {}
    for text in settings:
        place, _, value = text.partition("=")
        label, _, option = place.rpartition(".")
        if not (label and option and value):
            raise Problem(f"--set {text}: expected METHOD.OPTION=VALUE, as in pace.covariance=tied")
        try:
            found.setdefault(label, {})[option] = json.loads(value)
        except ValueError:
            found.setdefault(label, {})[option] = value
    return found


def _show(results: Results) -> None:
    from pace import benchmark as library

    for table in library.all_tables(results):
        console().print(library.as_rich(table), soft_wrap=False)
        for note in table.notes:
            say(note, style="dim")
    for dataset in results.datasets:
        for line in library.exposed(results, dataset):
            say(f"! {dataset}: {line}", style="yellow")
    failed = [row.failed for row in results.rows if row.failed]
    if failed and len(failed) == len(results.rows):
        raise Problem(f"no method could be scored: {failed[0]}")
