"""Theorem 1 on an example small enough to compute both sides: one token in one dimension, two concepts, two classes."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import beta as beta_distribution
from scipy.stats import norm

from pace import PACE, Observations
from pace.model.inference import Weights, infer, uniform_start
from pace.model.objective import faithfulness

E = np.linspace(-6, 6, 601)  # the embedding e of an image's only token
DE = E[1] - E[0]
P = (norm.pdf(E, -1.2, 0.7) + norm.pdf(E, 1.2, 0.7)) / 2
THETA = np.linspace(0, 1, 1001)[1:-1]  # θ_1
DT = THETA[1] - THETA[0]
NOISE = 0.5  # e' = e + noise is the perturbed view
YHAT = np.stack([1 / (1 + np.exp(3 * E)), 1 / (1 + np.exp(-3 * E))], 1)


def entropy(density, step):
    return -float(np.sum(np.where(density > 0, density * np.log(np.maximum(density, 1e-300)), 0)) * step)


def explained(means, spread, alpha):
    """φ, γ and L_e of every e, by the package's own inference."""
    log_likelihood = torch.from_numpy(norm.logpdf(E[:, None, None], means, spread))
    weights = Weights.of(torch.ones(len(E), 1, dtype=torch.float64), "exact")
    start = uniform_start(len(E), 2, 1, "exact", log_likelihood.device)
    prior = torch.full((2,), alpha, dtype=torch.float64)
    return infer(log_likelihood, weights, prior, start, max_sweeps=500, tol=1e-10)


def information(phi, gamma):
    """I(e; θ, z) under p(e) q(θ | e) q(z | e), and its part that z alone carries."""
    q_theta = beta_distribution.pdf(THETA[None], gamma[:, :1], gamma[:, 1:])
    joint = q_theta[:, None] * phi[:, :, None]  # (e, z, θ)
    marginal = np.einsum("e,ezt->zt", P * DE, joint)
    ratio = np.log(np.maximum(joint, 1e-300)) - np.log(np.maximum(marginal, 1e-300))[None]
    return float(np.einsum("e,ezt,ezt->", P * DE, joint, ratio) * DT)


@pytest.mark.parametrize(
    ("means", "spread", "alpha", "head", "beta"),
    [
        ([-1.2, 1.2], 0.7, 1.0, [[1.0, -1.0], [-1.0, 1.0]], [1.0, 1.0]),  # concepts as they are
        ([-1.0, 1.0], 1.0, 2.0, [[0.3, -0.1], [-0.5, 0.2]], [0.5, 0.1]),
        ([0.1, 0.2], 1.4, 3.0, [[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]),  # concepts that say nothing
    ],
)
def test_the_bound_lies_below_the_mutual_information(means, spread, alpha, head, beta):
    posterior = explained(means, spread, alpha)
    phi = posterior.phi[:, 0].numpy()

    # L_e <= I(e; θ, z) - H(e): the bound is E log p(e | z) less a KL, and E log p(e | z) <= -H(e | z).
    left_e = float((posterior.bound.numpy() * P).sum() * DE)
    right_e = information(phi, posterior.gamma.numpy()) - entropy(P, DE)
    assert left_e <= right_e + 1e-6

    # L_f <= I(ŷ; φ̄) - H(ŷ). φ̄ is a strictly monotone function of e, so it carries the information that e does.
    by_image = faithfulness(torch.from_numpy(phi), torch.from_numpy(YHAT), torch.tensor(head, dtype=torch.float64))
    left_f = float((by_image.numpy() * P).sum() * DE)
    classes = (YHAT * P[:, None]).sum(0) * DE
    conditional = -float((YHAT * np.log(np.maximum(YHAT, 1e-300)) * P[:, None]).sum() * DE)
    information_f = -float((classes * np.log(classes)).sum()) - conditional
    assert left_f <= information_f + float((classes * np.log(classes)).sum()) + 1e-6

    # L_s <= I(φ̄; φ̄') + 1 - log F, by 0 <= β <= 1; here with one negative, whose expectation is in closed form.
    blurred = norm.pdf(E[None], E[:, None], NOISE)  # p(e' | e)
    blurred /= blurred.sum(1, keepdims=True) * DE
    own = np.einsum("e,ek,ef,fk->k", P * DE, phi, blurred * DE, phi)
    mean = (phi * P[:, None]).sum(0) * DE
    left_s = float(np.array(beta) @ (own - mean * mean))
    information_s = entropy(P @ blurred * DE, DE) - (0.5 * math.log(2 * math.pi * math.e) + math.log(NOISE))
    assert left_s <= information_s + 1

    left = left_e + left_f + left_s
    constant = -entropy(P, DE) + float((classes * np.log(classes)).sum()) + 1
    right = right_e + entropy(P, DE) + information_f + information_s
    assert left <= right + constant


def test_concepts_that_are_there_have_the_higher_bound():
    true, blind = explained([-1.2, 1.2], 0.7, 1.0), explained([0.1, 0.2], 1.4, 1.0)
    assert (true.bound.numpy() * P).sum() > (blind.bound.numpy() * P).sum()
    told, hidden = (information(found.phi[:, 0].numpy(), found.gamma.numpy()) for found in (true, blind))
    assert told > hidden


def test_with_unequal_attention_the_printed_first_term_fails_and_the_weighted_one_holds():
    """Two tokens, all attention on the first, whose embedding hardly varies; one concept, so that I(e; θ, z) = 0."""
    rng = np.random.default_rng(0)
    narrow, wide = 0.01, 1.0
    embeddings = np.stack([narrow * rng.normal(size=1000), wide * rng.normal(size=1000)], 1)[:, :, None]
    observations = Observations(embeddings, np.tile([1.0, 0.0], (1000, 1)))
    model = PACE(1, n_init=1, dtype="float64", device="cpu").fit(observations)
    left = model.score(observations)

    def gaussian_entropy(deviation):
        return 0.5 * math.log(2 * math.pi * math.e) + math.log(deviation)

    assert left > -(gaussian_entropy(narrow) + gaussian_entropy(wide)) + 1
    assert left == pytest.approx(-2 * gaussian_entropy(narrow), abs=0.1)  # J (I(e; z) - H(e)), here with equality
