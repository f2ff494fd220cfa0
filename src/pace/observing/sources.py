"""What can be observed, as batches of pixels in order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from pace.images import ImageSet, PreprocessingLike
from pace.images.given import images_from
from pace.images.imageset import OnError
from pace.images.loading import Batches, decoded
from pace.observations import Batch

# Pixels in [0, 1] or uint8, a loader of such batches (or of tuples that begin with one), or what `images_from` takes.
Images = Any


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


def origin_of(backbone: BackboneLike) -> dict[str, str]:
    """`Observations.origin`: the plainest difference first. The head is left out, since concepts are found without it."""
    inner: Any = getattr(backbone, "backbone", backbone)  # of several blocks
    return {
        "block": " and ".join(map(str, getattr(inner, "blocks", (inner.layer,)))),
        "attention block": str(getattr(inner, "attention_layer", inner.layer)),
        "preprocessing": str(inner.preprocessing),
        "model": getattr(inner, "model_fingerprint", inner.fingerprint)(),
    }


@dataclass
class Source:
    """`batches(spans)` yields the numbers of some images and their pixels, (B, 3, H, W) in [0, 1] or uint8."""

    size: tuple[int, ...]  # height and width
    total: int | None  # None if it is not known before all batches were drawn
    fingerprint: Callable[[], str]
    batches: Callable[[Sequence[range]], Batches]
    shuffles: bool = False


def open_source(
    images: Images,
    backbone: BackboneLike,
    batch_size: int,
    workers: int | None,
    data_root: str | os.PathLike[str] | None,
    split: str,
    on_error: OnError,
    ready: Mapping[int, Tensor] | None = None,
) -> Source:
    """`ready` are images of a set that are decoded already, by number."""
    if batch_size < 1:
        raise ValueError(f"batch_size: expected 1 or more; found {batch_size}")
    images = images_from(images, data_root, split, on_error)
    if isinstance(images, Tensor):
        return _from_tensor(images, batch_size)
    if isinstance(images, DataLoader):
        return _from_loader(images)
    if isinstance(images, ImageSet):
        return _from_set(images, backbone, batch_size, workers, ready)
    expected = "a file, a folder, a dataset's name, an image, a list of these, a tensor or a DataLoader"
    raise ValueError(f"images: expected {expected}; found {type(images).__name__}")


def _chunks(spans: Sequence[range], size: int) -> list[range]:
    return [span[start : start + size] for span in spans for start in range(0, len(span), size)]


def _from_set(
    images: ImageSet, backbone: BackboneLike, batch_size: int, workers: int | None, ready: Mapping[int, Tensor] | None
) -> Source:
    def batches(spans: Sequence[range]) -> Batches:
        for_gpu = backbone.device.type == "cuda"
        return decoded(images, _chunks(spans, batch_size), backbone.preprocessing, workers, for_gpu, ready)

    size = backbone.preprocessing.size
    return Source(size, len(images), lambda: f"{len(images)} images, {images.fingerprint()}", batches)


def _from_tensor(images: Tensor, batch_size: int) -> Source:
    def batches(spans: Sequence[range]) -> Batches:
        for rows in _chunks(spans, batch_size):
            yield rows, _in_range(images[rows.start : rows.stop])

    size = _checked(images).shape[2:]
    return Source(tuple(size), len(images), lambda: f"{len(images)} images, {_digest(images)}", batches)


def _from_loader(loader: DataLoader[Any]) -> Source:
    """The loader's own batches. The first is drawn at once, since it tells the size."""
    items = iter(loader)
    first = next(items, None)
    if first is None:
        raise ValueError("images: the DataLoader gives no batch")
    size = tuple(_images_of(first).shape[2:])

    def fingerprint() -> str:
        """The length and the first batch stand for the whole, which cannot be seen in advance."""
        length = "unknown" if source.total is None else source.total
        return f"loader of {length} images, first {_digest(_images_of(first))}"

    def batches(spans: Sequence[range]) -> Batches:
        seen = 0
        for batch in map(_images_of, chain([first], items) if spans else ()):
            if batch.shape[2:] != size:
                raise ValueError(f"images from {seen} on are {tuple(batch.shape[2:])} pixels, the first are {size}")
            for span in spans:
                start, stop = max(seen, span.start), min(seen + len(batch), span.stop)
                if start < stop:
                    yield range(start, stop), _in_range(batch[start - seen : stop - seen])
            seen += len(batch)
        if spans:
            source.total = seen

    source = Source(size, _length(loader), fingerprint, batches, isinstance(loader.sampler, RandomSampler))
    return source


def _length(loader: DataLoader[Any]) -> int | None:
    """How many images a loader will give; None for iterable datasets and for samplers that make their own batches."""
    if loader.batch_size is None or not isinstance(loader.sampler, Sized):
        return None
    images = len(loader.sampler)
    return images - images % loader.batch_size if loader.drop_last else images


def _images_of(item: Any) -> Tensor:
    images = item[0] if isinstance(item, (tuple, list)) and item else item
    if not isinstance(images, Tensor):
        expected = "a DataLoader of tensors, or of pairs that begin with one"
        raise ValueError(f"images: expected {expected}; found {type(images).__name__}")
    return _checked(images)


def _checked(images: Tensor) -> Tensor:
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise ValueError(f"images: expected shape (images, 3, height, width); found {tuple(images.shape)}")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(f"images: expected uint8 or floats in [0, 1]; found {images.dtype}")
    return images


def _in_range(images: Tensor) -> Tensor:
    if images.is_floating_point():
        low, high = (float(bound) for bound in images.aminmax())
        if not (low >= 0 and high <= 1):
            found = f"images: expected uint8 or floats in [0, 1]; found {low:.3g} to {high:.3g}"
            raise ValueError(f"{found}. Pass them before normalisation: it is done here, as the model needs it")
    return images


def _digest(images: Tensor) -> str:
    digest = hashlib.blake2b(f"{images.dtype} {tuple(images.shape)}".encode(), digest_size=8)
    for image in images:  # one at a time: a tensor may be larger than the memory left
        digest.update(image.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
