"""`observe` and `observe_pair`: images through a backbone, into memory or a store.

Decoding, copying and storing run beside the model, which never waits for them unless they are slower than it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pace.images import ImageSet, Perturb, Perturbation, normalize
from pace.images.imageset import OnError
from pace.images.perturb import Indices
from pace.observations import Batch, Device, Observations, Rows
from pace.observing.pipeline import Behind, uploaded
from pace.observing.sources import BackboneLike, Images, Source, open_source, origin_of
from pace.observing.store import Index, StoreWriter, check, extremes
from pace.progress import progress as progress_bar

_READ = 256  # images read from a store at a time
ORIGINAL, PERTURBED = "original", "perturbed"  # folders of the two views


class Known(NamedTuple):
    """Images that are decoded already and were seen: places by number, pixels (uint8), observations of both views."""

    places: dict[int, int]
    pixels: Tensor
    views: tuple[Observations, Observations]


_View = tuple[Perturb | None, Path | None]  # how the images are perturbed, and the folder their observations go to


def observe(
    backbone: BackboneLike,
    images: Images,
    *,
    perturb: Perturb | bool | None = None,
    seed: int = 0,
    batch_size: int = 64,
    store: str | PathLike[str] | None = None,
    data_root: str | PathLike[str] | None = None,
    split: str = "train",
    on_error: OnError = "raise",
    workers: int | None = None,
    progress: bool | None = None,
) -> Observations:
    """The backbone's observations of every image, in order.

    Parameters
    ----------
    images
        A file, a folder, a dataset's name (with `data_root` and `split`), an `ImageSet`; a Pillow image, an array (h, w, 3)
        or a tensor (3, h, w), float in [0, 1] or uint8; a list of any of these. They are resized and cropped as the model
        needs. A batch, (M, 3, H, W) as a tensor or (M, H, W, 3) as an array, and a DataLoader of tensors or of pairs that begin
        with one, are taken as they are: at a size the model takes.
    perturb
        Observe the perturbed view of the same images: True for the paper's perturbation with `seed`, or any
        ``perturb(batch, indices)`` on images in [0, 1]. If it has a method ``crops(indices, size)``, as the paper's
        has, the observations have `crops`.
    store
        A folder to keep the observations in instead of memory; what is there already is not computed again.
    on_error
        For a dataset's name or a folder: "raise" stops at an image that cannot be read; "skip" reads every file once
        beforehand and leaves such images out with a warning. The rows are then those of `open_images` with "skip".
    workers
        How many threads decode images, or processes for a GPU; by default as many as help.
    progress
        Show a progress bar; by default only on a terminal and when it takes longer than a second.
    """
    source = open_source(images, backbone, batch_size, workers, data_root, split, on_error)
    view = perturbation(perturb, seed) if perturb else None, None if store is None else Path(store)
    return _extract(backbone, source, [view], progress)[0]


def observe_pair(
    backbone: BackboneLike,
    images: Images,
    *,
    perturb: Perturb | bool = True,
    seed: int = 0,
    batch_size: int = 64,
    store: str | PathLike[str] | None = None,
    data_root: str | PathLike[str] | None = None,
    split: str = "train",
    on_error: OnError = "raise",
    workers: int | None = None,
    progress: bool | None = None,
) -> tuple[Observations, Observations]:
    """The images as they are and perturbed, decoded once. `store` gets the folders ``original`` and ``perturbed``.

    The other options are those of `observe`.
    """
    source = open_source(images, backbone, batch_size, workers, data_root, split, on_error)
    original, perturbed = (None, None) if store is None else (Path(store) / ORIGINAL, Path(store) / PERTURBED)
    first, second = _extract(backbone, source, [(None, original), (perturbation(perturb, seed), perturbed)], progress)
    return first, second


def observe_into(
    folder: Path,
    backbone: BackboneLike,
    images: ImageSet,
    perturb: Perturb | None,
    batch_size: int,
    known: Known | None = None,
) -> list[Observations]:
    """The images as they are and, with `perturb`, perturbed, in `ORIGINAL` and `PERTURBED` of the folder, decoded once.

    What is there already is not computed again, nor is what is `known` of some.
    """
    ready = None if known is None else {row: known.pixels[place] for row, place in known.places.items()}
    source = open_source(images, backbone, batch_size, None, None, "train", "raise", ready)
    views: list[_View] = [(None, folder / ORIGINAL)]
    if perturb is not None:
        views.append((perturb, folder / PERTURBED))
    return _extract(backbone, source, views, None, known)


def gathered(parts: Sequence[tuple[Rows, Observations]], device: Device = None) -> Observations:
    """Parts of a set, with their numbers in it, as one in memory; a single one on a GPU in the precision it is kept in."""
    total, crops, arrays = sum(len(seen) for _, seen in parts), [], None
    dtype = None if torch.device(device or "cpu").type == "cuda" and len(parts) == 1 else torch.float32
    places = [np.arange(total)[rows] for rows, _ in parts]
    for numbers, (_, seen) in zip(places, parts, strict=True):
        for some, batch in seen.batches(_READ, device, dtype):
            if arrays is None:
                arrays = batch.map(lambda part: part.new_empty(total, *part.shape[1:]))
            arrays.put(numbers[some], batch)
        crops.append(None if seen.crops is None else np.asarray(seen.crops))
    first = parts[0][1]
    known = [part for part in crops if part is not None]
    moved = np.concatenate(known)[np.concatenate(places).argsort()] if len(known) == len(crops) else None
    assert arrays is not None
    return Observations(*arrays, first.grid, first.prefix_tokens, crops=moved, origin=first.origin, check=False)


def perturbation(perturb: Perturb | bool, seed: int) -> Perturb:
    """The perturbation that an argument `perturb` stands for."""
    if perturb is False:
        raise ValueError("perturb: expected True or a perturbation; found False")
    return Perturbation(seed) if perturb is True else perturb


def crops_of(perturb: Perturb | None, indices: Indices, size: tuple[int, int]) -> NDArray[np.float32] | None:
    """`Observations.crops` of a view, if its perturbation can tell."""
    if perturb is None or not hasattr(perturb, "crops"):
        return None
    return np.asarray(perturb.crops(indices, size), np.float32)


def _extract(
    backbone: BackboneLike, source: Source, views: Sequence[_View], progress: bool | None, known: Known | None = None
) -> list[Observations]:
    if source.shuffles and any(perturb or store for perturb, store in views):
        raise ValueError("images: this DataLoader shuffles, so a second pass would differ; pass shuffle=False")
    with ExitStack() as stack:
        origin = origin_of(backbone)
        sinks = [stack.enter_context(_sink(backbone, source, origin, *view)) for view in views]
        gaps = [sink.gaps for sink in sinks]
        spans = _spans(gaps)
        done = 0 if source.total is None else source.total - sum(len(span) for span in spans)
        title = "observing" if len(views) == 1 else "observing both views"
        advance = stack.enter_context(progress_bar(title, source.total, progress, done))
        behind = stack.enter_context(Behind(backbone.device))
        for rows, upload in stack.enter_context(closing(uploaded(source.batches(spans), backbone.device))):
            batch = upload()
            for (perturb, _), sink, missing in zip(views, sinks, gaps, strict=True):
                if any(rows[0] in gap for gap in missing):
                    numbers = torch.as_tensor(rows)
                    view = batch if perturb is None else perturb(batch, numbers)
                    crops = crops_of(perturb, numbers, (batch.shape[2], batch.shape[3]))
                    result = _seen(backbone, view, rows, known, perturbed=perturb is not None)
                    behind.keep(partial(sink.append, rows[0], crops=crops), result, extremes(result.embeddings))
            advance(len(batch))
        behind.wait()
        return [sink.finish(source.total) for sink in sinks]


def _seen(backbone: BackboneLike, view: Tensor, rows: Sequence[int], known: Known | None, perturbed: bool) -> Batch:
    """What the backbone says about a batch; only images that are not known go through it."""
    places = {} if known is None else known.places
    old = [number for number, row in enumerate(rows) if row in places]
    new = [number for number, row in enumerate(rows) if row not in places]
    if known is None or not old:
        return backbone(normalize(view, backbone.preprocessing))
    before = known.views[perturbed].batch([places[rows[number]] for number in old], view.device)
    if not new:
        return before
    batch = before.map(lambda part: part.new_empty(len(rows), *part.shape[1:]))
    batch.put(old, before)
    batch.put(new, backbone(normalize(view[new], backbone.preprocessing)))
    return batch


def _sink(
    backbone: BackboneLike, source: Source, origin: dict[str, str], perturb: Perturb | None, store: Path | None
) -> AbstractContextManager[_Memory | StoreWriter]:
    """Where the observations of a view go."""
    grid, prefix_tokens = backbone.grid(*source.size), backbone.prefix_tokens
    pooled = getattr(backbone, "gives_pooled", False)  # features in place of predictions
    if store is None:
        return nullcontext(_Memory(source.total, grid, prefix_tokens, origin, pooled))
    if perturb is not None and not hasattr(perturb, "fingerprint"):
        raise ValueError("perturb: needs a method fingerprint() for its observations to be stored")
    facts = {
        **origin,
        "predictions": "features" if pooled else backbone.fingerprint(),
        "images": source.fingerprint(),
        "perturbation": "none" if perturb is None else perturb.fingerprint(),
    }
    return StoreWriter(store, Index(facts, source.total, grid, prefix_tokens), pooled=pooled)


def _spans(gaps: Sequence[Sequence[range]]) -> list[range]:
    """The images that some view lacks, cut wherever a view changes between having and lacking them."""
    edges = sorted({edge for missing in gaps for gap in missing for edge in (gap.start, gap.stop)})
    return [range(*span) for span in pairwise(edges) if any(span[0] in gap for missing in gaps for gap in missing)]


class _Memory:
    """Observations in memory, filled batch by batch, as a `StoreWriter` is."""

    def __init__(
        self, total: int | None, grid: tuple[int, int], prefix_tokens: int, origin: dict[str, str], pooled: bool
    ) -> None:
        self.gaps = [range(sys.maxsize if total is None else total)]
        self._total, self._count = total, 0
        self._grid, self._prefix_tokens, self._origin, self._pooled = grid, prefix_tokens, origin, pooled
        self._crops: list[NDArray[np.float32]] = []

    def append(self, start: int, batch: Batch, bounds: Tensor, crops: NDArray[np.float32] | None) -> None:
        check(start, batch, bounds, self._grid, self._prefix_tokens, crops, self._pooled)
        stop = start + len(batch.attention)
        if self._count == 0:
            self._arrays = batch.map(lambda part: new_memory((self._total or stop, *part.shape[1:]), part.dtype))
        while stop > len(self._arrays.attention):  # a loader of unknown length
            self._arrays = self._arrays.map(lambda array: torch.cat([array, torch.empty_like(array)]))
        self._arrays.put(slice(start, stop), batch)
        self._count = stop
        if crops is not None:
            self._crops.append(crops)

    def finish(self, total: int | None) -> Observations:
        arrays = self._arrays.map(lambda array: array[: self._count])
        crops = np.concatenate(self._crops) if self._crops else None
        layout = self._grid, self._prefix_tokens
        return Observations(*arrays, *layout, crops=crops, origin=self._origin, check=False)


def new_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """New memory. numpy's comes in huge pages, much faster to fill for the first time than torch's."""
    return torch.from_numpy(np.empty(int(np.prod(shape)) * dtype.itemsize, np.uint8)).view(dtype).view(*shape)
