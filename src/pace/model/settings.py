"""How to learn and infer: everything that is set, nothing that is learned."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pace.model.gaussians import Gaussians
from pace.model.inference import Updates

SMALLEST_ALPHA = 1e-3  # of a patch
SWEEPS_PER_EPOCH = 4  # over images that go on where the last epoch left them

_COPIES = 8  # of the Gaussians that learning holds: their statistics in float64, those of a batch, the next Gaussians


@dataclass(frozen=True)
class Settings:
    """The last six are fixed for users; tests and benchmarks vary them."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    updates: Updates = "exact"
    memory: int | None = None  # bytes on the device; None: no limit
    learn_alpha: bool = True
    smallest_alpha: float = SMALLEST_ALPHA
    max_sweeps: int = 100
    sweep_tol: float = 1e-4  # an image has settled when γ moves by less than this share of its sum
    negatives: int = 64  # images in a group; in L_s the others of its group are an image's negatives
    head_steps: int = 100  # of Adam, for H and β, in an epoch
    head_rate: float = 0.05  # Adam's step size there: H can cross its box [-1, 1] in an epoch
    batch_size: int | None = None  # images worked on at once; None: by the number of tokens and the memory

    def image_weight(self, n_tokens: int) -> int:
        """Σ_j w_mj: an image weighs as much as its tokens or, by the printed rules, as one."""
        return n_tokens if self.updates == "exact" else 1

    def images_per_batch(self, n_tokens: int, views: int, gaussians: Gaussians) -> int:
        if self.batch_size:
            return self.batch_size
        tokens = gaussians.tokens_at_once()
        if self.memory is not None:
            tokens = min(tokens, self.working_memory(gaussians) // 2 // _bytes_per_token(gaussians))
        return max(1, tokens // (n_tokens * views))

    def working_memory(self, gaussians: Gaussians) -> int:
        """What the budget leaves beside the concepts and their statistics: half of it for a batch, half for embeddings."""
        assert self.memory is not None
        taken = _COPIES * sum(tensor.nbytes for tensor in gaussians.tensors().values())
        if taken >= self.memory:
            raise ValueError(
                f"memory: {len(gaussians.means)} {gaussians.name} concepts in {gaussians.means.shape[1]} dimensions take "
                f"about {taken / 1e9:.3g} GB to learn; found {self.memory / 1e9:.3g} GB"
            )
        return self.memory - taken


def _bytes_per_token(gaussians: Gaussians) -> int:
    """What a patch takes while it is worked on: about four copies of its embedding, five of its φ, and any factors."""
    k, d = gaussians.means.shape
    rank = getattr(gaussians, "factors", gaussians.means[:, :, None][:, :, :0]).shape[2]
    return (4 * d + (5 + 2 * rank) * k) * gaussians.means.element_size()
