"""A command on several processes, which torchrun started."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pace.cli.models import device_of

if TYPE_CHECKING:
    import torch


class Place(NamedTuple):
    """Where a process works, whether there are others, and whether it is the one that speaks and writes."""

    device: torch.device
    several: bool
    leads: bool


@contextmanager
def team(device: str) -> Iterator[Place]:
    """Join the other processes, if there are any, on a GPU each where `device` is one.

    Only the first says anything inside; an error is said by whoever meets it, once it is outside.
    """
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    leads = not several or os.environ.get("RANK") == "0"
    with ExitStack() as stack:
        if not leads:
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        chosen = device_of(device)
        if several:
            from pace.distributed import processes

            chosen = stack.enter_context(processes(chosen))
        yield Place(chosen, several, leads)
