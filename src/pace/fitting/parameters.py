"""PACE's arguments, which its constructor only stores, and its data: checked, and turned into what learning reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.fitting.loop import Plan
from pace.model.gaussians import FAMILIES
from pace.model.learning import SMALLEST_ALPHA, Settings
from pace.model.refining import Refinement
from pace.observations import Observations

if TYPE_CHECKING:
    from pace.explainer import PACE

_SIZE = re.compile(r"([0-9]*\.?[0-9]+(?:e\+?[0-9]+)?)\s*(?:([kmgt])(ib|b)?|b)?", re.IGNORECASE)
_AUTO_STEPS = 1000  # of refining, unless told otherwise
_AUTO_IMAGES = 1000  # before it refines or prunes by itself: few would be learned by heart, and show few concepts
_SHARE_OF_GPU = 0.9  # of its free memory, unless told otherwise
_WHOLE_NUMBERS: dict[str, tuple[Any, ...]] = {  # the least they may be, and what may stand for them
    "n_concepts": (1, "auto"),
    "max_concepts": (1,),
    "n_init": (1,),
    "max_iter": (1,),
    "max_sweeps": (1,),
    "negatives": (2,),
    "rank": (1,),
    "head_steps": (0,),
    "refine": (0, "auto"),
    "seed": (0,),
    "batch_size": (1, None),
    "minibatch": (1, None),
}
_NUMBERS: dict[str, tuple[Any, ...]] = {  # of at least 0, and what may stand for them
    "tol": (),
    "sweep_tol": (),
    "covariance_prior": (None,),
    "faithfulness_weight": (),
    "stability_weight": (),
    "head_rate": (),
    "learning_offset": (),
    "learning_decay": (),
}


def check_arguments(model: PACE) -> None:
    """What is wrong with the arguments, whatever they will be used on."""
    for name, (least, *others) in _WHOLE_NUMBERS.items():
        _check_number(model, name, Integral, "whole number", least, others)
    for name, instead in _NUMBERS.items():
        _check_number(model, name, Real, "number", 0, instead)
    if model.covariance not in FAMILIES:
        raise ValueError(f"covariance: expected one of {', '.join(FAMILIES)}; found {model.covariance!r}")
    if model.updates not in ("exact", "paper"):
        raise ValueError(f"updates: expected 'exact' or 'paper'; found {model.updates!r}")
    if isinstance(model.init, str) and model.init != "k-means++":
        raise ValueError(f"init: expected 'k-means++' or an array of means; found {model.init!r}")
    if model.prune != "auto" and not isinstance(model.prune, (bool, np.bool_)):
        raise ValueError(f"prune: expected True, False or 'auto'; found {model.prune!r}")
    finds_number = isinstance(model.n_concepts, str)
    if finds_number and (model.updates != "exact" or not isinstance(model.init, str)):
        raise ValueError("n_concepts='auto' needs updates='exact' and init='k-means++'")
    if model.refine and not isinstance(model.refine, str) and not _can_refine(model):
        raise ValueError(
            f"refine: needs covariance='tied' and updates='exact'; found {model.covariance!r} and {model.updates!r}"
        )
    _given_alpha(model, None if finds_number else int(model.n_concepts))
    if model.prune and model.prune != "auto" and not finds_number and not _can_prune(model):
        raise ValueError("prune: needs updates='exact', init='k-means++' and alpha='learn'")
    _dtype(model)
    _given_device(model)
    _given_memory(model)


def _check_number(model: PACE, name: str, kind: type, word: str, least: int, instead: Sequence[str | None]) -> None:
    value = getattr(model, name)
    if isinstance(value, (str, type(None))) and value in instead:
        return
    if not isinstance(value, kind) or isinstance(value, bool) or not value >= least:  # type: ignore[operator]
        also = "".join(f" or {other!r}" for other in instead)
        raise ValueError(f"{name}: expected a {word} of at least {least}{also}; found {value!r}")


def settings_of(model: PACE, observations: Observations) -> Settings:
    """Check the arguments, which the constructor only stored."""
    check_type(observations)
    check_arguments(model)
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
        dtype=_dtype(model),
    )


def _dtype(model: PACE) -> torch.dtype:
    dtype = getattr(torch, model.dtype, None) if isinstance(model.dtype, str) else model.dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: expected 'float32' or 'float64'; found {model.dtype!r}")
    return cast(torch.dtype, dtype)


def _given_device(model: PACE) -> torch.device | None:
    if model.device is None:
        return None
    try:
        device = torch.device(model.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # no such name, no such GPU, no GPU, no name at all
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


def _given_memory(model: PACE) -> int | None:
    given: Any = model.memory
    if given is None:
        return None
    found = _SIZE.fullmatch(given.strip()) if isinstance(given, str) else None
    if found:
        number, prefix, unit = found.groups(default="")
        size = float(number) * (1024 if unit.lower() == "ib" else 1000) ** " kmgt".index(prefix.lower() or " ")
    elif not isinstance(given, bool) and isinstance(given, Real):
        size = float(given)
    else:
        raise ValueError(f"memory: expected bytes or a size like '8GB' or '8GiB'; found {given!r}")
    if not 1 <= size < float("inf"):
        raise ValueError(f"memory: expected at least 1 byte; found {given!r}")
    return int(size)


def memory_of(model: PACE, device: torch.device) -> int | None:
    """The budget in bytes; where none is given, most of what a GPU has free, and none on a CPU."""
    given = _given_memory(model)
    if given is not None or device.type != "cuda":
        return given
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, to be used again
    return int(_SHARE_OF_GPU * (torch.cuda.mem_get_info(device)[0] + idle))


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


def _given_alpha(model: PACE, n_concepts: int | None) -> npt.NDArray[np.float64] | None:
    """None where no numbers were given. Without `n_concepts`, how many they have to be is not known yet."""
    if model.alpha is None or (isinstance(model.alpha, str) and model.alpha == "learn"):
        return None
    try:
        alpha = np.asarray(None if isinstance(model.alpha, str) else model.alpha, dtype=np.float64)
        if np.isnan(alpha).any():
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"alpha: expected a number, an array, 'learn' or None; found {model.alpha!r}") from None
    many = n_concepts is None or alpha.shape == (n_concepts,)
    if alpha.ndim > 1 or (alpha.ndim == 1 and not many) or not (alpha > 0).all() or not np.isfinite(alpha).all():
        each = "one for every concept" if n_concepts is None else f"{n_concepts} of them"
        raise ValueError(f"alpha: expected one positive number or {each}; found {model.alpha!r}")
    return alpha


def alpha_of(model: PACE, n_concepts: int, observations: Observations, settings: Settings) -> Tensor:
    given = _given_alpha(model, n_concepts)
    weak = 0.1 * settings.image_weight(observations.n_tokens) / observations.n_tokens
    alpha = torch.as_tensor(np.float64(weak) if given is None else given, device=settings.device)
    return alpha.expand(n_concepts).clone()


def prior_strength_of(model: PACE, observations: Observations, settings: Settings) -> float:
    strength = model.covariance_prior
    if strength is None:
        strength = observations.dim if model.covariance in ("full", "tied") else 10
    # With the paper's weights an image counts as one patch, and the prior's patches shrink alike.
    return float(strength) * settings.image_weight(observations.n_tokens) / observations.n_tokens


def refinement_of(model: PACE, observations: Observations, perturbed: Observations | None) -> Refinement | None:
    steps = model.refine
    if isinstance(steps, str):
        known = _can_refine(model) and observations.n_classes and perturbed is not None and model.minibatch is None
        steps = _AUTO_STEPS if known and len(observations) >= _AUTO_IMAGES else 0
    if not steps:
        return None
    if not observations.n_classes and perturbed is None:
        raise ValueError("refine: needs predictions or perturbed views, which say what to refine the concepts for")
    return Refinement(steps, model.faithfulness_weight, model.stability_weight)


def _can_refine(model: PACE) -> bool:
    return model.covariance == "tied" and model.updates == "exact"


def prunes(model: PACE, observations: Observations, whole: bool = True) -> bool:
    """Whether to ask first if the patches hold so many concepts. `whole`: these are all images there will be."""
    if model.prune == "auto":
        known = observations.n_classes > 1 and len(observations) >= _AUTO_IMAGES
        return _can_prune(model) and whole and known and model.covariance == "tied"
    return bool(model.prune)


def _can_prune(model: PACE) -> bool:
    return model.updates == "exact" and isinstance(model.init, str) and isinstance(model.alpha, str)


def check_type(observations: object) -> None:
    if not isinstance(observations, Observations):
        raise TypeError(f"expected pace.Observations; found {type(observations).__name__}")


def check_images(observations: Observations) -> None:
    if not len(observations):
        raise ValueError("observations: expected at least one image; found none")


def check_pair(observations: Observations, perturbed: Observations | None) -> None:
    if perturbed is None:
        return
    check_type(perturbed)
    ours, theirs = tuple(observations.embeddings.shape), tuple(perturbed.embeddings.shape)
    if ours != theirs:
        raise ValueError(f"perturbed: expected the same images, embeddings of shape {ours}; found {theirs}")
    if perturbed.n_classes not in (0, observations.n_classes):
        raise ValueError(
            f"perturbed: expected predictions of {observations.n_classes} classes as the images have, or none; "
            f"found {perturbed.n_classes}"
        )
