"""The update rules and bounds of the paper as printed, image by image in float64: what `updates="paper"` is compared with.

Equation labels are those of the paper's TeX source. Indices: image m of a group of B, token j of J, concept k of K,
class n of N, negative f. A trailing `_p` marks the perturbed view, the paper's prime.

Where the print contradicts itself it is read as follows:

- A token counts as a_mj, without the factor J that the text speaks of. Attention is used as given.
- The Mahalanobis term of the φ update is tempered by a_mj; |Σ_k|^(-1/2) stands at full strength.
- βᵀφ̄ in the φ update is the elementwise product β∘φ̄, a vector over k.
- Σ_k' γ_k' means Σ_k' γ_mk', and φ̄_m is the plain mean of φ_mj over j, so ∂φ̄_m/∂φ_mj = 1/J.
- The negatives F of image m are the other original images of its group. Without any there is no L_s.
- Image m is pulled by its own L_s alone, not by the L_s of the images it is a negative of.
"""

import numpy as np
from scipy.special import digamma, gammaln, logsumexp, softmax, xlogy


def sweep(
    embeddings, attention, predictions, embeddings_p, attention_p, alpha, means, covariances, label_head, pair_weights,
    gamma, gamma_p, phi_bar, phi_bar_p,
):  # fmt: skip
    """One simultaneous update of both views by eq:update_phi, then eq:update_gamma and φ̄ (after eq:faithful).

    Returns (phi, phi_p, gamma, gamma_p, phi_bar, phi_bar_p). Without `embeddings_p` there is no perturbed view and no
    L_s, and the second of each pair is None; with it the other `_p` arguments are needed too.
    """
    # ∂(L_f + L_s)/∂φ̄, the large bracket of eq:update_phi, at the old φ̄ of both views.
    pull, pull_p = np.zeros_like(gamma), np.zeros_like(gamma)
    for m in range(len(embeddings)):
        if predictions is not None:
            pull[m] += gradient_f(phi_bar[m], predictions[m], label_head)
        if embeddings_p is not None:
            original, perturbed = gradients_s(m, phi_bar, phi_bar_p, pair_weights)
            pull[m] += original
            pull_p[m] += perturbed  # there is no ŷ' and so no L_f here
    found = [_update(embeddings, attention, alpha, means, covariances, gamma, pull), (None, None, None)]
    if embeddings_p is not None:
        found[1] = _update(embeddings_p, attention_p, alpha, means, covariances, gamma_p, pull_p)
    return tuple(part for pair in zip(*found, strict=True) for part in pair)


def gradient_f(phi_bar_m, prediction, label_head):
    """∂L_f/∂φ̄_m of one image, (K,): eq:gradient_phi_classify."""
    probability = softmax(label_head.T @ phi_bar_m)  # of η_nᵀ φ̄_m
    return sum((prediction[n] - probability[n]) * label_head[:, n] for n in range(len(prediction)))


def gradients_s(m, phi_bar, phi_bar_p, pair_weights):
    """∂L_s/∂φ̄_m, the last line of eq:update_phi, and ∂L_s/∂φ̄'_m of eq:stability, each (K,)."""
    negatives = [f for f in range(len(phi_bar)) if f != m]
    if not negatives:
        return np.zeros_like(pair_weights), np.zeros_like(pair_weights)
    probability = softmax([pair_weights @ (phi_bar[m] * phi_bar[f]) for f in negatives])  # of βᵀ(φ̄_m ∘ φ̄_f)
    expected = sum(p * pair_weights * phi_bar[f] for p, f in zip(probability, negatives, strict=True))
    return pair_weights * phi_bar_p[m] - expected, pair_weights * phi_bar[m]


def m_step(views):
    """Means (K, d) and full covariances (K, d, d) by eq:update_mu and eq:update_sigma.

    `views` holds (phi, attention, embeddings) for any number of groups, original and perturbed alike.
    A concept without any weight has no mean as printed: it comes out as NaN.
    """
    weights = np.concatenate([(phi * attention[:, :, None]).reshape(-1, phi.shape[2]) for phi, attention, _ in views])
    tokens = np.concatenate([embeddings.reshape(-1, embeddings.shape[2]) for *_, embeddings in views])
    means, covariances = [], []
    for weight in weights.T:
        means.append(weight @ tokens / weight.sum())
        difference = tokens - means[-1]
        covariances.append((weight * difference.T) @ difference / weight.sum())
    return np.stack(means), np.stack(covariances)


def bound_e(phi, gamma, attention, embeddings, alpha, means, covariances):
    """L_e of every image, (B,): eq:elbo_expand, its second, third and last term summed over j."""
    bound = np.zeros(len(embeddings))
    for m in range(len(embeddings)):
        log_theta = digamma(gamma[m]) - digamma(gamma[m].sum())  # E_q[log θ_m]
        # first term, E_q[log p(θ_m | α)]
        bound[m] += gammaln(alpha.sum()) + (-gammaln(alpha) + (alpha - 1) * log_theta).sum()
        for j in range(embeddings.shape[1]):
            # second term, E_q[log p(z_mj | θ_m)]: no a_mj here
            bound[m] += phi[m, j] @ log_theta
            # third term, E_q[log p(e_mj | z_mj)]: a_mj on all of log N, its determinant too
            distances, log_determinants = _gaussians(embeddings[m, j], means, covariances)
            log_normal = -distances / 2 - np.log(2 * np.pi) * embeddings.shape[2] / 2 - log_determinants / 2
            bound[m] += phi[m, j] @ (attention[m, j] * log_normal)
            # last term, −E_q[log q(z_mj)], with 0 log 0 = 0
            bound[m] -= xlogy(phi[m, j], phi[m, j]).sum()
        # fourth term, −E_q[log q(θ_m)]
        bound[m] += -gammaln(gamma[m].sum()) + (gammaln(gamma[m]) - (gamma[m] - 1) * log_theta).sum()
    return bound


def bound_f(phi_bar, predictions, label_head):
    """L_f of every image, (B,): eq:faithful, last line (= eq:faithful_simplified); 0 without predictions."""
    if predictions is None:
        return np.zeros(len(phi_bar))
    scores = phi_bar @ label_head  # η_nᵀ φ̄_m
    return (predictions * scores).sum(1) - logsumexp(scores, axis=1)


def bound_s(phi_bar, phi_bar_p, pair_weights):
    """L_s of every image, (B,): eq:stability, last line (= eq:stable_simplified); 0 without a pair or a negative."""
    bound = np.zeros(len(phi_bar))
    if phi_bar_p is None or len(phi_bar) == 1:
        return bound
    for m in range(len(phi_bar)):
        scores = [pair_weights @ (phi_bar[m] * phi_bar[f]) for f in range(len(phi_bar)) if f != m]  # βᵀ(φ̄_m ∘ φ̄_f)
        bound[m] = pair_weights @ (phi_bar[m] * phi_bar_p[m]) - logsumexp(scores)
    return bound


def _update(embeddings, attention, alpha, means, covariances, gamma, pull):
    """φ (B, J, K) of one view by eq:update_phi, γ (B, K) by eq:update_gamma, and φ̄ (B, K) = (1/J) Σ_j φ_mj."""
    (B, J, _), K = embeddings.shape, len(means)
    phi = np.zeros((B, J, K))
    for m in range(B):
        log_theta = digamma(gamma[m]) - digamma(gamma[m].sum())
        for j in range(J):
            distances, log_determinants = _gaussians(embeddings[m, j], means, covariances)
            phi[m, j] = softmax(-log_determinants / 2 + log_theta - attention[m, j] * distances / 2 + pull[m] / J)
    return phi, alpha + (phi * attention[:, :, None]).sum(1), phi.mean(1)


def _gaussians(embedding, means, covariances):
    """(e − μ_k)ᵀ Σ_k⁻¹ (e − μ_k) and log |Σ_k|, each (K,), as in eq:update_phi and eq:elbo_expand."""
    distances = [
        (embedding - mu) @ np.linalg.solve(sigma, embedding - mu) for mu, sigma in zip(means, covariances, strict=True)
    ]
    return np.array(distances), np.linalg.slogdet(covariances).logabsdet
