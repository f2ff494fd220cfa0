"""The options that commands share, each declared once, and the groups that commands take together.

A command takes a group as one parameter, a dataclass with one field per option; `with_options` expands it for typer.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass, replace
from enum import StrEnum
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from pace.cli.errors import Problem
from pace.cli.runs import DATASETS, read_record
from pace.fitting.parameters import PARAMETERS, Parameter

if TYPE_CHECKING:
    from pace.backbones import ModelChoice


_SHORT = {"n_concepts": ("-k",)}


class Normalization(StrEnum):
    imagenet = "imagenet"
    half = "half"
    clip = "clip"


def _complete_images(incomplete: str) -> Iterator[str]:
    yield from (name for name in DATASETS if name.startswith(incomplete))
    yield from (f"{folder}/" for folder in sorted(Path().glob(f"{incomplete}*")) if folder.is_dir())


def _complete_run(incomplete: str) -> Iterator[str]:
    yield from (str(file.parent) for file in sorted(Path().glob("runs/*/run.json")) if str(file).startswith(incomplete))


def _number_or_auto(given: object) -> int | str:
    text = str(given)
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise typer.BadParameter(f"expected a whole number or auto; found {text}") from None


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

Seed = Annotated[int, _run_option(min=0, help="Same seed, same result.")]


@dataclass(frozen=True)
class _Everywhere:
    """Options of every command, used by the app and `pace.cli.runs.running`."""

    out: Annotated[
        str | None,
        _run_option(
            "--out", "-o", metavar="FOLDER", help="Folder to write to.", show_default="runs/<command>-<what>-<time>"
        ),
    ] = None
    config: Annotated[
        str | None,
        _run_option(
            metavar="run.json",
            help="Repeat an earlier run; options given here replace its own.",
            callback=_repeat,
            is_eager=True,
        ),
    ] = None
    json: Annotated[bool, _run_option("--json", help="Print one JSON document, for programs.")] = False
    debug: Annotated[bool, _run_option("--debug", help="Show tracebacks of errors, and all warnings.")] = False


@dataclass(frozen=True)
class Compute:
    batch_size: Annotated[int, _run_option(min=1, help="Images in one forward pass of the model.")] = 64
    device: Annotated[str, _run_option(metavar="auto|cpu|cuda", help="auto uses a GPU if there is one.")] = "auto"


_images = _images_option(
    metavar="NAME|FOLDER",
    help="A dataset (color, flower, cars, cub) or a folder of images whose subfolders are classes.",
    autocompletion=_complete_images,
    show_default=False,
)
DataRoot = Annotated[
    str | None, _images_option(metavar="FOLDER", help="The folder with flower, cars or cub, as distributed.")
]
SkipUnreadable = Annotated[bool, _images_option("--skip-unreadable", help="Leave out images that cannot be read.")]
Pairs = Annotated[
    bool, _images_option("--pairs/--no-pairs", help="Also observe perturbed views of the images, to measure stability.")
]


@dataclass(frozen=True)
class ImageOptions:
    images: Annotated[str | None, _images] = None
    data_root: DataRoot = None
    split: Annotated[
        str | None,
        _images_option(
            help="Part of the dataset, such as train or test.",
            show_default="train; test to evaluate and report",
            autocompletion=lambda: ["train", "test"],
        ),
    ] = None
    limit: Annotated[int | None, _images_option(min=1, help="Use a random sample of this many images.")] = None
    skip_unreadable: SkipUnreadable = False
    seed: Seed = 0


@dataclass(frozen=True)
class RequiredImages(ImageOptions):
    images: Annotated[str, _images]


_model = _model_option(
    metavar="NAME|PATH",
    help="A timm or Hugging Face name, a .safetensors file, a folder of `pace finetune`, or color.",
    show_default=False,
)
Model = Annotated[str, _model]
MaybeModel = Annotated[str | None, _model]
MovedModel = Annotated[
    str | None, _model_option("--model", metavar="PATH", help="Where the run's model is, if it has moved.")
]
Probe = Annotated[
    bool, _model_option("--probe", help="First fit a linear classifier on the labels, for a model without one.")
]
LayerDecay = Annotated[
    float,
    _model_option(help="Learning rate of each block as a share of the next one's; below 1, early blocks change less."),
]


@dataclass(frozen=True)
class LoadOptions:
    architecture: Annotated[
        str | None, _model_option(metavar="NAME", help="timm's name for the weights in a .safetensors file.")
    ] = None
    image_size: Annotated[
        int | None, _model_option(min=1, help="Pixels per side, for timm models that take several sizes.")
    ] = None
    normalize: Annotated[
        Normalization | None,
        _model_option(help="How a timm model's pixels are normalised, if not as timm says; half is from -1 to 1."),
    ] = None

    def choice(self, model: str) -> ModelChoice:
        from pace.backbones import ModelChoice

        return ModelChoice(model, self.architecture, self.image_size, self.normalize)


@dataclass(frozen=True)
class LayerOptions(LoadOptions):
    layer: Annotated[
        Any,
        _model_option(
            parser=_number_or_auto,
            metavar="NUMBER|auto",
            help="Block to explain, negative from the end; auto is the last one whose patches differ within images.",
            show_default="auto; for color, the first",
        ),
    ] = None
    cls: Annotated[bool, _model_option("--cls/--no-cls", help="Count CLS as a patch, as the paper does.")] = False

    def choice(self, model: str) -> ModelChoice:
        return replace(super().choice(model), layer=self.layer, count_cls=self.cls)


FitFolder = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="FOLDER",
        help="Folder of a `pace fit`.",
        show_default="the latest in runs/",
        autocompletion=_complete_run,
    ),
]
Bootstrap = Annotated[int, typer.Option(min=0, help="Bootstrap samples for the intervals.")]


def _estimator_option(parameter: Parameter) -> tuple[str, Any, None]:
    """A field for a parameter of PACE; None leaves its default."""
    words = re.findall(r"'(\w+)'", parameter.expected)

    def parse(given: object) -> Any:
        value = _literal(str(given))
        if not parameter.accepts(value):
            raise typer.BadParameter(f"expected {parameter.expected}; found {given}")
        return value

    switch = "/" in str(parameter.option)
    how: dict[str, Any] = {} if switch else {"parser": parse, "metavar": parameter.metavar or "|".join(words)}
    option = typer.Option(
        parameter.option,
        *_SHORT.get(parameter.name, ()),
        help=parameter.help,
        show_default=False if parameter.default is None else str(parameter.default),
        autocompletion=lambda incomplete: [word for word in words if word.startswith(incomplete)],
        rich_help_panel="Concepts",
        **how,
    )
    return parameter.name, Annotated[bool | None if switch else Any, option], None


def _literal(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


# One field for every parameter of PACE with an option of its own; --seed and --device are shared with other commands.
EstimatorOptions: Any = make_dataclass(
    "EstimatorOptions",
    [_estimator_option(p) for p in PARAMETERS.values() if p.option and p.name not in ("seed", "device")],
    frozen=True,
)


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as typer needs it: one parameter for each field of its groups, and the options of every command."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    expanded: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            expanded += _fields_of(groups[name], parameter.default)
        else:
            expanded.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
    everywhere = _fields_of(_Everywhere, inspect.Parameter.empty)

    @wraps(command)
    def run(**values: Any) -> Any:
        for option in everywhere:
            del values[option.name]
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    expanded += everywhere
    run.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in expanded}
    return run


def _fields_of(group: Any, defaults: Any) -> list[inspect.Parameter]:
    """The group's fields as parameters, with the values of the instance `defaults` if there is one."""
    hints = get_type_hints(group, include_extras=True)
    found = []
    for field in fields(group):
        default = field.default if defaults is inspect.Parameter.empty else getattr(defaults, field.name)
        found.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=hints[field.name],
            )
        )
    return found
