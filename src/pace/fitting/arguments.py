"""PACE's arguments, which its constructor only stores, and its data: checked, and turned into what learning reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pace.fitting.loop import Plan
from pace.fitting.parameters import PARAMETERS, memory_in_bytes
from pace.model.settings import SMALLEST_ALPHA, Settings
from pace.observations import Observations
from pace.terminal import one_line

if TYPE_CHECKING:
    from pace.explainer import PACE

RANK = 16  # directions of a "low_rank" covariance: a round number, not tuned

_TOL = 1e-4  # nats per patch and epoch: EM stops when the bound rises by less
_PARTS = 8  # if there are enough concepts: fewer make one of the whole object, more move with every crop
_REFINING_STEPS, _SOME_IMAGES = 600, 100  # unless told otherwise; kinds of fewer images are not refined
_MANY_IMAGES = 1000  # before it prunes by itself, or learns flat concepts without perturbed views
_FEWEST_NESTED = 12  # concepts; fewer leave no room for kinds
_SHARE_OF_GPU = 0.9  # of its free memory, unless told otherwise


def check_arguments(model: PACE) -> None:
    """What is wrong with the arguments, whatever data they will be used on."""
    for name, parameter in PARAMETERS.items():
        parameter.check(getattr(model, name))
    finds_number = isinstance(model.n_concepts, str)
    if finds_number and model.updates != "exact":
        raise ValueError("n_concepts: 'auto' needs updates='exact'")
    if model.refine and not isinstance(model.refine, str) and not _can_refine(model):
        raise ValueError(
            f"refine: needs covariance='tied' and updates='exact'; found {model.covariance!r} and {model.updates!r}"
        )
    if not isinstance(model.parts, (str, type(None))):
        if model.updates != "exact":
            raise ValueError("parts: needs updates='exact'; use parts=None")
        if not isinstance(model.n_concepts, str) and model.parts > model.n_concepts:
            raise ValueError(f"parts: expected at most {model.n_concepts}, one for every concept; found {model.parts}")
        if np.ndim(model.alpha):
            raise ValueError("parts: needs one number for alpha, or 'learn'; use parts=None")
    given = () if isinstance(model.alpha, str) or model.alpha is None else np.shape(model.alpha)
    if given and not finds_number and given != (model.n_concepts,):
        raise ValueError(f"alpha: expected one positive number or {model.n_concepts} of them; found {model.alpha!r}")
    if model.prune and model.prune != "auto" and not finds_number and not _can_prune(model):
        raise ValueError("prune: needs updates='exact' and alpha='learn'")
    dtype_of(model)
    _given_device(model)


def settings_of(model: PACE, observations: Observations) -> Settings:
    """Check the arguments, and say how to learn and infer with them."""
    check_type(observations)
    check_arguments(model)
    device = _device(model, observations)
    return Settings(
        device=device,
        dtype=dtype_of(model),
        updates=model.updates,  # type: ignore[arg-type]
        memory=_memory(model, device),
        learn_alpha=isinstance(model.alpha, str),
        smallest_alpha=SMALLEST_ALPHA * (1 if model.updates == "exact" else 1 / observations.n_tokens),
    )


def dtype_of(model: PACE) -> torch.dtype:
    dtype = getattr(torch, model.dtype, None) if isinstance(model.dtype, str) else model.dtype
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float64):  # an array has no truth
        raise ValueError(f"dtype: expected {PARAMETERS['dtype'].expected}; found {one_line(repr(model.dtype))}")
    return dtype


def _given_device(model: PACE) -> torch.device | None:
    if model.device is None:
        return None
    if str(model.device).startswith("mps"):
        raise ValueError("device: concepts are computed in float64, which Apple GPUs lack; leave it out, or pass 'cpu'")
    try:
        device = torch.device(model.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # no such name, no such GPU, no GPU, not a name at all
        why = str(error).partition("\n")[0]
        raise ValueError(f"device: {model.device!r} cannot be used; None takes what there is ({why})") from None
    return device


def _device(model: PACE, observations: Observations) -> torch.device:
    device = _given_device(model)
    if device is not None:
        return device
    given = observations.embeddings.device if isinstance(observations.embeddings, Tensor) else torch.device("cpu")
    if given.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda")
    return given


def _memory(model: PACE, device: torch.device) -> int | None:
    """The budget in bytes; where none is given, most of what a GPU has free, and no limit on a CPU."""
    if model.memory is not None or device.type != "cuda":
        return memory_in_bytes(model.memory)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, to be used again
    return int(_SHARE_OF_GPU * (torch.cuda.mem_get_info(device)[0] + idle))


def plan_of(model: PACE, observations: Observations, perturbed: Observations | None, settings: Settings) -> Plan:
    known = _can_refine(model) and observations.n_classes > 0 and perturbed is not None
    return Plan(
        family=model.covariance,
        epochs=model.max_iter,
        least_gain=_TOL * settings.image_weight(observations.n_tokens),
        minibatch=model.minibatch,
        seed=model.seed,
        as_they_are=known and model.minibatch is None and len(observations) >= _MANY_IMAGES,
        refining_steps=_refining_steps(model, observations, perturbed, known),
    )


def _refining_steps(model: PACE, observations: Observations, perturbed: Observations | None, known: bool) -> int:
    if isinstance(model.refine, str):
        return _REFINING_STEPS if known and len(observations) >= _SOME_IMAGES else 0
    if model.refine and model.parts in (None, "none"):
        raise ValueError("refine: only kinds of parts are refined; leave it out, or parts=None")
    if model.refine and not observations.n_classes and perturbed is None:
        raise ValueError("refine: needs predictions or perturbed views, which say what to refine the concepts for")
    return int(model.refine)


def parts_of(model: PACE, n_concepts: int, n_images: int) -> int | None:
    """How many parts to look for; None for concepts that are no kinds of parts."""
    if model.parts is None or model.parts == "none":  # as the command line has it
        return None
    if isinstance(model.parts, str):
        possible = model.updates == "exact" and not np.ndim(model.alpha)
        return min(_PARTS, n_concepts // 3) if possible and _FEWEST_NESTED <= n_concepts <= n_images else None
    if model.parts >= n_concepts:
        return None
    if n_concepts > n_images:
        raise ValueError(f"parts: {n_concepts} kinds of parts need as many images; found {n_images}; use parts=None")
    return int(model.parts)


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
    """α as it is given; 0.1 of a patch where it is not, or where learning starts."""
    given: Any = model.alpha
    if given is None or isinstance(given, str):
        given = 0.1 * settings.image_weight(observations.n_tokens) / observations.n_tokens
    alpha = torch.as_tensor(np.asarray(given, dtype=np.float64), device=settings.device)
    if alpha.ndim and alpha.shape != (n_concepts,):
        raise ValueError(f"alpha: expected one positive number or {n_concepts} of them; found {model.alpha!r}")
    return alpha.expand(n_concepts).clone()


def prior_strength_of(model: PACE, observations: Observations, settings: Settings) -> float:
    """Weight, in patches, of the pooled covariance in every Σ_k: enough for a proper matrix, too little to be felt."""
    strength = observations.dim if model.covariance in ("full", "tied") else 10
    # With the paper's weights an image counts as one patch, and the prior's patches shrink alike.
    return float(strength) * settings.image_weight(observations.n_tokens) / observations.n_tokens


def _can_refine(model: PACE) -> bool:
    return model.covariance == "tied" and model.updates == "exact"


def prunes(model: PACE, observations: Observations, whole: bool = True) -> bool:
    """Whether to ask first if the patches hold so many concepts. `whole`: these are all the images there will be."""
    if model.prune == "auto":
        known = observations.n_classes > 1 and len(observations) >= _MANY_IMAGES
        return _can_prune(model) and whole and known and model.covariance == "tied"
    return bool(model.prune)


def _can_prune(model: PACE) -> bool:
    return model.updates == "exact" and isinstance(model.alpha, str)


def check_type(observations: object) -> None:
    if not isinstance(observations, Observations):
        raise TypeError(f"expected pace.Observations; found {type(observations).__name__}")


def check_origin(found: dict[str, str] | None, fitted: dict[str, str] | None) -> None:
    """Concepts are about one model at one block; where it is known, observations of another are refused."""
    for name, value in (fitted or {}).items() if found else ():
        if (other := found.get(name, value)) != value:  # type: ignore[union-attr]
            what = f"{name} {other}, the concepts are of {value}"
            if name == "model":
                what = "another model or head than the concepts, or count CLS otherwise"
            raise ValueError(f"these observations are of {what}; observe with the backbone of the fit")


def check_pair(observations: Observations, perturbed: Observations | None) -> None:
    """Perturbed views must be of the same images."""
    if perturbed is None:
        return
    check_type(perturbed)
    check_origin(perturbed.origin, observations.origin)
    ours, theirs = tuple(observations.embeddings.shape), tuple(perturbed.embeddings.shape)
    if ours != theirs:
        raise ValueError(f"perturbed: expected the same images, embeddings of shape {ours}; found {theirs}")
    if perturbed.n_classes not in (0, observations.n_classes):
        raise ValueError(
            f"perturbed: expected predictions of {observations.n_classes} classes as the images have, or none; "
            f"found {perturbed.n_classes}"
        )
