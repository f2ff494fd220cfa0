"""Which images are worked on together, and how they get to where the work is done.

A pass visits units one after another. A unit is a group of images that are each other's negatives; without pairs, one image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.model.concepts import Concepts
from pace.model.settings import Settings
from pace.observations import ArrayLike, Batch, Lazy, Observations

Images = slice | npt.NDArray[np.int64]


class Share(NamedTuple):
    """Which of the processes at a fit this is, and how tensors are added up over all of them."""

    rank: int = 0
    processes: int = 1
    added: Callable[..., list[Tensor]] = lambda *parts: list(parts)


class Part(NamedTuple):
    """Some units: their images among all, their places among those of this process, and how many images each unit has."""

    images: Images
    places: Images
    sizes: list[int]


@dataclass(frozen=True)
class Visits:
    """The units of a pass over images 0 … M - 1, and which of them are this process's.

    Group g of G holds images g, g + G, g + 2G, …, because datasets come sorted by class and negatives should not all be of one
    class. Which images share a group depends on their order and on `negatives`, not on batch size or number of processes.
    """

    n_images: int
    negatives: int | None  # images in a group at most; None: no groups
    rank: int = 0
    processes: int = 1

    @property
    def _units(self) -> int:
        return self.n_images if self.negatives is None else -(-self.n_images // self.negatives)

    def _share(self, rank: int) -> int:
        return self._units * rank // self.processes

    def __len__(self) -> int:
        """How many units are this process's."""
        return self._share(self.rank + 1) - self._share(self.rank)

    @property
    def own_images(self) -> int:
        first, last = self._share(self.rank), self._share(self.rank + 1)
        if self.negatives is None:
            return last - first
        each, larger = divmod(self.n_images, self._units)  # the first groups have one image more
        return (last - first) * each + max(0, min(last, larger) - first)

    def part(self, first: int, last: int) -> Part:
        """This process's units first … last - 1."""
        begin = self._share(self.rank)
        if self.negatives is None:
            return Part(slice(begin + first, begin + last), slice(first, last), [last - first])
        groups, own = self._units, len(self)
        members = [np.arange(begin + g, self.n_images, groups) for g in range(first, last)]
        places = [np.arange(g, g + own * len(m), own) for g, m in zip(range(first, last), members, strict=True)]
        return Part(np.concatenate(members), np.concatenate(places), [len(m) for m in members])

    def parts(self, units: int) -> list[Part]:
        """All of this process's units, so many at a time."""
        return [self.part(first, min(first + units, len(self))) for first in range(0, len(self), units)]


class Feed:
    """Batches of one or two views on the device. The next batch is read, into pinned memory, while this one is worked on."""

    def __init__(self, views: Sequence[Observations], device: torch.device, dtype: torch.dtype, *, local: bool = False):
        self.views, self.device, self._dtype = list(views), device, dtype
        self.local = local  # whether images are numbered among those of this process
        self.near = all(_is_near(view.embeddings, device) for view in views)
        self._pool = None if self.near else ThreadPoolExecutor(1, "pace-feed")
        self._ahead: tuple[Images, Future[list[Callable[[], Batch]]]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def units_at_once(self, concepts: Concepts, settings: Settings) -> int:
        """As many units as there is room for, and no more than there are."""
        views, unit = (1, 1) if len(self.views) == 1 else (2, settings.negatives)
        images = settings.images_per_batch(self.views[0].n_tokens, views, concepts.gaussians)
        return max(1, min(images, len(self.views[0]) + unit - 1) // unit)

    def load(self, images: Images, following: Images | None = None) -> list[Batch]:
        """These images in every view; reading of those that follow is begun."""
        ahead, self._ahead = self._ahead, None
        known = ahead is not None and _same(ahead[0], images)
        prepared = ahead[1].result() if ahead is not None and known else self._prepare(images)
        if self._pool is not None and following is not None:
            self._ahead = following, self._pool.submit(self._prepare, following)
        return [self._placed(batch()) for batch in prepared]

    def _prepare(self, images: Images) -> list[Callable[[], Batch]]:
        return [_prepared(view, images, pinned=self.device.type == "cuda") for view in self.views]

    def _placed(self, batch: Batch) -> Batch:
        """Half precision is widened where it is used, so that half as many bytes travel."""
        return batch.map(lambda part: part.to(self.device, non_blocking=True).to(self._dtype))

    def kept(self, visits: Visits, at_once: int) -> Feed:
        """The same, with this process's images copied to the device once for the whole fit."""
        rooms: list[Batch] = []

        def room(value: Tensor) -> Tensor:
            return value.new_empty(visits.own_images, *value.shape[1:], device=self.device)

        for part in visits.parts(at_once):
            for number, prepared in enumerate(self._prepare(part.images)):
                batch = prepared()
                if len(rooms) == number:
                    rooms.append(batch.map(room))
                rooms[number].put(part.places, batch)
        views = [
            Observations(*room, view.grid, view.prefix_tokens) for view, room in zip(self.views, rooms, strict=True)
        ]
        return Feed(views, self.device, self._dtype, local=True)


def bytes_per_image(observations: Observations) -> int:
    """As it is stored."""
    arrays = (observations.embeddings, observations.attention, observations.predictions)
    return sum(int(np.prod(a.shape[1:])) * int(a.dtype.itemsize) for a in arrays if a is not None)


def _is_near(array: ArrayLike, device: torch.device) -> bool:
    """Whether reading it is no work to speak of."""
    if isinstance(array, Tensor):
        return array.device == device or (array.device.type == device.type and device.index is None)
    return isinstance(array, np.ndarray) and not isinstance(array, np.memmap) and device.type == "cpu"


def _prepared(view: Observations, images: Images, pinned: bool) -> Callable[[], Batch]:
    """What can be done ahead is done; the rest when it is called."""
    if isinstance(view, Lazy):
        return view.prepare(images)
    batch = view.batch(images)
    if pinned:
        batch = batch.map(lambda part: part if part.is_cuda else part.pin_memory())
    return lambda: batch


def _same(one: Images, other: Images) -> bool:
    if isinstance(one, slice) or isinstance(other, slice):
        return isinstance(one, slice) and isinstance(other, slice) and one == other
    return np.array_equal(one, other)
