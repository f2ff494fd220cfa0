"""What all Triton kernels need around them. Imports no Triton, which not every torch comes with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def succeeds(work: Callable[[], object], otherwise: str) -> bool:
    """Whether a first small piece of work runs; if not, warn with what follows from that and the reason."""
    try:
        work()
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"{otherwise}: {reason}", RuntimeWarning, stacklevel=3)
        return False
    return True


def on_its_gpu(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current GPU, torch on that of the tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
