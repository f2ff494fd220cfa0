"""The options that commands share, each declared once, and the groups that commands take together.

A command takes a group as one parameter, a dataclass with one field per option; `with_options` expands it for typer.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from pace.cli.errors import Problem
from pace.cli.runs import read_record
from pace.fitting.parameters import PARAMETERS, Parameter


def _literal(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _parser(expected: str, accepts: Callable[[Any], bool]) -> Callable[[object], Any]:
    def parse(given: object) -> Any:
        value = _literal(str(given))
        if not accepts(value):
            raise typer.BadParameter(f"expected {expected}; found {given}")
        return value

    return parse


def _layer(given: object) -> Any:
    if given == "auto" or isinstance(given, (int, tuple)):
        return given
    try:
        numbers = [int(part) for part in (given if isinstance(given, list) else str(given).split(","))]
    except ValueError:
        raise typer.BadParameter(f"expected a block, two by a comma, or auto; found {given}") from None
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def _repeat(ctx: typer.Context, file: str | None) -> str | None:
    """--config: the options of an earlier run become the defaults."""
    if file is not None and not ctx.resilient_parsing:
        record = read_record(Path(file))
        if record["command"] != ctx.info_name:
            raise Problem(f"--config {file} is a run of `pace {record['command']}`; this is `pace {ctx.info_name}`")
        ctx.default_map = {name: value for name, value in record["configuration"].items() if value is not None}
    return file


# The headings of --help. Options without one are the command's own.
_images_option = partial(typer.Option, rich_help_panel="Images")
_model_option = partial(typer.Option, rich_help_panel="Model")
_run_option = partial(typer.Option, rich_help_panel="Run")

_OUT = _run_option("--out", "-o", metavar="FOLDER", help="Folder to write to.", show_default="a new one in runs/")
_CONFIG = _run_option(
    metavar="run.json", help="Repeat this run; other options replace its own.", callback=_repeat, is_eager=True
)
Seed = Annotated[int, _run_option(min=0, help="Same seed, same result.")]
Device = Annotated[str, _run_option(metavar="auto|cpu|cuda|mps", help="auto uses a GPU if there is one.")]


@dataclass(frozen=True)
class _Everywhere:
    """Options of every command, used by the app."""

    json: Annotated[bool, _run_option("--json", help="Print one JSON document, for programs.")] = False
    debug: Annotated[bool, _run_option("--debug", help="Show tracebacks of errors, and all warnings.")] = False


@dataclass(frozen=True)
class _Folder:
    """Of every command that makes a folder, used by `pace.cli.runs.running`."""

    out: Annotated[str | None, _OUT] = None
    config: Annotated[str | None, _CONFIG] = None


@dataclass(frozen=True)
class Compute:
    batch_size: Annotated[int, _run_option(min=1, help="Images in one forward pass of the model.")] = 64
    device: Device = "auto"


_IMAGES = _images_option(
    metavar="FOLDER|NAME", help="A folder of photos, where subfolders are classes; or color, birds, flower, cars, cub."
)
_SPLIT = _images_option(
    metavar="NAME", help="Such as train or test.", show_default="train; test to evaluate and report"
)
DataRoot = Annotated[str | None, _images_option(metavar="FOLDER", help="The folder with flower, cars or cub.")]
Keep = Annotated[
    bool, _images_option("--keep/--no-keep", help="Keep what the model saw in the run, for later commands.")
]
SkipUnreadable = Annotated[bool, _images_option("--skip-unreadable", help="Leave out images that cannot be read.")]
MaxPixels = Annotated[
    int | None,
    _images_option(
        "--max-pixels",
        min=1,
        help="Refuse images with more pixels.",
        show_default="89478485; 60000000 unless JPEG, PNG, GIF or BMP",
    ),
]
Pairs = Annotated[
    bool,
    _images_option(
        "--pairs/--no-pairs", help="Also look at each image cropped, mirrored and recoloured, for stability."
    ),
]


@dataclass(frozen=True)
class ImageOptions:
    images: Annotated[str | None, _IMAGES] = None
    data_root: DataRoot = None
    split: Annotated[str | None, _SPLIT] = None
    limit: Annotated[int | None, _images_option(min=1, help="Use a random sample of this many images.")] = None
    skip_unreadable: SkipUnreadable = False
    max_pixels: MaxPixels = None
    seed: Seed = 0


@dataclass(frozen=True)
class RequiredImages(ImageOptions):
    images: Annotated[str, _IMAGES] = ...  # type: ignore[assignment]  # how typer is told that it is required


_MODEL = _model_option(
    metavar="NAME|PATH",
    help="A timm, torchvision or Hugging Face name, a file of weights, a run of `pace finetune`, color or birds.",
)
Model = Annotated[str, _MODEL]
MaybeModel = Annotated[str | None, _MODEL]
_HEAD = _model_option(
    metavar="probe|knn|clusters",
    help="For models without a classifier: a linear probe or k-NN on the labels, or clusters of the model's own features.",
)
_CLASSES = _model_option(metavar="FILE", help="Names of the model's classes, one in a line; a CLIP predicts them.")
LayerDecay = Annotated[float, _model_option(help="Learning rate of a block, as a share of the next one's.")]
_ARCHITECTURE = _model_option(metavar="NAME", help="What the weights in a file are of, where they do not tell.")
_SIZE = _model_option(min=1, help="Pixels per side; position embeddings are resized.")
_NORMALIZE = _model_option(metavar="imagenet|half|clip", help="How pixels are normalised, if not as usual.")
_LAYER = _model_option(
    parser=_layer,
    metavar="BLOCKS|auto",
    help="Block to explain, negative from the end; or two, 8,11: for parts and for kinds.",
    show_default="auto; for color, the first",
)


@dataclass(frozen=True)
class LoadOptions:
    """Fields of `pace.backbones.ModelChoice`, as are those of `LayerOptions`."""

    architecture: Annotated[str | None, _ARCHITECTURE] = None
    image_size: Annotated[int | None, _SIZE] = None
    normalize: Annotated[str | None, _NORMALIZE] = None


@dataclass(frozen=True)
class LayerOptions(LoadOptions):
    layer: Annotated[Any, _LAYER] = None
    count_cls: Annotated[bool, _model_option("--cls/--no-cls", help="Count CLS as a patch, as the paper does.")] = False


@dataclass(frozen=True)
class HeadOptions:
    """Predictions for a model without a classifier, and the names of the classes for any."""

    head: Annotated[str | None, _HEAD] = None
    classes: Annotated[str | None, _CLASSES] = None


RUN = typer.Option("--run", metavar="FOLDER", help="Folder of a `pace fit`.", show_default="the latest in runs/")
_MOVED = _model_option("--model", metavar="PATH", help="Where the run's model is, if it has moved.")
Bootstrap = Annotated[int, typer.Option(min=0, help="Bootstrap samples for the intervals.")]
HiddenImages = Annotated[int, typer.Option(min=0, help="Test images whose concepts are removed and added; 0 for none.")]


@dataclass(frozen=True)
class FitOptions(Compute):
    """The fit to use, and where to run its model."""

    fit_run: Annotated[str | None, RUN] = None
    moved: Annotated[str | None, _MOVED] = None


def _estimator_option(parameter: Parameter) -> tuple[str, Any, None]:
    """A field for a parameter of PACE; None leaves its default."""
    kind: Any = bool | None  # a switch
    how: dict[str, Any] = {}
    if "/" not in str(parameter.option):
        kind = Any
        words = re.findall(r"'(\w+)'", parameter.expected)
        how["parser"] = _parser(parameter.expected, parameter.accepts)
        how["metavar"] = parameter.metavar or "|".join(words)
    option = typer.Option(
        parameter.option,
        *(["-k"] if parameter.name == "n_concepts" else []),
        help=parameter.help,
        show_default=False if parameter.default is None else str(parameter.default),
        rich_help_panel="Concepts",
        **how,
    )
    return parameter.name, Annotated[kind, option], None


# One field for every parameter of PACE with an option of its own; --seed and --device are shared with other commands.
EstimatorOptions: Any = make_dataclass(
    "EstimatorOptions",
    [_estimator_option(p) for p in PARAMETERS.values() if p.option and p.name not in ("seed", "device")],
    frozen=True,
)


def with_options(command: Callable[..., Any], makes_folder: bool) -> Callable[..., Any]:
    """The command as typer needs it: one parameter for each field of its groups, and the options of every command."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    everywhere = [*(_parameters(_Folder()) if makes_folder else ()), *_parameters(_Everywhere())]
    expanded: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            expanded += _parameters(groups[name]() if parameter.default is parameter.empty else parameter.default)
        else:
            expanded.append(parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY))
    expanded += everywhere

    @wraps(command)
    def run(**values: Any) -> Any:
        for option in everywhere:
            del values[option.name]
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    for parameter in expanded:
        option = getattr(parameter.annotation, "__metadata__", [None])[0]
        if option is not None and option.metavar is None:  # typer would say <int range>
            option.metavar = "NUMBER" if re.search(r"\b(int|float)\b", str(parameter.annotation)) else "TEXT"
    run.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in expanded}
    return run


def _parameters(group: Any) -> list[inspect.Parameter]:
    """One for each field of the group, whose values are the defaults."""
    hints = get_type_hints(type(group), include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(group, field.name),
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
