"""The files of a fine-tuning run: the best weights, and what a killed run needs to resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pace.atomic import write_atomically
from pace.backbones.training import Epoch, Trainer, best_epoch

_FORMAT = "pace-finetuned-1"


class Checkpoints:
    """Writes nothing if `path` is None. `about` describes the model; `recipe` must be the same when a run resumes."""

    def __init__(self, path: Path | None, about: dict[str, Any], recipe: dict[str, Any]) -> None:
        self.path, self._about, self._recipe = path, about, recipe
        if path is None:
            return
        if path.suffix != ".safetensors":
            raise ValueError(f"checkpoint: expected a name that ends in .safetensors; found {path.name}")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"checkpoint: there is no folder {path.parent}")
        self._resume = path.with_suffix(".resume.safetensors")
        for file in (path, self._resume):
            if file.exists():
                self._refuse_other(file)

    def restore(self, trainer: Trainer) -> list[Epoch]:
        """Bring the trainer to where it stopped; returns the finished epochs."""
        if self.path is None or not self.path.exists():
            return []
        weights, metadata = read_checkpoint(self.path)
        if metadata["finished"]:
            trainer.model.load_state_dict(weights)
        elif self._resume.exists():
            state, metadata = read_checkpoint(self._resume)
            trainer.best = weights
            trainer.restore(state, metadata["step"])
        else:
            return []  # killed between the two files of the first epoch
        return [Epoch(*epoch) for epoch in metadata["history"]]

    def keep(self, trainer: Trainer, history: Sequence[Epoch]) -> None:
        """After an epoch. The best weights first: if killed in between, this epoch is repeated and written again."""
        if best_epoch(history) == len(history) - 1:
            trainer.best = trainer.weights()
            if self.path is not None:
                self._write(self.path, trainer.best, history, finished=False)
        if self.path is not None:
            self._write(self._resume, trainer.state(), history, step=trainer.step)

    def finish(self, trainer: Trainer, history: Sequence[Epoch]) -> None:
        if trainer.best is None:  # it was finished before
            return
        trainer.model.load_state_dict(trainer.best)
        if self.path is not None:
            self._write(self.path, trainer.best, history, finished=True)
            self._resume.unlink(missing_ok=True)

    def _write(self, path: Path, tensors: dict[str, Tensor], history: Sequence[Epoch], **more: Any) -> None:
        from safetensors.torch import save

        accuracy = history[best_epoch(history)].accuracy
        metadata = {"format": _FORMAT, **self._about, "accuracy": accuracy, "history": history, "recipe": self._recipe}
        # One entry, since safetensors writes several in varying order.
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_atomically(path, save(contiguous, {"pace": json.dumps(metadata | more)}))

    def _refuse_other(self, path: Path) -> None:
        found = read_checkpoint(path)[1]["recipe"]
        differs = [
            f"{key} was {found.get(key)}, now {new}" for key, new in self._recipe.items() if found.get(key) != new
        ]
        if differs:
            raise ValueError(
                f"{path} belongs to another run: {'; '.join(differs)}; name another checkpoint for this one"
            )


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no fine-tuned model at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("pace", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} was not written by finetune")
    return tensors, metadata
