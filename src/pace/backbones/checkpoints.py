"""The files of a fine-tuning run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pace.atomic import write_atomically
from pace.backbones.training import Epoch, Run, best_of

_FORMAT = "pace-finetuned-1"


class Checkpoints:
    """The best weights, and what a killed run needs to go on. Each file is replaced whole."""

    def __init__(self, path: Path | None, about: dict[str, Any], recipe: dict[str, Any]) -> None:
        self.path, self._about, self._recipe = path, about, recipe
        if path is None:
            return
        if path.suffix != ".safetensors":
            raise ValueError(f"checkpoint: expected a name that ends in .safetensors; found {path.name}")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"checkpoint: there is no folder {path.parent}")
        for file in (path, self._resume):
            if file.exists():
                self._refuse_other(file)

    @property
    def _resume(self) -> Path:
        assert self.path is not None
        return self.path.with_suffix(".resume.safetensors")

    def restore(self, run: Run) -> list[Epoch]:
        """Put the run where it was; returns the epochs behind it."""
        if self.path is None or not self.path.exists():
            return []
        weights, metadata = read_checkpoint(self.path)
        if metadata["finished"]:
            run.model.load_state_dict(weights)
            return [Epoch(*epoch) for epoch in metadata["history"]]
        if not self._resume.exists():
            return []  # killed after the first weights and before the first state: nothing to go on from
        state, metadata = read_checkpoint(self._resume)
        run.best = weights
        run.restore(state, metadata["step"])
        return [Epoch(*epoch) for epoch in metadata["history"]]

    def keep(self, run: Run, history: Sequence[Epoch]) -> None:
        """After an epoch. The weights come first: a kill in between repeats this epoch and writes them again."""
        if best_of(history) == len(history) - 1:
            run.best = run.weights()
            if self.path is not None:
                self._write(self.path, run.best, history, finished=False)
        if self.path is not None:
            self._write(self._resume, run.state(), history, step=run.step)

    def finish(self, run: Run, history: Sequence[Epoch]) -> None:
        if run.best is None:  # a finished run was found
            return
        run.model.load_state_dict(run.best)
        if self.path is not None:
            self._write(self.path, run.best, history, finished=True)
            self._resume.unlink(missing_ok=True)

    def _write(self, path: Path, tensors: dict[str, Tensor], history: Sequence[Epoch], **more: Any) -> None:
        from safetensors.torch import save

        metadata = {
            "format": _FORMAT,
            **self._about,
            "accuracy": history[best_of(history)].accuracy,
            "history": history,
            "recipe": self._recipe,
            **more,
        }
        # One entry, since safetensors writes several in an order that changes.
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_atomically(path, save(contiguous, {"pace": json.dumps(metadata)}))

    def _refuse_other(self, path: Path) -> None:
        found = read_checkpoint(path)[1]["recipe"]
        differs = [
            f"{key} was {found.get(key)}, now {value}" for key, value in self._recipe.items() if found.get(key) != value
        ]
        if differs:
            raise ValueError(
                f"{path} belongs to another run: {'; '.join(differs)}. Name another checkpoint for this one"
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
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} was not written by finetune (or by another version of it)")
    return tensors, metadata
