"""The concepts: K Gaussians over patch embeddings, in four covariance families.

Notation (docs/model.md): n patches x (n, d), centred on the data mean; r (n, K) = weight of patch i under concept k.

    means μ_k (K, d) · Σ_k⁻¹ = P_k P_kᵀ, P_k upper triangular · prior: κ pseudo-patches with covariance Σ0

A family knows four things: squared Mahalanobis distances, log |Σ_k|, which weighted sums of the patches it needs, and the
(μ, Σ) that maximise Σ_i r_ik log N(x_i | μ_k, Σ_k) - κ/2 (log |Σ_k| + tr Σ0 Σ_k⁻¹) given these sums. The prior keeps Σ_k
positive definite from any number of patches. Sums are float64 whatever the working precision, and add up.
"""

from pace.model.gaussians.dense import FullGaussians, TiedGaussians
from pace.model.gaussians.diagonal import DiagGaussians, LowRankGaussians
from pace.model.gaussians.family import Gaussians, Prior, Sums

FAMILIES: dict[str, type[Gaussians]] = {
    family.name: family for family in (FullGaussians, DiagGaussians, TiedGaussians, LowRankGaussians)
}

__all__ = ["FAMILIES", "DiagGaussians", "FullGaussians", "Gaussians", "Prior", "Sums", "TiedGaussians"]
