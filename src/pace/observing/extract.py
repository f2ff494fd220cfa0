"""From images to observations: decoding, copying and storing run beside the model, which sets the pace."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pace.images import Perturb, Perturbation, PreprocessingLike, normalize
from pace.images.imageset import OnError
from pace.observations import Batch, Observations
from pace.observing.pipeline import Behind, Link, Team, ahead, fresh, uploaded
from pace.observing.sources import Images, Source, open_source
from pace.observing.store import StoreWriter, check, extremes, trusted
from pace.progress import progress as progress_bar


class BackboneLike(Protocol):
    """What extraction asks of a backbone."""

    @property
    def layer(self) -> int: ...
    @property
    def prefix_tokens(self) -> int: ...
    @property
    def preprocessing(self) -> PreprocessingLike: ...
    @property
    def device(self) -> torch.device: ...
    def grid(self, height: int, width: int) -> tuple[int, int]: ...
    def fingerprint(self) -> str: ...
    def __call__(self, images: Tensor) -> Batch: ...


def observe(
    backbone: BackboneLike,
    images: Images,
    *,
    perturb: Perturb | bool | None = None,
    seed: int = 0,
    batch_size: int = 64,
    store: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    data_root: str | os.PathLike[str] | None = None,
    split: str = "train",
    on_error: OnError = "raise",
    workers: int | None = None,
    progress: bool | None = None,
) -> Observations:
    """What the backbone says about every image, in order.

    Parameters
    ----------
    images
        A tensor (M, 3, H, W), float in [0, 1] or uint8, at a size the model takes; a DataLoader of such batches or of
        pairs that begin with one; an `ImageSet`, which is resized and cropped as the model wants; or what
        `pace.images.open_images` opens: a dataset's name (with `data_root` and `split`) or a folder.
    perturb
        Observe the perturbed view of the same images: True for the paper's perturbation with `seed`, or any
        ``perturb(batch, indices)`` on images in [0, 1].
    store
        A folder to keep the observations in instead of memory; what is there already is not computed again.
    device
        Where images are perturbed and normalised; by default where the model is.
    on_error
        For a dataset's name or a folder: "raise" stops at an image that cannot be read; "skip" reads every file once
        beforehand and leaves such images out with a warning. The rows are then those of `open_images` with "skip".
    workers
        How many threads decode images, or processes where a GPU has to be kept busy; by default as many as help.
    progress
        Show a bar; by default only on a terminal and when it takes longer than a second.
    """
    views = [(_perturbation(perturb, seed), store)]
    return _extract(backbone, images, views, batch_size, device, data_root, split, on_error, workers, progress)[0]


def observe_pair(
    backbone: BackboneLike,
    images: Images,
    *,
    perturb: Perturb | bool = True,
    seed: int = 0,
    batch_size: int = 64,
    store: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    data_root: str | os.PathLike[str] | None = None,
    split: str = "train",
    on_error: OnError = "raise",
    workers: int | None = None,
    progress: bool | None = None,
) -> tuple[Observations, Observations]:
    """The images as they are and perturbed, decoded once. `store` gets the folders ``original`` and ``perturbed``.

    The other options are those of `observe`.
    """
    if not perturb:
        raise ValueError(f"perturb: expected True or a perturbation; found {perturb!r}")
    original, perturbed = (None, None) if store is None else (Path(store) / "original", Path(store) / "perturbed")
    views = [(None, original), (_perturbation(perturb, seed), perturbed)]
    pair = _extract(backbone, images, views, batch_size, device, data_root, split, on_error, workers, progress)
    return pair[0], pair[1]


def _extract(
    backbone: BackboneLike,
    images: Images,
    views: Sequence[tuple[Perturb | None, str | os.PathLike[str] | None]],
    batch_size: int,
    device: torch.device | str | None,
    data_root: str | os.PathLike[str] | None,
    split: str,
    on_error: OnError,
    workers: int | None,
    progress: bool | None,
) -> list[Observations]:
    if batch_size < 1:
        raise ValueError(f"batch_size: expected 1 or more; found {batch_size}")
    device = backbone.device if device is None else torch.device(device)
    team = Team(for_gpu=device.type == "cuda")
    link = Link(device, team)
    ordered = any(perturb is not None or store is not None for perturb, store in views)
    source = open_source(
        images, backbone.preprocessing, batch_size, data_root, split, on_error, workers, ordered, link.cuda
    )
    grid = backbone.grid(*source.size)
    with ExitStack() as stack:
        stack.enter_context(team)
        sinks: list[_Memory | StoreWriter] = [
            _Memory(source.total, grid, backbone.prefix_tokens, team)
            if store is None
            else stack.enter_context(
                StoreWriter(
                    store,
                    fingerprint=_facts(backbone, source, perturb),
                    total=source.total,
                    grid=grid,
                    prefix_tokens=backbone.prefix_tokens,
                )
            )
            for perturb, store in views
        ]
        gaps = [sink.gaps for sink in sinks]
        spans = _spans(gaps)
        have = 0 if source.total is None else source.total - sum(len(span) for span in spans)
        advance = stack.enter_context(progress_bar("observing", source.total, progress, have))
        behind = stack.enter_context(Behind(backbone.device))
        batches = stack.enter_context(closing(ahead(uploaded(source.batches(spans), link))))
        for start, upload in batches:
            batch = upload()
            for (perturb, _), sink, missing in zip(views, sinks, gaps, strict=True):
                if any(start in gap for gap in missing):
                    view = batch if perturb is None else perturb(batch, torch.arange(start, start + len(batch)))
                    result = backbone(normalize(view, backbone.preprocessing))
                    behind.keep(partial(_keep, sink, start), *result, extremes(result.embeddings))
            advance(len(batch))
        behind.wait()
        return [sink.finish(source.total).observations() for sink in sinks]


def _perturbation(perturb: Perturb | bool | None, seed: int) -> Perturb | None:
    if perturb is None or perturb is False:
        return None
    return Perturbation(seed) if perturb is True else perturb


def _facts(backbone: BackboneLike, source: Source, perturb: Perturb | None) -> dict[str, str]:
    """What a store must not mix."""
    if perturb is not None and not hasattr(perturb, "fingerprint"):
        raise ValueError("perturb: needs a method fingerprint() for its observations to be stored")
    return {
        "model": backbone.fingerprint(),
        "layer": str(backbone.layer),
        "preprocessing": str(backbone.preprocessing),
        "images": source.fingerprint(),
        "perturbation": "none" if perturb is None else perturb.fingerprint(),
    }


def _spans(gaps: Sequence[Sequence[range]]) -> list[range]:
    """The images that some view lacks, cut wherever a view changes between having and lacking them."""
    edges = sorted({edge for missing in gaps for gap in missing for edge in (gap.start, gap.stop)})
    return [range(*span) for span in pairwise(edges) if any(span[0] in gap for missing in gaps for gap in missing)]


def _keep(sink: _Memory | StoreWriter, start: int, result: Sequence[Any]) -> None:
    *batch, bounds = result
    sink.append(start, Batch(*batch), bounds)


class _Memory:
    """Observations in memory, filled batch by batch."""

    def __init__(self, total: int | None, grid: tuple[int, int], prefix_tokens: int, team: Team) -> None:
        self.gaps = [range(sys.maxsize if total is None else total)]
        self._capacity = total or 0
        self._count = 0
        self._grid, self._prefix_tokens = grid, prefix_tokens
        self._team = team
        self._parts: list[Tensor | None] = []

    def append(self, start: int, batch: Batch, bounds: Tensor) -> None:
        check(start, batch, bounds, self._grid, self._prefix_tokens)  # beside the model, rather than all at the end
        stop = start + len(batch.embeddings)
        if not self._parts or stop > self._capacity:
            self._capacity = max(self._capacity, stop, 2 * self._count)
            self._parts = [self._room(number, part) for number, part in enumerate(batch)]
        for room, part in zip(self._parts, batch, strict=True):
            if room is not None and part is not None:
                self._team.copy(room[start:stop], part)
        self._count = stop

    def _room(self, number: int, part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        room = fresh((self._capacity, *part.shape[1:]), part.dtype)
        if self._count:
            self._team.copy(room[: self._count], self._parts[number][: self._count])  # type: ignore[index]
        return room

    def finish(self, total: int | None) -> _Memory:
        return self

    def observations(self) -> Observations:
        embeddings, attention, predictions = (None if part is None else part[: self._count] for part in self._parts)
        return trusted(embeddings, attention, predictions, self._grid, self._prefix_tokens)
