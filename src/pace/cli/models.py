"""``--model`` and ``--device``: open a model as the options name it, and open a run's model again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pace.cli.errors import Problem, line_of
from pace.cli.output import busy
from pace.cli.runs import Run, open_run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pace.backbones import Backbone, ModelChoice
    from pace.images import ImageSet

CHECKPOINT = "model.safetensors"  # of a run of `pace finetune`
_HEAD = "head.safetensors"


@dataclass(frozen=True)
class OpenedModel:
    """A model at its layer, with the names of its classes if they are known."""

    backbone: Backbone
    choice: ModelChoice
    class_names: tuple[str, ...] | None

    def record(self) -> dict[str, Any]:
        """For ``run.json``: enough to open the same model again, and to notice another one."""
        return {
            **asdict(self.choice),
            "head": None if self.backbone.head is None else _HEAD,
            "fingerprint": self.backbone.fingerprint(),
            "preprocessing": asdict(self.backbone.preprocessing),
            "class_names": self.class_names,
        }

    def save_head(self, run: Run) -> None:
        """Save a probe in the run that uses it."""
        from pace.backbones.heads import save_probe

        if self.backbone.head is not None:
            save_probe(self.backbone.head, run.file(_HEAD))  # type: ignore[arg-type]

    def names_for(self, n_classes: int, images: ImageSet) -> tuple[str, ...] | None:
        """Names of the predicted classes: the model's own, or those of the images if there are as many."""
        for names in (self.class_names, images.class_names):
            if names is not None and n_classes and len(names) == n_classes:
                return tuple(names)
        return None


def device_of(name: str) -> torch.device:
    with busy("starting"):  # importing torch takes seconds
        import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Problem(f"--device {name}: expected auto, cpu or cuda (or cuda:1, …)") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Problem(f"--device {name}: torch {torch.__version__} finds no GPU here; leave --device out or use cpu")
    try:
        torch.empty(1, device=device)
    except Exception as error:
        raise Problem(f"--device {name} cannot be used: {line_of(error)}") from None
    return device


def load_model(choice: ModelChoice) -> tuple[nn.Module, tuple[str, ...] | None]:
    """The model and the names of its classes."""
    from pace.backbones import open_model

    path = Path(choice.name).expanduser()
    folder = path.parent if path.name == CHECKPOINT else path
    with busy(f"loading {choice.name}"):
        if not (folder / "run.json").is_file():
            return open_model(choice)
        if choice.normalize is not None:
            raise Problem(f"--normalize: {choice.name} was fine-tuned with its own normalisation; leave it out")
        return _finetuned(open_run(str(folder), "finetune"))


def _finetuned(run: Run) -> tuple[nn.Module, tuple[str, ...]]:
    """The architecture that `pace finetune` started from, with the weights it ended with."""
    from pace.backbones import ModelChoice, load_finetuned, open_model

    base = run.record["model"]
    choice = ModelChoice(base["name"], base["architecture"], base["image_size"])
    if choice.architecture and Path(choice.name).suffix == ".safetensors":
        choice = replace(choice, name=choice.architecture, architecture=None)  # the first weights may be gone by now
    model, _ = open_model(choice, pretrained=False)
    found = load_finetuned(model, run.file(CHECKPOINT))
    return found.model, found.class_names


def open_model_at_layer(
    choice: ModelChoice,
    device: torch.device,
    choose_layer: Callable[[nn.Module], int] | None = None,
    head: nn.Module | None = None,
) -> OpenedModel:
    """`choose_layer` is asked where the choice leaves the layer open."""
    from pace.backbones import open_backbone

    model, names = load_model(choice)
    backbone = open_backbone(model, choice, device, choose_layer, head)
    opened = replace(choice, name=located(choice.name), layer=backbone.layer, attention_layer=backbone.attention_layer)
    return OpenedModel(backbone, opened, names)


def reopen_model(run: Run, device: torch.device, moved: str | None = None) -> OpenedModel:
    """The model of a run, which must still be the same: explanations of another one would be meaningless."""
    from pace.backbones import ModelChoice
    from pace.backbones.heads import load_probe

    kept = run.record["model"]
    choice = ModelChoice(**{field.name: kept[field.name] for field in fields(ModelChoice)})
    try:
        head = load_probe(run.file(kept["head"])) if kept["head"] else None
        model = open_model_at_layer(replace(choice, name=moved or choice.name), device, head=head)
    except FileNotFoundError as error:
        raise Problem(f"{line_of(error)}; if the model of {run.folder} has moved, say where with --model") from None
    if model.backbone.fingerprint() != kept["fingerprint"]:
        raise Problem(
            f"{model.choice.name} is not the model that {run.folder} was made with: its weights, settings or "
            "architecture differ"
        )
    names = kept["class_names"]
    return replace(model, class_names=None if names is None else tuple(names))


def located(name: Any) -> str:
    path = Path(name).expanduser()
    return str(path.resolve()) if name != "color" and path.exists() else str(name)
