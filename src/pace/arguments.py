"""PACE's arguments, which its constructor only stores: checked, and turned into what learning reads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pace.fitting import Plan
from pace.model.gaussians import FAMILIES
from pace.model.learning import SMALLEST_ALPHA, Settings
from pace.model.refining import Refinement
from pace.observations import Observations

if TYPE_CHECKING:
    from pace.explainer import PACE

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?)\s*([kKMGT]?)i?B?")
_AUTO_STEPS = 1000  # of refining, unless told otherwise
_AUTO_IMAGES = 1000  # before it refines or prunes by itself: few would be learned by heart, and show few concepts
_SHARE_OF_GPU = 0.9  # of its free memory, unless told otherwise


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
    }
    for name, lowest in least.items():
        value = getattr(model, name)
        found = name == "n_concepts" and isinstance(value, str) and value == "auto"
        if not found and (not isinstance(value, (int, np.integer)) or value < lowest):
            also = " or 'auto'" if name == "n_concepts" else ""
            raise ValueError(f"{name}: expected a whole number of at least {lowest}{also}; found {value!r}")
    if isinstance(model.n_concepts, str) and (model.updates != "exact" or not isinstance(model.init, str)):
        raise ValueError("n_concepts='auto' needs updates='exact' and init='k-means++'")
    if model.refine != "auto" and (not isinstance(model.refine, (int, np.integer)) or model.refine < 0):
        raise ValueError(f"refine: expected a whole number of at least 0 or 'auto'; found {model.refine!r}")
    if model.prune != "auto" and not isinstance(model.prune, (bool, np.bool_)):
        raise ValueError(f"prune: expected True, False or 'auto'; found {model.prune!r}")
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
    for name in ("batch_size", "minibatch"):
        value = getattr(model, name)
        if value is not None and (not isinstance(value, (int, np.integer)) or value < 1):
            raise ValueError(f"{name}: expected a whole number of at least 1 or None; found {value!r}")
    dtype = getattr(torch, model.dtype, None) if isinstance(model.dtype, str) else model.dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: expected 'float32' or 'float64'; found {model.dtype!r}")
    device = _device(model, observations)
    return Settings(
        updates=model.updates,  # type: ignore[arg-type]
        max_sweeps=model.max_sweeps,
        sweep_tol=model.sweep_tol,
        negatives=model.negatives,
        batch_size=model.batch_size,
        memory=memory_of(model, device),
        learn_alpha=isinstance(model.alpha, str),
        smallest_alpha=SMALLEST_ALPHA * (1 if model.updates == "exact" else 1 / observations.n_tokens),
        head_steps=model.head_steps,
        head_rate=model.head_rate,
        device=device,
        dtype=dtype,
    )


def _device(model: PACE, observations: Observations) -> torch.device:
    if model.device is not None:
        return torch.device(model.device)
    given = observations.embeddings.device if isinstance(observations.embeddings, Tensor) else torch.device("cpu")
    if given.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda")
    return given


def memory_of(model: PACE, device: torch.device) -> int | None:
    """The budget in bytes; where none is given, most of what a GPU has free, and none on a CPU."""
    given = model.memory
    if given is None:
        if device.type != "cuda":
            return None
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, to be used again
        return int(_SHARE_OF_GPU * (torch.cuda.mem_get_info(device)[0] + idle))
    found = _SIZE.fullmatch(given.strip()) if isinstance(given, str) else None
    if found:
        size = float(found[1]) * 1000 ** " kMGT".index(found[2].replace("K", "k") or " ")
    elif isinstance(given, (int, float, np.number)) and not isinstance(given, bool):
        size = float(given)
    else:
        raise ValueError(f"memory: expected bytes, a size like '8GB' or None; found {given!r}")
    if not 0 < size < float("inf"):
        raise ValueError(f"memory: expected more than 0 bytes; found {given!r}")
    return int(size)


def plan_of(model: PACE, observations: Observations, perturbed: Observations | None, settings: Settings) -> Plan:
    refinement = refinement_of(model, observations, perturbed)
    views = 1 if perturbed is None or refinement is not None else 2
    warm = model.warm_start and model.__sklearn_is_fitted__()
    past = model._statistics if warm else None
    return Plan(
        family=model.covariance,
        epochs=model.max_iter,
        least_gain=model.tol * views * settings.image_weight(observations.n_tokens),
        minibatch=model.minibatch,
        rate=lambda step: rate_of(model, (model.n_steps_ if warm else 0) + step),
        past=None if past is None else past.map(lambda t: t.to(settings.device)),
        seed=model.seed,
        refinement=refinement,
        refine_anyway=model.refine != "auto",
    )


def rate_of(model: PACE, step: int) -> float:
    """Weight of the t-th minibatch in the running average, t = 1, 2, …"""
    return float((model.learning_offset + step) ** -model.learning_decay)


def plain_parameters(model: PACE) -> dict[str, Any]:
    """The arguments as JSON knows them."""
    return {name: _plain(value) for name, value in model.get_params().items()}


def _plain(value: Any) -> Any:
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def alpha_of(model: PACE, n_concepts: int, observations: Observations, settings: Settings) -> Tensor:
    weak = 0.1 * settings.image_weight(observations.n_tokens) / observations.n_tokens
    if isinstance(model.alpha, str) and model.alpha != "learn":
        raise ValueError(f"alpha: expected a number, an array, 'learn' or None; found {model.alpha!r}")
    given = weak if model.alpha is None or isinstance(model.alpha, str) else model.alpha
    alpha = torch.as_tensor(np.asarray(given, dtype=np.float64), device=settings.device)
    if alpha.dim() > 1 or (alpha.dim() == 1 and len(alpha) != n_concepts) or not bool((alpha > 0).all()):
        raise ValueError(f"alpha: expected one positive number or {n_concepts} of them; found {model.alpha!r}")
    return alpha.expand(n_concepts).clone()


def prior_strength_of(model: PACE, observations: Observations, settings: Settings) -> float:
    strength = model.covariance_prior
    if strength is None:
        strength = observations.dim if model.covariance in ("full", "tied") else 10
    if not strength >= 0:
        raise ValueError(f"covariance_prior: expected at least 0; found {strength}")
    # With the paper's weights an image counts as one patch, and the prior's patches shrink alike.
    return float(strength) * settings.image_weight(observations.n_tokens) / observations.n_tokens


def refinement_of(model: PACE, observations: Observations, perturbed: Observations | None) -> Refinement | None:
    steps = model.refine
    able = model.covariance == "tied" and model.updates == "exact"
    if isinstance(steps, str):
        known = able and observations.n_classes and perturbed is not None and model.minibatch is None
        steps = _AUTO_STEPS if known and len(observations) >= _AUTO_IMAGES else 0
    if not steps:
        return None
    if not able:
        raise ValueError(
            f"refine: needs covariance='tied' and updates='exact'; found {model.covariance!r} and {model.updates!r}"
        )
    if not observations.n_classes and perturbed is None:
        raise ValueError("refine: needs predictions or perturbed views, which say what to refine the concepts for")
    return Refinement(steps, model.faithfulness_weight, model.stability_weight)


def prunes(model: PACE, observations: Observations, whole: bool = True) -> bool:
    """Whether to ask first if the patches hold so many concepts. `whole`: these are all images there will be."""
    able = model.updates == "exact" and isinstance(model.init, str) and isinstance(model.alpha, str)
    if model.prune == "auto":
        known = observations.n_classes > 1 and len(observations) >= _AUTO_IMAGES
        return able and whole and known and model.covariance == "tied"
    if model.prune and not able:
        raise ValueError("prune: needs updates='exact', init='k-means++' and alpha='learn'")
    return bool(model.prune)


def check_type(observations: object) -> None:
    if not isinstance(observations, Observations):
        raise TypeError(f"expected pace.Observations; found {type(observations).__name__}")
