"""The learning procedure as the paper prints it, batch by batch, in plain torch, to time PACE against.

Algorithm 1 with eq. update_phi, update_gamma, update_mu and update_sigma; H and β by Adam. The paper does not say how many
sweeps, how near 'convergence' is, or how images go into batches. Here a batch is 16 images and their perturbed views, swept
together until every γ_m moves by less than 1e-4 of its sum; H and β take one step a batch. Where a choice is left it is the
cheaper one: Mahalanobis terms once a batch and not once a sweep, perturbed views swept without L_f and L_s and left out of the
sums for μ and Σ.

B images · J tokens · K concepts · d dimensions · N classes
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pace import Observations
from pace.observations import Batch

Pull = Callable[[Tensor], Tensor | float]  # φ̄ (B, K) -> what L_f and L_s add

BATCH = 16
MOST_SWEEPS, TOLERANCE = 100, 1e-4
LEARNING_RATE = 1e-3  # the paper: 1e-5 to 1e-3
RIDGE = 1e-3  # of the mean variance; the printed Σ_k of few patches has no inverse


class Printed:
    """What is learned, and the sums of the epoch under way."""

    def __init__(self, means: Tensor, covariances: Tensor, alpha: float, classes: int) -> None:
        self.means, self.alpha = means, alpha
        self.precisions, self.log_det = torch.linalg.inv(covariances), torch.logdet(covariances)
        self.head = means.new_zeros(len(means), classes).requires_grad_()
        self.beta = means.new_full((len(means),), 0.5).requires_grad_()
        self.adam = torch.optim.Adam([self.head, self.beta], lr=LEARNING_RATE)
        self.clear()

    def clear(self) -> None:
        k, d = self.means.shape
        self.weight = self.means.new_zeros(k)
        self.first = self.means.new_zeros(k, d)
        self.second = self.means.new_zeros(k, d, d)

    def learn(self, original: Observations, perturbed: Observations) -> None:
        """All images, in whole batches; `finish` ends the epoch."""
        for start in range(0, len(original) - BATCH + 1, BATCH):
            some = slice(start, start + BATCH)
            self._learn(original.batch(some), perturbed.batch(some))

    def _learn(self, original: Batch, perturbed: Batch) -> None:
        embeddings, attention, predictions = original
        tokens = attention.shape[1]
        with torch.no_grad():
            other = self.infer(self.evidence(perturbed.embeddings, perturbed.attention), perturbed.attention).mean(1)
            evidence = self.evidence(embeddings, attention)
            phi = self.infer(evidence, attention, lambda phi_bar: self.pull(phi_bar, other, predictions) / tokens)
        phi_bar = phi.mean(1)
        scores = phi_bar @ self.head
        faithful = (predictions * scores).sum(1) - scores.logsumexp(1)
        stable = (phi_bar * other) @ self.beta - self.similarities(phi_bar).logsumexp(1)
        self.adam.zero_grad()
        (-(faithful + stable).mean()).backward()
        self.adam.step()
        r, x = (phi * attention[:, :, None]).flatten(0, 1), embeddings.flatten(0, 1)
        self.weight += r.sum(0)
        self.first += r.T @ x
        self.second += torch.einsum("nk,nd,ne->kde", r, x, x)

    def evidence(self, embeddings: Tensor, attention: Tensor) -> Tensor:
        """-½ a_mj (e - μ_k)ᵀ Σ_k⁻¹ (e - μ_k) - ½ log |Σ_k| as (B, J, K)."""
        difference = embeddings.flatten(0, 1) - self.means[:, None]  # (K, B J, d)
        distance = (difference @ self.precisions * difference).sum(2).T.reshape(*attention.shape, -1)
        return -(attention[:, :, None] * distance + self.log_det) / 2

    def infer(
        self, evidence: Tensor, attention: Tensor, pull: Callable[[Tensor], Tensor | float] = lambda phi_bar: 0.0
    ) -> Tensor:
        """φ (B, J, K)."""
        phi = torch.full_like(evidence, 1 / evidence.shape[2])
        gamma = self.alpha + torch.einsum("bjk,bj->bk", phi, attention)
        for _ in range(MOST_SWEEPS):
            field = torch.digamma(gamma) - torch.digamma(gamma.sum(1, keepdim=True)) + pull(phi.mean(1))
            phi = (evidence + field[:, None]).softmax(2)
            before, gamma = gamma, self.alpha + torch.einsum("bjk,bj->bk", phi, attention)
            if ((gamma - before).abs().sum(1) < TOLERANCE * gamma.sum(1)).all():
                break
        return phi

    def pull(self, phi_bar: Tensor, other: Tensor, predictions: Tensor) -> Tensor:
        """What L_f and L_s add to the update: the bracket after 1/J."""
        residual = predictions - (phi_bar @ self.head).softmax(1)
        negatives = self.similarities(phi_bar).softmax(1) @ phi_bar
        return residual @ self.head.T + self.beta * (other - negatives)

    def similarities(self, phi_bar: Tensor) -> Tensor:
        """βᵀ(φ̄_m∘φ̄_f) of every m with every other f."""
        itself = torch.eye(len(phi_bar), dtype=torch.bool, device=phi_bar.device)
        return ((phi_bar * self.beta) @ phi_bar.T).masked_fill(itself, -torch.inf)

    def finish(self) -> None:
        """μ_k and Σ_k from the sums of the epoch."""
        weight = self.weight.clamp_min(1e-12)
        self.means = self.first / weight[:, None]
        covariances = self.second / weight[:, None, None] - self.means[:, :, None] * self.means[:, None]
        ridge = RIDGE * covariances.diagonal(dim1=1, dim2=2).mean().clamp_min(1e-12)
        covariances += ridge * torch.eye(self.means.shape[1]).to(covariances)
        self.precisions, self.log_det = torch.linalg.inv(covariances), torch.logdet(covariances)
