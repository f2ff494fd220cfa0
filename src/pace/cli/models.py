"""``--model``: from what was typed to a backbone, and from a run's record to the same backbone again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pace.atomic import write_atomically
from pace.cli.errors import Problem, line_of
from pace.cli.output import busy
from pace.cli.runs import Run, open_run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pace.backbones import Backbone
    from pace.images import ImageSet

CHECKPOINT = "model.safetensors"  # of a run of `pace finetune`
_HEAD = "head.safetensors"


@dataclass(frozen=True)
class ModelChoice:
    """A model as the options name it. `head` is a file that `keep_head` wrote."""

    name: str
    architecture: str | None = None
    image_size: int | None = None
    layer: int | Literal["auto"] | None = None  # None: "auto", or of the embedded model the one that suits it
    count_cls: bool = False
    head: str | None = None
    attention_layer: int | None = None  # None: the layer's own
    normalize: str | None = None  # None: what the model is said to expect


@dataclass(frozen=True)
class Subject:
    """The model to explain, at its layer, and what its classes are called, if that is known."""

    backbone: Backbone
    choice: ModelChoice
    class_names: tuple[str, ...] | None

    def record(self, class_names: Sequence[str] | None = None) -> dict[str, Any]:
        """What ``run.json`` keeps, enough to open the same model again and to notice another one."""
        return {
            **asdict(self.choice),
            "head": None if self.backbone.head is None else _HEAD,
            "fingerprint": self.backbone.fingerprint(),
            "preprocessing": asdict(self.backbone.preprocessing),
            "class_names": class_names or self.class_names,
        }

    def names_for(self, n_classes: int, images: ImageSet | None) -> tuple[str, ...] | None:
        """Names of the predicted classes: the model's own, or those of images with as many."""
        for names in (self.class_names, None if images is None else images.class_names):
            if names is not None and n_classes and len(names) == n_classes:
                return tuple(names)
        return None


def device_of(name: str) -> torch.device:
    with busy("starting"):  # the first to need torch, which takes seconds to load
        import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Problem(f"--device {name}: expected auto, cpu or cuda (or cuda:1, …)") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Problem(f"--device {name}: torch {torch.__version__} finds no GPU here; leave --device out or give cpu")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise Problem(f"--device {name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    try:
        torch.empty(1, device=device)
    except Exception as error:
        raise Problem(f"--device {name} cannot be used: {line_of(error)}") from None
    return device


def open_subject(
    choice: ModelChoice, device: torch.device, choose: Callable[[nn.Module], int] | None = None
) -> Subject:
    """`choose` finds the layer where the choice leaves it open; the last block's attention then weighs the tokens."""
    from pace.backbones import Backbone

    model, names = load_model(choice)
    model = model.float().to(device)
    layer, attention_layer = choice.layer, choice.attention_layer
    if layer is None:
        layer = _usual_layer(choice)
    if layer == "auto":
        assert choose is not None  # records have the number that was found
        layer, attention_layer = choose(model), -1
    head = None if choice.head is None else _read_head(Path(choice.head))
    backbone = Backbone(model, layer, head, choice.count_cls, attention_layer)
    kept = None if attention_layer is None else backbone.attention_layer
    opened = replace(choice, name=located(choice.name), layer=backbone.layer, attention_layer=kept)
    return Subject(backbone, opened, names)


def _usual_layer(choice: ModelChoice) -> int | Literal["auto"]:
    if choice.name == "color":
        from pace.backbones.color_vit import LAYER

        return LAYER
    return "auto"


def load_model(choice: ModelChoice) -> tuple[nn.Module, tuple[str, ...] | None]:
    """The model and the names of its classes, or one line that says why not."""
    with busy(f"loading {choice.name}"):
        try:
            return _open_model(choice)
        except Exception as error:
            if type(error) in (ValueError, FileNotFoundError, ModuleNotFoundError, Problem):
                raise  # these say what is wrong with the name or the file
            # Whatever the libraries raise: no network, no such repository, a damaged file.
            raise Problem(f"--model {choice.name} cannot be loaded: {' '.join(str(error).split())}") from error


def _open_model(choice: ModelChoice, pretrained: bool = True) -> tuple[nn.Module, tuple[str, ...] | None]:
    """Without `pretrained` the weights do not matter, and need not be fetched."""
    from pace.backbones import load

    path = Path(choice.name).expanduser()
    if choice.name == "color":
        from pace.backbones import color_vit

        own = {
            "--architecture": choice.architecture,
            "--image-size": choice.image_size,
            "--normalize": choice.normalize,
        }
        for option, given in own.items():
            if given is not None:
                raise Problem(f"{option}: the model color has its own; leave {option} out")
        return color_vit.load_model(), color_vit.class_names()
    folder = path if path.name != CHECKPOINT else path.parent
    if (folder / "run.json").is_file():
        if choice.normalize is not None:
            raise Problem(
                f"--normalize: {choice.name} was fine-tuned with its own normalisation; leave --normalize out"
            )
        return _finetuned(open_run(str(folder), "finetune"))
    if path.is_file() and path.suffix == ".safetensors" and not choice.architecture:
        raise Problem(f"{path}: which architecture is this? Say it with --architecture, as timm calls it")
    if choice.architecture and not path.is_file():
        raise FileNotFoundError(f"--architecture is for a file of weights, and there is no file {choice.name}")
    options: dict[str, Any] = {} if choice.image_size is None else {"img_size": choice.image_size}
    if choice.normalize is not None:
        options["normalize"] = choice.normalize
    by_name = not path.exists() and "/" not in choice.name
    if by_name and not pretrained:
        options["pretrained"] = False
    model = load(choice.name, model=choice.architecture, **options)
    return model, _known_names(model, by_name)


def _finetuned(run: Run) -> tuple[nn.Module, tuple[str, ...]]:
    """What `pace finetune` left: the architecture it began with, and the weights it ended with."""
    from pace.backbones import load_finetuned
    from pace.backbones.checkpoints import read_checkpoint

    base = run.record["model"]
    choice = ModelChoice(base["name"], base["architecture"], base["image_size"])
    if choice.architecture and Path(choice.name).suffix == ".safetensors":
        choice = replace(choice, name=choice.architecture, architecture=None)  # the first weights may be gone by now
    model, _ = _open_model(choice, pretrained=False)
    found = load_finetuned(model, run.file(CHECKPOINT))
    made_for = read_checkpoint(run.file(CHECKPOINT))[1]["preprocessing"]
    if made_for != _as_lists(asdict(found.preprocessing)):
        raise Problem(f"{run.folder}: {choice.name} now expects other images than it was fine-tuned with: {made_for}")
    return found.model, found.class_names


def _as_lists(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _known_names(model: Any, by_name: bool) -> tuple[str, ...] | None:
    """Class names that came with the model: those of its configuration, or ImageNet's for timm's own weights."""
    labels = getattr(getattr(model, "config", None), "id2label", None)
    if labels and not all(str(name).startswith("LABEL_") for name in labels.values()):
        return tuple(str(labels[number]) for number in sorted(labels))
    if by_name and hasattr(model, "pretrained_cfg"):
        from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

        if subset := infer_imagenet_subset(model):
            return tuple(ImageNetInfo(subset).label_descriptions())
    return None


def fit_probe(backbone: Backbone, images: ImageSet, batch_size: int) -> nn.Linear:
    """A linear classifier from the frozen model's pooled features to the labels."""
    import torch

    from pace.backbones import linear_probe
    from pace.images import normalize, to_float
    from pace.images.loading import decoded
    from pace.progress import progress

    if images.labels is None:
        raise Problem("--probe needs labels; expected a dataset or a folder of class folders")
    rows = range(len(images))
    chunks = [rows[start : start + batch_size] for start in rows[::batch_size]]
    features = []
    with progress("reading features", len(images)) as advance:
        for _, batch in decoded(images, chunks, backbone.preprocessing):
            pixels = to_float(batch.to(backbone.device))
            features.append(backbone.pooled(normalize(pixels, backbone.preprocessing)).cpu())
            advance(len(batch))
    with busy("fitting the probe"):
        return linear_probe(torch.cat(features), images.labels).to(backbone.device)


def keep_head(backbone: Backbone, run: Run) -> None:
    """A probe beside the run that uses it."""
    from safetensors.torch import save

    if backbone.head is not None:
        weights = {name: value.detach().cpu().contiguous() for name, value in backbone.head.state_dict().items()}  # type: ignore[union-attr]
        write_atomically(run.file(_HEAD), save(weights))


def _read_head(path: Path) -> nn.Linear:
    from safetensors.torch import load_file
    from torch.nn import Linear

    if not path.is_file():
        raise Problem(f"{path}: the run's linear classifier is missing")
    weights = load_file(path)
    n_classes, features = weights["weight"].shape
    head = Linear(features, n_classes)
    head.load_state_dict(weights)
    return head.eval().requires_grad_(False)


def reopen_subject(run: Run, device: torch.device, moved: str | None = None) -> Subject:
    """The model of a run, which must still be the same: an explanation of another one would mean nothing."""
    kept = run.record["model"]
    head = str(run.file(kept["head"])) if kept["head"] else None
    choice = ModelChoice(
        moved or kept["name"],
        kept["architecture"],
        kept["image_size"],
        kept["layer"],
        kept["count_cls"],
        head,
        kept.get("attention_layer"),  # which runs of the first versions did not have
        kept.get("normalize"),
    )
    try:
        subject = open_subject(choice, device)
    except FileNotFoundError as error:
        raise Problem(f"{line_of(error)}; if the model of {run.folder} has moved, say where with --model") from None
    if subject.backbone.fingerprint() != kept["fingerprint"]:
        raise Problem(
            f"{choice.name} is not the model that {run.folder} was made with: its weights, settings or architecture differ"
        )
    names = kept["class_names"]
    return replace(subject, class_names=None if names is None else tuple(names))


def located(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.resolve()) if name != "color" and path.exists() else name
