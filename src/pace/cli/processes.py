"""`pace fit` on several processes, started by torchrun."""

from __future__ import annotations

import atexit
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pace.cli.errors import lost_another
from pace.cli.models import device_of

if TYPE_CHECKING:
    import torch

_GRACE = 5.0  # seconds within which all processes meet the same error


class Process(NamedTuple):
    """This process: its device, whether there are others, and whether it is the one that prints and writes."""

    device: torch.device
    several: bool
    leads: bool


@contextmanager
def joined_processes(device: str) -> Iterator[Process]:
    """Join the other processes, if there are any, each on a GPU of its own. Only the first one prints."""
    several = _count() > 1
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
            from pace.fitting.distributed import processes

            chosen = stack.enter_context(processes(chosen))
        yield Process(chosen, several, leads)


def wait_before_reporting(error: Exception) -> None:
    """Under torchrun, print an error that all processes meet only once, but always print its cause.

    torchrun ends all processes as soon as one has ended. So the others give the first process of their machine time to
    report the shared error and are ended meanwhile; one that is not ended has an error of its own to report. And if the
    first process fails because it lost another, it stays until that one has said why.
    """
    if _count() == 1:
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_GRACE)
    elif lost_another(error):
        atexit.register(time.sleep, 2 * _GRACE)


def _count() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))
