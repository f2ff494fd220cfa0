"""A command on several processes, which torchrun started."""

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

_GRACE = 5.0  # seconds within which processes meet the same error


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
            from pace.fitting.distributed import processes

            chosen = stack.enter_context(processes(chosen))
        yield Place(chosen, several, leads)


def wait_to_say(error: Exception) -> None:
    """Under torchrun, the time for an error: it is to be said once, and its cause always.

    torchrun ends the others as soon as one has ended. So they let the first of their machine say what all of them met, and are
    ended meanwhile; who is not has an error of its own. And the first, where it fails for want of another, stays until that one
    has said why.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_GRACE)
    elif lost_another(error):
        atexit.register(time.sleep, 2 * _GRACE)
