"""The update rules and bounds of the paper as printed, in plain loops: what `updates="paper"` is compared with.

Equation labels are those of the paper's TeX source. Indices: image m of a group of B, token j of J, concept k of K,
class n of N, negative f. Everything is numpy float64. A trailing `_p` marks the perturbed view, the paper's prime.

Where the print contradicts itself it is read as follows:

- A token counts as a_mj, without the factor J that the text speaks of. Attention is used as given.
- The Mahalanobis term of the φ update is tempered by a_mj; |Σ_k|^(-1/2) stands at full strength.
- βᵀφ̄ in the φ update is the elementwise product β∘φ̄, a vector over k.
- Σ_k' γ_k' means Σ_k' γ_mk', and φ̄_m is the plain mean of φ_mj over j, so ∂φ̄_m/∂φ_mj = 1/J.
- The negatives F of image m are the other original images of its group. Without any there is no L_s.
- Image m is pulled by its own L_s alone, not by the L_s of the images it is a negative of.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma, gammaln, logsumexp, softmax, xlogy

Array = NDArray[np.float64]


def sweep(
    embeddings: Array,
    attention: Array,
    predictions: Array | None,
    embeddings_p: Array | None,
    attention_p: Array | None,
    alpha: Array,
    means: Array,
    covariances: Array,
    label_head: Array,
    pair_weights: Array,
    gamma: Array,
    gamma_p: Array | None,
    phi_bar: Array,
    phi_bar_p: Array | None,
) -> tuple[Array, Array | None, Array, Array | None, Array, Array | None]:
    """One simultaneous update of both views by eq:update_phi, then eq:update_gamma and φ̄ (after eq:faithful).

    Returns (phi, phi_p, gamma, gamma_p, phi_bar, phi_bar_p). Without `embeddings_p` there is no perturbed view and no
    L_s, and the second of each pair is None; with it the other `_p` arguments are needed too.
    """
    B, K = len(embeddings), len(alpha)

    # ∂(L_f + L_s)/∂φ̄, the large bracket of eq:update_phi, at the old φ̄ of both views.
    pull = np.zeros((B, K))
    pull_p = np.zeros((B, K))
    for m in range(B):
        if predictions is not None:
            pull[m] += gradient_f(phi_bar[m], predictions[m], label_head)
        if embeddings_p is not None:
            assert phi_bar_p is not None
            original, perturbed = gradients_s(m, phi_bar, phi_bar_p, pair_weights)
            pull[m] += original
            pull_p[m] += perturbed  # there is no ŷ' and so no L_f here

    phi = _update_phi(embeddings, attention, means, covariances, gamma, pull)
    new_gamma = _update_gamma(phi, attention, alpha)
    new_phi_bar = _mean_over_tokens(phi)
    if embeddings_p is None:
        return phi, None, new_gamma, None, new_phi_bar, None

    assert attention_p is not None
    assert gamma_p is not None
    phi_p = _update_phi(embeddings_p, attention_p, means, covariances, gamma_p, pull_p)
    new_gamma_p = _update_gamma(phi_p, attention_p, alpha)
    new_phi_bar_p = _mean_over_tokens(phi_p)
    return phi, phi_p, new_gamma, new_gamma_p, new_phi_bar, new_phi_bar_p


def gradient_f(phi_bar_m: Array, prediction: Array, label_head: Array) -> Array:
    """∂L_f/∂φ̄_m of one image, (K,): eq:gradient_phi_classify."""
    K, N = label_head.shape
    scores = np.zeros(N)
    for n in range(N):
        scores[n] = label_head[:, n] @ phi_bar_m  # η_nᵀ φ̄_m
    probability = softmax(scores)
    gradient = np.zeros(K)
    for n in range(N):
        gradient += prediction[n] * label_head[:, n] - probability[n] * label_head[:, n]
    return gradient


def gradients_s(m: int, phi_bar: Array, phi_bar_p: Array, pair_weights: Array) -> tuple[Array, Array]:
    """∂L_s/∂φ̄_m, the last line of eq:update_phi, and ∂L_s/∂φ̄'_m of eq:stability, each (K,)."""
    negatives = [f for f in range(len(phi_bar)) if f != m]
    if not negatives:
        return np.zeros_like(pair_weights), np.zeros_like(pair_weights)
    scores = np.array([pair_weights @ (phi_bar[m] * phi_bar[f]) for f in negatives])  # βᵀ(φ̄_m ∘ φ̄_f)
    probability = softmax(scores)
    original = pair_weights * phi_bar_p[m]
    for p, f in zip(probability, negatives, strict=True):
        original -= p * pair_weights * phi_bar[f]
    perturbed = pair_weights * phi_bar[m]
    return original, perturbed


def m_step(views: list[tuple[Array, Array, Array]]) -> tuple[Array, Array]:
    """Means (K, d) and full covariances (K, d, d) by eq:update_mu and eq:update_sigma.

    `views` holds (phi, attention, embeddings) for any number of groups, original and perturbed alike.
    A concept without any weight has no mean as printed: it comes out as NaN.
    """
    K = views[0][0].shape[2]
    d = views[0][2].shape[2]
    means = np.zeros((K, d))
    covariances = np.zeros((K, d, d))
    for k in range(K):
        weight = np.float64(0)
        weighted_sum = np.zeros(d)
        for phi, attention, embeddings in views:
            B, J, _ = embeddings.shape
            for m in range(B):
                for j in range(J):
                    weight += phi[m, j, k] * attention[m, j]
                    weighted_sum += phi[m, j, k] * attention[m, j] * embeddings[m, j]
        means[k] = weighted_sum / weight

        scatter = np.zeros((d, d))
        for phi, attention, embeddings in views:
            B, J, _ = embeddings.shape
            for m in range(B):
                for j in range(J):
                    difference = embeddings[m, j] - means[k]
                    scatter += phi[m, j, k] * attention[m, j] * np.outer(difference, difference)
        covariances[k] = scatter / weight
    return means, covariances


def bound_e(
    phi: Array,
    gamma: Array,
    attention: Array,
    embeddings: Array,
    alpha: Array,
    means: Array,
    covariances: Array,
) -> Array:
    """L_e of every image, (B,): eq:elbo_expand, its second, third and last term summed over j."""
    B, J, d = embeddings.shape
    K = len(alpha)
    bound = np.zeros(B)
    for m in range(B):
        log_theta = digamma(gamma[m]) - digamma(gamma[m].sum())  # E_q[log θ_m]

        # first term, E_q[log p(θ_m | α)]
        bound[m] += gammaln(alpha.sum())
        for k in range(K):
            bound[m] += -gammaln(alpha[k]) + (alpha[k] - 1) * log_theta[k]

        for j in range(J):
            for k in range(K):
                # second term, E_q[log p(z_mj | θ_m)]: no a_mj here
                bound[m] += phi[m, j, k] * log_theta[k]
                # third term, E_q[log p(e_mj | z_mj)]: a_mj on all of log N, its determinant too
                log_normal = (
                    -_mahalanobis(embeddings[m, j], means[k], covariances[k]) / 2
                    - np.log(2 * np.pi) * d / 2
                    - _log_determinant(covariances[k]) / 2
                )
                bound[m] += phi[m, j, k] * attention[m, j] * log_normal
                # last term, −E_q[log q(z_mj)], with 0 log 0 = 0
                bound[m] -= xlogy(phi[m, j, k], phi[m, j, k])

        # fourth term, −E_q[log q(θ_m)]
        bound[m] -= gammaln(gamma[m].sum())
        for k in range(K):
            bound[m] += gammaln(gamma[m, k]) - (gamma[m, k] - 1) * log_theta[k]
    return bound


def bound_f(phi_bar: Array, predictions: Array | None, label_head: Array) -> Array:
    """L_f of every image, (B,): eq:faithful, last line (= eq:faithful_simplified); 0 without predictions."""
    N = label_head.shape[1]
    bound = np.zeros(len(phi_bar))
    if predictions is None:
        return bound
    for m in range(len(phi_bar)):
        scores = np.zeros(N)
        for n in range(N):
            scores[n] = label_head[:, n] @ phi_bar[m]  # η_nᵀ φ̄_m
            bound[m] += predictions[m, n] * scores[n]
        bound[m] -= logsumexp(scores)
    return bound


def bound_s(phi_bar: Array, phi_bar_p: Array | None, pair_weights: Array) -> Array:
    """L_s of every image, (B,): eq:stability, last line (= eq:stable_simplified); 0 without a pair or a negative."""
    B = len(phi_bar)
    bound = np.zeros(B)
    if phi_bar_p is None or B == 1:
        return bound
    for m in range(B):
        scores = [pair_weights @ (phi_bar[m] * phi_bar[f]) for f in range(B) if f != m]  # βᵀ(φ̄_m ∘ φ̄_f)
        bound[m] = pair_weights @ (phi_bar[m] * phi_bar_p[m]) - logsumexp(scores)
    return bound


def _update_phi(
    embeddings: Array, attention: Array, means: Array, covariances: Array, gamma: Array, pull: Array
) -> Array:
    """φ (B, J, K) of one view: eq:update_phi (= eq:update_phi_app)."""
    B, J, _ = embeddings.shape
    K = len(means)
    phi = np.zeros((B, J, K))
    for m in range(B):
        for j in range(J):
            log_phi = np.zeros(K)
            for k in range(K):
                log_phi[k] = (
                    -_log_determinant(covariances[k]) / 2
                    + digamma(gamma[m, k])
                    - digamma(gamma[m].sum())
                    - attention[m, j] * _mahalanobis(embeddings[m, j], means[k], covariances[k]) / 2
                    + pull[m, k] / J
                )
            unnormalised = np.exp(log_phi - log_phi.max())
            phi[m, j] = unnormalised / unnormalised.sum()
    return phi


def _update_gamma(phi: Array, attention: Array, alpha: Array) -> Array:
    """γ (B, K) of one view: eq:update_gamma (= eq:update_gamma_app)."""
    B, J, K = phi.shape
    gamma = np.zeros((B, K))
    for m in range(B):
        for k in range(K):
            gamma[m, k] = alpha[k]
            for j in range(J):
                gamma[m, k] += phi[m, j, k] * attention[m, j]
    return gamma


def _mean_over_tokens(phi: Array) -> Array:
    """φ̄ (B, K) = (1/J) Σ_j φ_mj: z_avg_def under q, stated after eq:faithful."""
    B, J, K = phi.shape
    phi_bar = np.zeros((B, K))
    for m in range(B):
        for j in range(J):
            phi_bar[m] += phi[m, j] / J
    return phi_bar


def _mahalanobis(embedding: Array, mean: Array, covariance: Array) -> float:
    """(e − μ)ᵀ Σ⁻¹ (e − μ), as in eq:update_phi and eq:elbo_expand."""
    difference = embedding - mean
    return float(difference @ np.linalg.solve(covariance, difference))


def _log_determinant(covariance: Array) -> float:
    """log |Σ|, as in eq:update_phi and eq:elbo_expand."""
    return float(np.linalg.slogdet(covariance).logabsdet)
