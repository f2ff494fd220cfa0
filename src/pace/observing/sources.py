"""Where images come from: a tensor, a loader, or a set of images."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterator, Sequence, Sized
from contextlib import closing
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from pace.images import ImageSet, PreprocessingLike, open_images
from pace.images.imageset import OnError
from pace.observing.pipeline import decoded

# What can be observed: a batch in [0, 1] or uint8, a loader of such batches (or of pairs that begin with one),
# a set of images, or the name or folder of one.
Images = Tensor | DataLoader[Any] | ImageSet | str | os.PathLike[str]


class Source(Protocol):
    """`batches(spans)` yields the number of the first image and the batch, as (B, 3, H, W) in [0, 1] or uint8.

    `total` is the number of images, known at the latest when all batches were drawn.
    """

    total: int | None
    size: tuple[int, int]

    def fingerprint(self) -> str: ...
    def batches(self, spans: Sequence[range]) -> Generator[tuple[int, Tensor]]: ...


def open_source(
    images: Images,
    preprocessing: PreprocessingLike,
    batch_size: int,
    data_root: str | os.PathLike[str] | None,
    split: str,
    on_error: OnError,
    workers: int | None,
    ordered: bool,
    for_gpu: bool,
) -> Source:
    if isinstance(images, (str, os.PathLike)):
        images = open_images(images, data_root, split, on_error)
    if isinstance(images, Tensor):
        return _FromTensor(images, batch_size)
    if isinstance(images, DataLoader):
        return _FromLoader(images, ordered)
    if isinstance(images, ImageSet):
        return _FromSet(images, preprocessing, batch_size, workers, for_gpu)
    raise ValueError(
        f"images: expected a tensor, a DataLoader, an ImageSet, a folder or a dataset's name; found {type(images).__name__}"
    )


def _chunks(spans: Sequence[range], size: int) -> Iterator[range]:
    for span in spans:
        for start in range(span.start, span.stop, size):
            yield range(start, min(start + size, span.stop))


class _FromTensor:
    def __init__(self, images: Tensor, batch_size: int) -> None:
        _refuse_no_images(images)
        self._images, self._batch_size = images, batch_size
        self.total: int | None = len(images)
        self.size = (images.shape[2], images.shape[3])

    def fingerprint(self) -> str:
        return f"{len(self._images)} images, {_digest(self._images)}"

    def batches(self, spans: Sequence[range]) -> Generator[tuple[int, Tensor]]:
        for rows in _chunks(spans, self._batch_size):
            batch = self._images[rows.start : rows.stop]
            _refuse_range(batch)
            yield rows.start, batch


class _FromLoader:
    """The loader's own batches. Its first one is drawn at once, since it tells the size."""

    def __init__(self, loader: DataLoader[Any], ordered: bool) -> None:
        if ordered and isinstance(loader.sampler, RandomSampler):
            raise ValueError(
                "images: this DataLoader shuffles, so a second pass would give other images; pass shuffle=False"
            )
        self._items = iter(loader)
        self._first = next(self._items, None)
        if self._first is None:
            raise ValueError("images: the DataLoader gives no batch")
        first = _images_of(self._first)
        self.total = _loader_length(loader)
        self.size = (first.shape[2], first.shape[3])

    def fingerprint(self) -> str:
        """The length and the first batch stand for the whole, which cannot be looked at ahead."""
        length = "unknown" if self.total is None else self.total
        return f"loader of {length} images, first {_digest(_images_of(self._first))}"

    def batches(self, spans: Sequence[range]) -> Generator[tuple[int, Tensor]]:
        if not spans:
            return
        seen = 0
        for item in chain([self._first], self._items):
            batch = _images_of(item)
            if tuple(batch.shape[2:]) != self.size:
                raise ValueError(
                    f"images from {seen} on are {tuple(batch.shape[2:])} pixels, the first are {self.size}"
                )
            for span in spans:
                start, stop = max(seen, span.start), min(seen + len(batch), span.stop)
                if start < stop:
                    _refuse_range(batch)
                    yield start, batch[start - seen : stop - seen]
            seen += len(batch)
        if self.total is not None and self.total != seen:
            raise ValueError(f"images: the DataLoader promised {self.total} images and gave {seen}")
        self.total = seen


class _FromSet:
    def __init__(
        self, images: ImageSet, preprocessing: PreprocessingLike, batch_size: int, workers: int | None, for_gpu: bool
    ) -> None:
        self._images, self._preprocessing, self._batch_size = images, preprocessing, batch_size
        self._workers, self._for_gpu = workers, for_gpu
        self.total: int | None = len(images)
        self.size = preprocessing.size

    def fingerprint(self) -> str:
        return f"{len(self._images)} images, {self._images.fingerprint()}"

    def batches(self, spans: Sequence[range]) -> Generator[tuple[int, Tensor]]:
        chunks = _chunks(spans, self._batch_size)
        batches = decoded(self._images, chunks, self._preprocessing, self._workers, self._for_gpu)

        def numbered() -> Generator[tuple[int, Tensor]]:
            with closing(batches):
                for rows, batch in batches:
                    yield rows[0], batch

        return numbered()


def _loader_length(loader: DataLoader[Any]) -> int | None:
    """How many images a loader will give; None for streams and for samplers that make batches of their own."""
    sampler = loader.sampler
    if loader.batch_size is None or not isinstance(loader.dataset, Sized) or not isinstance(sampler, Sized):
        return None
    images = len(sampler)
    return images - images % loader.batch_size if loader.drop_last else images


def _images_of(item: Any) -> Tensor:
    images = item[0] if isinstance(item, (tuple, list)) and item else item
    if not isinstance(images, Tensor):
        raise ValueError(
            f"images: expected a DataLoader of tensors, or of pairs that begin with one; found {type(images).__name__}"
        )
    _refuse_no_images(images)
    return images


def _refuse_no_images(images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise ValueError(f"images: expected shape (images, 3, height, width); found {tuple(images.shape)}")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(f"images: expected uint8 or floats in [0, 1]; found {images.dtype}")


def _refuse_range(images: Tensor) -> None:
    if images.dtype == torch.uint8:
        return
    low, high = (float(bound) for bound in images.aminmax())
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"images: expected uint8 or floats in [0, 1]; found {low:.3g} to {high:.3g}. Pass them before "
            "normalisation, which is the model's own and done here"
        )


def _digest(images: Tensor) -> str:
    digest = hashlib.blake2b(f"{images.dtype} {tuple(images.shape)}".encode(), digest_size=8)
    for image in images:  # one at a time: a tensor may be larger than the memory left
        digest.update(image.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
