"""Several processes at one fit, on torch.distributed: what they send each other."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pace.model.feeding import Share
from pace.model.statistics import Statistics

_TIMEOUT = timedelta(hours=12)  # torchrun itself stops processes that would wait for one that has ended
_POLL = 0.01  # seconds between two looks at who has joined


def torchrun_started_this() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and "LOCAL_RANK" in os.environ and "MASTER_ADDR" in os.environ


@contextmanager
def processes(device: torch.device | str | None = None) -> Iterator[torch.device]:
    """Join the processes that torchrun started, for the time of the body; gives the device of this one.

    With GPUs, process i of a machine gets the i-th and they talk by NCCL; on CPUs they talk by gloo.
    """
    if not torchrun_started_this():
        raise ValueError("there are no other processes; start this program with torchrun --nproc-per-node N")
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    own = torch.device(kind)
    if kind == "cuda":
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if own.index >= torch.cuda.device_count():
            raise ValueError(
                f"process {own.index} of this machine has no GPU: there are {torch.cuda.device_count()}; "
                f"start torchrun with --nproc-per-node {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(own)
    store, rank, size = next(rendezvous("env://", timeout=_TIMEOUT))
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=fresh_part(store, rank, size), rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        yield own
    finally:
        dist.destroy_process_group()


def fresh_part(store: Store, rank: int, size: int) -> Store:
    """A part of the store that nobody has written to yet, the same in every process.

    torchrun keeps its store when it restarts processes, and with it the addresses of those that have ended: a new process that
    reads one before its owner's successor has replaced it fails to connect. So the first process makes up a new name and
    passes it to everyone who is here now.
    """
    mine = uuid4().hex
    if rank > 0:
        store.set(f"pace/here/{rank}", mine)
        name = store.get(f"pace/name/{mine}").decode()  # waits for it
        store.set(f"pace/known/{name}/{rank}", "yes")
        return PrefixStore(name, store)
    missing = set(range(1, size))
    while missing:
        for other in sorted(missing):
            if store.check([f"pace/here/{other}"]):  # or was, before a restart; then that is soon replaced
                store.set(f"pace/name/{store.get(f'pace/here/{other}').decode()}", mine)
            if store.check([f"pace/known/{mine}/{other}"]):
                missing.discard(other)
        time.sleep(_POLL)
    return PrefixStore(mine, store)


@dataclass(frozen=True)
class Team:
    """The processes at a fit, and which of them this is. A single process is a team as well."""

    rank: int = 0
    size: int = 1
    _messages: torch.device = torch.device("cpu")  # where they have to lie  # noqa: RUF009

    @classmethod
    def of_all(cls, device: torch.device) -> Team:
        """Every process of torch.distributed."""
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "distributed=True needs the processes of torch.distributed: start the program with torchrun and fit inside "
                "`with pace.fitting.distributed.processes() as device:`"
            )
        return cls(
            dist.get_rank(), dist.get_world_size(), device if dist.get_backend() == "nccl" else torch.device("cpu")
        )

    @property
    def share(self) -> Share:
        """What the model needs to know of the team."""
        return Share(self.rank, self.size, self.added)

    def total(self, statistics: Statistics) -> Statistics:
        """The sum over processes."""
        if self.size == 1:
            return statistics
        parts = dict(sorted(statistics.tensors().items()))  # in one order, also after a process was resumed
        return Statistics.from_tensors(dict(zip(parts, self.added(*parts.values()), strict=True)))

    def added(self, *parts: Tensor) -> list[Tensor]:
        """Each of them summed over processes, the same bits in each, by one message."""
        if self.size == 1:
            return list(parts)
        flat = torch.cat([part.reshape(-1) for part in parts]).to(self._messages)  # of the widest dtype
        dist.all_reduce(flat)
        pieces = torch.split(flat, [part.numel() for part in parts])
        return [piece.view(part.shape).to(part) for part, piece in zip(parts, pieces, strict=True)]

    def from_first(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the first process has, in all of them; the others may give anything."""
        if self.size == 1:
            return tensors
        content = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}) if self.rank == 0 else b""
        length = torch.tensor([len(content)], device=self._messages)
        dist.broadcast(length, 0)
        message = torch.empty(int(length), dtype=torch.uint8, device=self._messages)
        if self.rank == 0:
            message.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(message, 0)
        return load(message.cpu().numpy().tobytes())

    def gathered(self, number: int) -> list[int]:
        """The number that each process gives."""
        if self.size == 1:
            return [number]
        mine = torch.tensor([number], dtype=torch.int64, device=self._messages)
        all_of_them = [torch.zeros_like(mine) for _ in range(self.size)]
        dist.all_gather(all_of_them, mine)
        return [int(one) for one in all_of_them]

    def refuse_unlike(self, about: dict[str, Any]) -> None:
        """An error in every process if they were not all given the same."""
        if len(set(self.gathered(zlib.crc32(json.dumps(about).encode())))) > 1:
            raise ValueError(
                "the processes were given different images or parameters; each has to get all of them alike"
            )
