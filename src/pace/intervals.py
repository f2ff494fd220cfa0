"""How sure a share is: what credible intervals follow from.

A patch counts by its attention, and neighbours that repeat each other count less: the weights ω_mj of an image sum to its
effective number n_m of independent patches (`pace.model.effective`). With a prior Dir(a), the likelihood of the concepts'
shares is Π_j (Σ_k θ_k p_jk)^ω_j. Its covariance at the mode counts only what is known of θ although patches may belong to
either of two concepts (Louis 1982), and gives every share a Beta distribution. Where every patch has one concept for sure
these are the marginals of Dir(a + Σ_j ω_j φ_j).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_SETTLING = 20  # steps of EM from θ to the mode; more changed no planted coverage
_FAINT = 1e-3  # effective patches below which a concept is as good as absent


def credible(
    level: float, shares: Array, marginals: tuple[Array, Array], kinds: Array | None, part_of: Array
) -> tuple[Array, Array]:
    """Lower and upper end of the central interval of every share, widened to hold it, from Beta distributions (M, P).

    With `kinds` (M, K) the shares are of kinds of parts: 0 with probability 1 − ψ, else as the part's.
    """
    from scipy.stats import beta

    ends = []
    for tail in ((1 - level) / 2, (1 + level) / 2):
        if kinds is None:
            ends.append(beta.ppf(tail, *marginals))
        else:
            rest = np.clip((tail - (1 - kinds)) / kinds.clip(1e-12), 0, 1)
            of_part = beta.ppf(rest, *(some[:, part_of] for some in marginals))
            ends.append(np.where(rest > 0, of_part, 0.0))
    return np.minimum(ends[0], shares), np.maximum(ends[1], shares)


def beta_of_shares(phi: Array, gamma: Array, weights: Array, prior: Array) -> tuple[Array, Array]:
    """Parameters (K,) of the shares' Beta distributions in one image."""
    from scipy.special import digamma

    effective, strength = weights.sum(), prior.sum()
    total = effective + strength
    theta, precision = prior / total, np.full(len(prior), float(total))  # as of a concept without any patch
    seen = np.flatnonzero(weights @ phi > _FAINT)
    # φ_jk ∝ p_jk exp E log θ_k, so the likelihoods p follow from φ but for a factor of each patch.
    field = digamma(gamma[seen].astype(np.float64))
    likelihood = phi[:, seen] * np.exp(np.minimum(field.max() - field, 40))
    likelihood /= likelihood.max(1, keepdims=True).clip(1e-300)
    share = gamma[seen] / gamma[seen].sum()
    for _ in range(_SETTLING):
        norm = (likelihood @ share).clip(1e-300)
        counts = share * ((weights / norm) @ likelihood)
        share = (prior[seen] + counts) / total
    own = likelihood * share
    own /= own.sum(1, keepdims=True).clip(1e-300)
    inverse = np.linalg.inv((own * weights[:, None]).T @ own + np.diag(prior[seen]))
    pull = share * (inverse @ share)
    all_pulls = pull.sum() + (np.delete(prior, seen) / total**2).sum()
    variance = share**2 * np.diag(inverse) - pull**2 / all_pulls
    theta[seen], precision[seen] = share, share * (1 - share) / variance.clip(1e-12)
    return theta * precision, (1 - theta) * precision
