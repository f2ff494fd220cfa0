"""`pace benchmark`."""

from __future__ import annotations

import json as json_format
from typing import Annotated, Any

import typer

from pace.cli import options
from pace.cli.errors import Problem
from pace.cli.models import device_of
from pace.cli.output import complain, console, say
from pace.cli.runs import running

_CPU_LIMIT = 200  # images of each split that a CPU gets through in minutes
_METHODS, _MODEL = "Methods", "Model"


def benchmark(
    ctx: typer.Context,
    datasets: Annotated[
        str,
        typer.Option(metavar="NAMES", help="color, flower, cars, cub, or folders with train/ and test/; by commas."),
    ] = "color",
    methods: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="By commas. `references` stands for all reference lines; tied=pace is a second pace, called tied.",
            rich_help_panel=_METHODS,
        ),
    ] = "pace,pace-paper,shap,lime,saliency,agi,craft",
    data_root: options.DataRoot = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0, help="Images of each split at most; 0 for all.", show_default=f"{_CPU_LIMIT} on a CPU, all on a GPU"
        ),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="The model, as `pace finetune --model` takes it.",
            show_default="for color, the ViT that is shipped for it",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    architecture: options.Architecture = None,
    image_size: options.ImageSize = None,
    normalize: options.Normalize = None,
    layer: options.Layer = None,
    cls: options.CountCls = False,
    finetune: Annotated[bool, typer.Option(help="Fine-tune it on each dataset first.", rich_help_panel=_MODEL)] = True,
    epochs: Annotated[int, typer.Option(min=1, help="Of the fine-tuning.", rich_help_panel=_MODEL)] = 20,
    lr: Annotated[float, typer.Option(help="Of the fine-tuning, at its peak.", rich_help_panel=_MODEL)] = 1e-4,
    layer_decay: options.LayerDecay = 1.0,
    shipped_color: Annotated[
        bool, typer.Option("--shipped-color", help="Explain Color's own ViT all the same.", rich_help_panel=_MODEL)
    ] = False,
    concepts: Annotated[
        int, typer.Option("--concepts", "-k", min=1, help="K of all that have one to choose.", rich_help_panel=_METHODS)
    ] = 100,
    repeats_shap: Annotated[int, typer.Option(min=1, help="Runs of SHAP.", rich_help_panel=_METHODS)] = 100,
    repeats_lime: Annotated[int, typer.Option(min=1, help="Runs of LIME.", rich_help_panel=_METHODS)] = 10,
    repeat_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Begin no further run of a method after this long.",
            show_default="none",
            rich_help_panel=_METHODS,
        ),
    ] = None,
    regression_runs: Annotated[
        int, typer.Option(min=1, help="Runs that faithfulness is averaged over.", rich_help_panel=_METHODS)
    ] = 3,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="METHOD.OPTION=VALUE",
            help="An option of a method: pace.covariance=tied. May be repeated.",
            rich_help_panel=_METHODS,
        ),
    ] = None,
    bootstrap: Annotated[int, typer.Option(min=0, help="Draws behind the intervals.")] = 200,
    hidden_images: Annotated[int, typer.Option(min=0, help="Test images for deletion and insertion.")] = 128,
    patch_images: Annotated[
        int | None, typer.Option(min=1, help="Test images for the other scores of the patch level.", show_default="all")
    ] = None,
    store: Annotated[
        bool | None,
        typer.Option("--store/--memory", help="Keep observations on disk.", show_default="--memory on a GPU"),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER", help="Show the results of another run in the same tables. May be repeated."),
    ] = None,
    seed: options.Seed = 0,
    batch_size: options.BatchSize = 256,
    device: options.Device = "auto",
    out: options.Out = None,
    config: options.Config = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> dict[str, Any]:
    """Make the paper's tables, with what exposes them.

    \b
    Example:
      pace benchmark --datasets color
      pace benchmark --datasets color,flower,cub --data-root data --backbone vit_base_patch16_224

    A run that was stopped goes on where it was when it is started again with the same --out.
    """
    where = device_of(device)
    from pace import benchmark as benchmarks

    if limit is None and where.type == "cpu":
        limit = _CPU_LIMIT
        complain("note", f"on a CPU at most {limit} images of each split are used; --limit 0 uses all")
    recipe = benchmarks.Recipe(
        backbone,
        architecture,
        image_size,
        layer,
        cls,
        finetune,
        epochs,
        lr,
        layer_decay=layer_decay,
        normalize=normalize,
    )
    scoring = benchmarks.Scoring(bootstrap, regression_runs, repeat_seconds, hidden_images, patch_images)
    others = [benchmarks.Results.load(path) for path in add or ()]
    with running(ctx, datasets.replace(",", "-"), out=out, device=where) as run:
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
            batch_size=batch_size,
            device=where,
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
    """``pace.covariance=tied`` as ``{"pace": {"covariance": "tied"}}``; numbers, true, false and null are what they say."""
    found: dict[str, dict[str, Any]] = {}
    for text in settings:
        place, equals, value = text.partition("=")
        label, dot, option = place.rpartition(".")
        if not (label and dot and option and equals):
            raise Problem(f"--set {text}: expected METHOD.OPTION=VALUE, as in pace.covariance=tied")
        try:
            found.setdefault(label, {})[option] = json_format.loads(value)
        except ValueError:
            found.setdefault(label, {})[option] = value
    return found
