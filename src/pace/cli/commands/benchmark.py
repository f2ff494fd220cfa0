"""`pace benchmark`."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

import typer

from pace.cli import options
from pace.cli.errors import Problem
from pace.cli.models import device_of
from pace.cli.output import complain, console, say
from pace.cli.runs import running

_CPU_LIMIT = 200  # images of each split that a CPU gets through in minutes
_COMPUTE = options.Compute(batch_size=256)
_method = partial(typer.Option, rich_help_panel="Methods")
_model = partial(typer.Option, rich_help_panel="Model")
_NAMES = "color, flower, cars, cub, or folders with train/ and test/, separated by commas."
_METHODS = "Separated by commas; references are all reference lines; tied=pace is a second pace named tied."
_SET = "Set an option of a method, such as pace.covariance=diag; may be repeated."
_MOST = f"{_CPU_LIMIT} on a CPU, all on a GPU"


def benchmark(
    ctx: typer.Context,
    *,
    datasets: Annotated[str, typer.Option(metavar="NAMES", help=_NAMES)] = "color",
    methods: Annotated[str, _method(metavar="NAMES", help=_METHODS)] = "pace,pace-paper,shap,lime,saliency,agi,craft",
    data_root: options.DataRoot = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Upper limit for images of each split; 0 for all.", show_default=_MOST)
    ] = None,
    backbone: Annotated[
        str | None,
        _model(
            metavar="NAME|FILE",
            help="The model to explain: a timm or Hugging Face name, or a .safetensors file.",
            show_default="for color, the ViT that comes with it",
        ),
    ] = None,
    how: options.LayerOptions,
    finetune: Annotated[bool, _model(help="Fine-tune it on each dataset first.")] = True,
    epochs: Annotated[int, _model(min=1, help="Epochs of fine-tuning.")] = 20,
    lr: Annotated[float, _model(help="Peak learning rate of fine-tuning.")] = 1e-4,
    layer_decay: options.LayerDecay = 1.0,
    shipped_color: Annotated[
        bool, _model("--shipped-color", help="For color, still use the ViT that comes with it.")
    ] = False,
    concepts: Annotated[
        int, _method("--concepts", "-k", min=1, help="Number of concepts, for methods that have one.")
    ] = 100,
    repeats_shap: Annotated[int, _method(min=1, help="Runs of SHAP.")] = 100,
    repeats_lime: Annotated[int, _method(min=1, help="Runs of LIME.")] = 10,
    repeat_seconds: Annotated[
        float | None,
        _method(min=0, help="Start no further run of a method after this time.", show_default="no limit"),
    ] = None,
    regression_runs: Annotated[int, _method(min=1, help="Runs to average faithfulness over.")] = 3,
    settings: Annotated[list[str] | None, _method("--set", metavar="METHOD.OPTION=VALUE", help=_SET)] = None,
    bootstrap: options.Bootstrap = 200,
    hidden_images: Annotated[int, typer.Option(min=0, help="Test images for deletion and insertion.")] = 128,
    patch_images: Annotated[
        int | None, typer.Option(min=1, help="Test images for the other patch-level scores.", show_default="all")
    ] = None,
    store: Annotated[
        bool | None,
        typer.Option("--store/--memory", help="Keep observations on disk.", show_default="--memory on a GPU"),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER", help="Also show the results of this run in the tables; may be repeated."),
    ] = None,
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
    from pace import benchmark as benchmarks

    if limit is None and device.type == "cpu":
        limit = _CPU_LIMIT
        complain("note", f"on a CPU at most {limit} images of each split are used; --limit 0 uses all")
    recipe = benchmarks.Recipe(
        backbone,
        how.architecture,
        how.image_size,
        how.layer,
        how.cls,
        finetune,
        epochs,
        lr,
        layer_decay=layer_decay,
        normalize=how.normalize,
    )
    scoring = benchmarks.Scoring(bootstrap, regression_runs, repeat_seconds, hidden_images, patch_images)
    others = [benchmarks.Results.load(path) for path in add or ()]
    with running(ctx, datasets.replace(",", "-"), device=device) as run:
        results = benchmarks.run(
            run.folder,
            _names(datasets),
            _names(methods),
            data_root=data_root,
            recipe=recipe,
            shipped_color=shipped_color,
            limit=limit or None,
            concepts=concepts,
            repeats_shap=repeats_shap,
            repeats_lime=repeats_lime,
            options=_options(settings or ()),
            scoring=scoring,
            seed=seed,
            batch_size=compute.batch_size,
            device=device,
            store=store,
            others=others,
            report=lambda line: complain("benchmark", line),
        )
        run.record["results"] = results.as_dict()
    shown = console()
    for table in benchmarks.all_tables(results):
        shown.print(benchmarks.as_rich(table), soft_wrap=False)
        for note in table.notes:
            say(note, style="dim")
    for dataset in results.datasets:
        for line in benchmarks.exposed(results, dataset):
            say(f"! {dataset}: {line}", style="yellow")
    say(f"written to {run.folder}: results.md, results.csv, results.json")
    failed = [row.failed for row in results.rows if row.failed]
    if failed and len(failed) == len(results.rows):
        raise Problem(f"no method could be scored: {failed[0]}")
    return run.record


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _options(settings: list[str] | tuple[()]) -> dict[str, dict[str, Any]]:
    """``pace.covariance=tied`` as ``{"pace": {"covariance": "tied"}}``; values are JSON or text."""
    found: dict[str, dict[str, Any]] = {}
    for text in settings:
        place, equals, value = text.partition("=")
        label, dot, option = place.rpartition(".")
        if not (label and dot and option and equals):
            raise Problem(f"--set {text}: expected METHOD.OPTION=VALUE, as in pace.covariance=tied")
        try:
            found.setdefault(label, {})[option] = json.loads(value)
        except ValueError:
            found.setdefault(label, {})[option] = value
    return found
