"""What can be observed, as batches of pixels in order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Sequence, Sized
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from pace.images import ImageSet, PreprocessingLike, open_images
from pace.images.imageset import OnError
from pace.images.loading import decoded
from pace.observations import Batch

# A batch in [0, 1] or uint8, a loader of such batches (or of tuples that begin with one), a set of images, or the name or
# folder of one.
Images = Tensor | DataLoader[Any] | ImageSet | str | os.PathLike[str]
Batches = Generator[tuple[Sequence[int], Tensor]]


class BackboneLike(Protocol):
    """What extraction needs of a backbone."""

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


class Source(Protocol):
    """`batches(spans)` yields the numbers of some images and their pixels, (B, 3, H, W) in [0, 1] or uint8.

    `total` is the number of images; None if it is not known before all batches were drawn.
    """

    total: int | None
    size: tuple[int, int]

    def fingerprint(self) -> str: ...
    def batches(self, spans: Sequence[range]) -> Batches: ...


def open_source(
    images: Images,
    backbone: BackboneLike,
    batch_size: int,
    data_root: str | os.PathLike[str] | None,
    split: str,
    on_error: OnError,
    workers: int | None,
) -> Source:
    if batch_size < 1:
        raise ValueError(f"batch_size: expected 1 or more; found {batch_size}")
    if isinstance(images, (str, os.PathLike)):
        images = open_images(images, data_root, split, on_error)
    if isinstance(images, Tensor):
        return _FromTensor(images, batch_size)
    if isinstance(images, DataLoader):
        return _FromLoader(images)
    if isinstance(images, ImageSet):
        return _FromSet(images, backbone, batch_size, workers)
    raise ValueError(
        f"images: expected a tensor, a DataLoader, an ImageSet, a folder or a dataset's name; found {type(images).__name__}"
    )


def _chunks(spans: Sequence[range], size: int) -> list[range]:
    return [span[start : start + size] for span in spans for start in range(0, len(span), size)]


class _FromTensor:
    def __init__(self, images: Tensor, batch_size: int) -> None:
        _check_shape(images)
        self._images, self._batch_size = images, batch_size
        self.total: int | None = len(images)
        self.size = (images.shape[2], images.shape[3])

    def fingerprint(self) -> str:
        return f"{len(self._images)} images, {_digest(self._images)}"

    def batches(self, spans: Sequence[range]) -> Batches:
        for rows in _chunks(spans, self._batch_size):
            batch = self._images[rows.start : rows.stop]
            _check_range(batch)
            yield rows, batch


class _FromLoader:
    """The loader's own batches. The first is drawn at once, since it tells the size."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.shuffles = isinstance(loader.sampler, RandomSampler)
        self._items = iter(loader)
        self._first = next(self._items, None)
        if self._first is None:
            raise ValueError("images: the DataLoader gives no batch")
        first = _images_of(self._first)
        self.total = _loader_length(loader)
        self.size = (first.shape[2], first.shape[3])

    def fingerprint(self) -> str:
        """The length and the first batch stand for the whole, which cannot be seen in advance."""
        length = "unknown" if self.total is None else self.total
        return f"loader of {length} images, first {_digest(_images_of(self._first))}"

    def batches(self, spans: Sequence[range]) -> Batches:
        if not spans:
            return
        seen = 0
        for item in chain([self._first], self._items):
            batch = _images_of(item)
            size = tuple(batch.shape[2:])
            if size != self.size:
                raise ValueError(f"images from {seen} on are {size} pixels, the first are {self.size}")
            for span in spans:
                start, stop = max(seen, span.start), min(seen + len(batch), span.stop)
                if start < stop:
                    _check_range(batch)
                    yield range(start, stop), batch[start - seen : stop - seen]
            seen += len(batch)
        if self.total is not None and self.total != seen:
            raise ValueError(f"images: the DataLoader promised {self.total} images and gave {seen}")
        self.total = seen


class _FromSet:
    def __init__(self, images: ImageSet, backbone: BackboneLike, batch_size: int, workers: int | None) -> None:
        self._images, self._batch_size, self._workers = images, batch_size, workers
        self._preprocessing, self._for_gpu = backbone.preprocessing, backbone.device.type == "cuda"
        self.total: int | None = len(images)
        self.size = backbone.preprocessing.size

    def fingerprint(self) -> str:
        return f"{len(self._images)} images, {self._images.fingerprint()}"

    def batches(self, spans: Sequence[range]) -> Batches:
        chunks = _chunks(spans, self._batch_size)
        return decoded(self._images, chunks, self._preprocessing, self._workers, self._for_gpu)


def _loader_length(loader: DataLoader[Any]) -> int | None:
    """How many images a loader will give; None for iterable datasets and for samplers that make their own batches."""
    sampler = loader.sampler
    if loader.batch_size is None or not isinstance(loader.dataset, Sized) or not isinstance(sampler, Sized):
        return None
    images = len(sampler)
    return images - images % loader.batch_size if loader.drop_last else images


def _images_of(item: Any) -> Tensor:
    images = item[0] if isinstance(item, (tuple, list)) and item else item
    if not isinstance(images, Tensor):
        expected = "a DataLoader of tensors, or of pairs that begin with one"
        raise ValueError(f"images: expected {expected}; found {type(images).__name__}")
    _check_shape(images)
    return images


def _check_shape(images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise ValueError(f"images: expected shape (images, 3, height, width); found {tuple(images.shape)}")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(f"images: expected uint8 or floats in [0, 1]; found {images.dtype}")


def _check_range(images: Tensor) -> None:
    if images.dtype == torch.uint8:
        return
    low, high = (float(bound) for bound in images.aminmax())
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"images: expected uint8 or floats in [0, 1]; found {low:.3g} to {high:.3g}. Pass them before "
            "normalisation: it is done here, as the model needs it"
        )


def _digest(images: Tensor) -> str:
    digest = hashlib.blake2b(f"{images.dtype} {tuple(images.shape)}".encode(), digest_size=8)
    for image in images:  # one at a time: a tensor may be larger than the memory left
        digest.update(image.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
