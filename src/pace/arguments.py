"""PACE's arguments, which its constructor only stores: checked, and turned into what learning reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pace.model.gaussians import FAMILIES
from pace.model.learning import SMALLEST_ALPHA, Settings
from pace.model.refining import Refinement
from pace.observations import Observations

if TYPE_CHECKING:
    from pace.explainer import PACE


def settings_of(model: PACE, observations: Observations) -> Settings:
    """Check the arguments, which the constructor only stored."""
    check_type(observations)
    least = {
        "n_concepts": 1,
        "n_init": 1,
        "max_iter": 1,
        "max_sweeps": 1,
        "negatives": 2,
        "rank": 1,
        "head_steps": 0,
        "refine": 0,
    }
    for name, lowest in least.items():
        value = getattr(model, name)
        if not isinstance(value, (int, np.integer)) or value < lowest:
            raise ValueError(f"{name}: expected a whole number of at least {lowest}; found {value!r}")
    weights = ("faithfulness_weight", "stability_weight")
    for name in ("tol", "sweep_tol", "head_rate", "learning_offset", "learning_decay", *weights):
        if not getattr(model, name) >= 0:
            raise ValueError(f"{name}: expected at least 0; found {getattr(model, name)!r}")
    if model.covariance not in FAMILIES:
        raise ValueError(f"covariance: expected one of {', '.join(FAMILIES)}; found {model.covariance!r}")
    if model.updates not in ("exact", "paper"):
        raise ValueError(f"updates: expected 'exact' or 'paper'; found {model.updates!r}")
    if isinstance(model.init, str) and model.init != "k-means++":
        raise ValueError(f"init: expected 'k-means++' or an array of means; found {model.init!r}")
    if model.batch_size is not None and (not isinstance(model.batch_size, (int, np.integer)) or model.batch_size < 1):
        raise ValueError(f"batch_size: expected a whole number of at least 1 or None; found {model.batch_size!r}")
    dtype = getattr(torch, model.dtype, None) if isinstance(model.dtype, str) else model.dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: expected 'float32' or 'float64'; found {model.dtype!r}")
    return Settings(
        updates=model.updates,  # type: ignore[arg-type]
        max_sweeps=model.max_sweeps,
        sweep_tol=model.sweep_tol,
        negatives=model.negatives,
        batch_size=model.batch_size,
        learn_alpha=isinstance(model.alpha, str),
        smallest_alpha=SMALLEST_ALPHA * (1 if model.updates == "exact" else 1 / observations.n_tokens),
        head_steps=model.head_steps,
        head_rate=model.head_rate,
        device=_device(model, observations),
        dtype=dtype,
    )


def _device(model: PACE, observations: Observations) -> torch.device:
    if model.device is not None:
        return torch.device(model.device)
    given = observations.embeddings.device if isinstance(observations.embeddings, Tensor) else torch.device("cpu")
    if given.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda")
    return given


def alpha_of(model: PACE, observations: Observations, settings: Settings) -> Tensor:
    weak = 0.1 * settings.image_weight(observations.n_tokens) / observations.n_tokens
    if isinstance(model.alpha, str) and model.alpha != "learn":
        raise ValueError(f"alpha: expected a number, an array, 'learn' or None; found {model.alpha!r}")
    given = weak if model.alpha is None or isinstance(model.alpha, str) else model.alpha
    alpha = torch.as_tensor(np.asarray(given, dtype=np.float64), device=settings.device)
    if alpha.dim() > 1 or (alpha.dim() == 1 and len(alpha) != model.n_concepts) or not bool((alpha > 0).all()):
        raise ValueError(f"alpha: expected one positive number or {model.n_concepts} of them; found {model.alpha!r}")
    return alpha.expand(model.n_concepts).clone()


def prior_strength_of(model: PACE, observations: Observations, settings: Settings) -> float:
    strength = model.covariance_prior
    if strength is None:
        strength = observations.dim if model.covariance in ("full", "tied") else 10
    if not strength >= 0:
        raise ValueError(f"covariance_prior: expected at least 0; found {strength}")
    # With the paper's weights an image counts as one patch, and the prior's patches shrink alike.
    return float(strength) * settings.image_weight(observations.n_tokens) / observations.n_tokens


def refinement_of(model: PACE, observations: Observations, perturbed: Observations | None) -> Refinement | None:
    if not model.refine:
        return None
    if model.covariance != "tied" or model.updates != "exact":
        raise ValueError(
            f"refine: needs covariance='tied' and updates='exact'; found {model.covariance!r} and {model.updates!r}"
        )
    if not observations.n_classes and perturbed is None:
        raise ValueError("refine: needs predictions or perturbed views, which say what to refine the concepts for")
    return Refinement(model.refine, model.faithfulness_weight, model.stability_weight)


def check_type(observations: object) -> None:
    if not isinstance(observations, Observations):
        raise TypeError(f"expected pace.Observations; found {type(observations).__name__}")
