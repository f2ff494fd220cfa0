"""A sparse autoencoder of patches with a fixed number of active concepts: TopK (Gao et al. 2024), or nested (Matryoshka).

    z = TopK(relu(E (e − offset) + b)),   ê = offset + z D,   rows of D of length 1

A latent that no patch has had for a while learns to rebuild what the others leave (the paper's auxiliary loss). Nested: the
first eighth, quarter and half of the latents have to rebuild the patch as well (Bussmann et al. 2025).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from pace.baselines.explainer import check_counts
from pace.baselines.references import SAMPLE, PatchConcepts

_BATCH, _RATE = 2048, 1e-3
_PATIENCE = 100  # steps without being active after which a latent counts as dead
_REVIVED, _REVIVAL = (
    32,
    1 / 32,
)  # dead latents that rebuild a patch's rest together, and the weight of that, as in the paper


class SparseAutoencoder(PatchConcepts):
    """φ are a token's active coefficients, none negative; θ is their mean.

    Parameters
    ----------
    n_concepts, sample
        As of the other methods that learn from patches.
    expansion
        Latents for each of `n_concepts`.
    nested
        Whether the first latents have to rebuild the patch by themselves.
    active
        Latents that a patch has; a quarter of them at most.
    steps
        Of Adam, over minibatches.
    """

    def __init__(
        self,
        n_concepts: int = 100,
        sample: int = SAMPLE,
        *,
        expansion: int = 1,
        nested: bool = False,
        active: int = 8,
        steps: int = 4000,
    ) -> None:
        check_counts(expansion=expansion, active=active, steps=steps)
        super().__init__(n_concepts, sample)
        self.latents, self.nested, self.steps = n_concepts * expansion, nested, steps
        self.active = max(1, min(active, self.latents // 4))
        self.name = "sae" + (f"-{expansion}x" if expansion > 1 else "") + ("-matryoshka" if nested else "")

    def _learn(self, patches: Tensor, weights: Tensor, seed: int) -> None:
        rng, latents = np.random.default_rng(seed), self.latents
        share = (weights / weights.sum())[:, None]
        offset = (share * patches).sum(0)
        scale = (share * (patches - offset).square()).sum().sqrt().clamp_min(1e-12)
        ladder = weights.double().cumsum(0)  # patches are drawn in proportion to their weights
        drawn = torch.from_numpy(rng.normal(size=(latents, patches.shape[1]))).to(patches)
        decoder = normalize(drawn).requires_grad_()
        encoder, bias = decoder.detach().clone().requires_grad_(), torch.zeros_like(decoder[:, 0]).requires_grad_()
        optimiser = torch.optim.Adam([encoder, bias, decoder], _RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, 5 * (1 - step / self.steps)))
        prefixes = [max(1, latents // part) for part in (8, 4, 2)] * self.nested + [latents]
        idle = torch.zeros_like(bias, dtype=torch.long)
        for _ in range(self.steps):
            draws = torch.from_numpy(rng.random(min(_BATCH, len(patches)))).to(patches.device)
            rows = torch.searchsorted(ladder, draws * ladder[-1], right=True).clamp_max(len(patches) - 1)
            x = (patches[rows] - offset) / scale
            with torch.enable_grad():
                directions = normalize(decoder)
                raised = (x @ encoder.T + bias).relu()
                codes = largest(raised, self.active)
                lefts = [x - codes[:, :prefix] @ directions[:prefix] for prefix in prefixes]
                loss = sum(left.square().sum(1).mean() for left in lefts)
                idle = torch.where((codes > 0).any(0), 0, idle + 1)
                dead = idle > _PATIENCE
                revived = largest(raised * dead, min(_REVIVED, latents)) @ directions
                loss = loss + _REVIVAL * (lefts[-1].detach() - revived).square().sum(1).mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
        self.encoder_, self.bias_, self.centre_, self.scale_ = encoder.detach(), bias.detach(), offset, scale
        self.concepts_, self.offset_ = normalize(decoder.detach()).cpu().numpy(), offset.cpu().numpy()

    def _coefficients(self, tokens: Tensor) -> Tensor:
        x = (tokens - self.centre_) / self.scale_
        return largest((x @ self.encoder_.T + self.bias_).relu_(), self.active) * self.scale_


def largest(values: Tensor, k: int) -> Tensor:
    """The k largest of every row, the others set to 0."""
    top = values.topk(k, dim=1)
    return torch.zeros_like(values).scatter(1, top.indices, top.values)
