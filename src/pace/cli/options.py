"""The options that commands share, each described once."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from pace.cli.errors import Problem
from pace.cli.runs import DATASETS, read_record

_MODEL, _IMAGES, _RUN = "Model", "Images", "Run"  # headings of --help
SCALE = "More data than memory"


class Covariance(StrEnum):
    full = "full"
    diag = "diag"
    tied = "tied"
    low_rank = "low_rank"


class Normalization(StrEnum):
    imagenet = "imagenet"
    half = "half"
    clip = "clip"


class Updates(StrEnum):
    exact = "exact"
    paper = "paper"


def _number_or_auto(given: object) -> int | str:
    text = str(given)  # the default, and what a run remembers, are numbers already
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text} is neither a whole number of at least 1 nor auto")
    return int(text)


def _block_or_auto(given: object) -> int | str:
    text = str(given)
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text} is neither a whole number nor auto") from None


def _complete_images(incomplete: str) -> Iterator[str]:
    yield from (name for name in DATASETS if name.startswith(incomplete))
    yield from (f"{folder}/" for folder in sorted(Path().glob(f"{incomplete}*")) if folder.is_dir())


def _complete_run(incomplete: str) -> Iterator[str]:
    yield from (str(file.parent) for file in sorted(Path().glob("runs/*/run.json")) if str(file).startswith(incomplete))


def _complete_splits() -> tuple[str, ...]:
    return ("train", "test")


def _once_usual(record: dict[str, Any]) -> dict[str, Any]:
    """Defaults that have changed since, as a record shows by what it says of the model or leaves out."""
    model = record.get("model") or {}
    usual: dict[str, Any] = {"cls": True}  # it counted in benchmarks that were made before one could choose
    if "layer" in model and model.get("attention_layer") is None and model["name"] != "color":
        usual["layer"] = model["layer"]  # the last block, whatever its patches said
    return usual


def _repeat(ctx: typer.Context, file: str | None) -> str | None:
    """The values of an earlier run stand in for those not given."""
    if file is not None and not ctx.resilient_parsing:
        record = read_record(Path(file))
        if record["command"] != ctx.info_name:
            raise Problem(f"--config {file} is of `pace {record['command']}`; this is `pace {ctx.info_name}`")
        given = {name: value for name, value in record["configuration"].items() if value is not None}
        ctx.default_map = {**_once_usual(record), **given}
    return file


_images: Any = typer.Option(
    metavar="NAME|FOLDER",
    help="A dataset (color, flower, cars, cub) or a folder of images; its subfolders are classes.",
    autocompletion=_complete_images,
    rich_help_panel=_IMAGES,
    show_default=False,
)
Images = Annotated[str, _images]
MaybeImages = Annotated[str | None, _images]
DataRoot = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER", help="Where flower, cars or cub lies, in its official layout.", rich_help_panel=_IMAGES
    ),
]
Split = Annotated[
    str, typer.Option(help="Part of the dataset.", autocompletion=_complete_splits, rich_help_panel=_IMAGES)
]
TestSplit = Annotated[
    str | None,
    typer.Option(
        "--split",
        help="Part of the dataset.",
        show_default="test",
        autocompletion=_complete_splits,
        rich_help_panel=_IMAGES,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(min=1, help="Use this many of the images, drawn with the seed.", rich_help_panel=_IMAGES),
]
SkipUnreadable = Annotated[
    bool,
    typer.Option("--skip-unreadable", help="Leave images out that cannot be read.", rich_help_panel=_IMAGES),
]
_model: Any = typer.Option(
    metavar="NAME|PATH",
    help="A timm or Hugging Face name, a .safetensors file, a folder of `pace finetune`, or color.",
    rich_help_panel=_MODEL,
    show_default=False,
)
Model = Annotated[str, _model]
MaybeModel = Annotated[str | None, _model]
Architecture = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="timm's name for what a .safetensors file holds.", rich_help_panel=_MODEL),
]
ImageSize = Annotated[
    int | None,
    typer.Option(min=1, help="Pixels a side, for timm models that take several.", rich_help_panel=_MODEL),
]
Normalize = Annotated[
    Normalization | None,
    typer.Option(
        help="What a timm model's pixels are brought to, if not what timm says of its weights; half is from -1 to 1.",
        rich_help_panel=_MODEL,
    ),
]
LayerDecay = Annotated[
    float,
    typer.Option(
        help="Every block learns at this share of the next one's rate in fine-tuning: below 1, early ones stay as they were.",
        rich_help_panel=_MODEL,
    ),
]
Layer = Annotated[
    Any,
    typer.Option(
        "--layer",
        parser=_block_or_auto,
        metavar="NUMBER|auto",
        help="The block to explain, negative from the end; auto is the last whose patches still differ within images.",
        show_default="auto; of color, the first",
        rich_help_panel=_MODEL,
    ),
]
CountCls = Annotated[
    bool,
    typer.Option(
        "--cls/--no-cls", help="Whether the CLS token counts as a patch; in the paper it does.", rich_help_panel=_MODEL
    ),
]
Probe = Annotated[
    bool,
    typer.Option(
        "--probe",
        help="Fit a linear classifier on the labels first, for a model that has none.",
        rich_help_panel=_MODEL,
    ),
]
MovedModel = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="PATH", help="Where the run's model is now, if it has moved.", rich_help_panel=_MODEL
    ),
]
Pairs = Annotated[
    bool,
    typer.Option("--pairs/--no-pairs", help="Observe perturbed views as well, for stability.", rich_help_panel=_IMAGES),
]
FitRun = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="FOLDER",
        help="The folder of a `pace fit`.",
        show_default="the latest in runs/",
        autocompletion=_complete_run,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="For every random choice.", rich_help_panel=_RUN)]
BatchSize = Annotated[int, typer.Option(min=1, help="Images the model sees at once.", rich_help_panel=_RUN)]
Device = Annotated[
    str, typer.Option(metavar="auto|cpu|cuda", help="auto is a GPU if there is one.", rich_help_panel=_RUN)
]
Out = Annotated[
    str | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FOLDER",
        help="Where to write.",
        show_default="runs/<command>-<what>-<time>",
        rich_help_panel=_RUN,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        metavar="run.json",
        help="Repeat an earlier run; options given here replace its own.",
        callback=_repeat,
        is_eager=True,
        rich_help_panel=_RUN,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.", rich_help_panel=_RUN)]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error, and all warnings.", rich_help_panel=_RUN)
]
Concepts = Annotated[
    Any,
    typer.Option(
        "--concepts",
        "--n-concepts",
        "-k",
        parser=_number_or_auto,
        metavar="NUMBER|auto",
        help="How many concepts to look for; auto finds the number.",
    ),
]
Alpha = Annotated[
    str,
    typer.Option(
        metavar="NUMBER|learn",
        help="Prior weight of every concept in an image, in patches.",
    ),
]
