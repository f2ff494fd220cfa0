"""PACE models on disk: safetensors with a JSON header, written whole or not at all."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pace import __version__
from pace.files import read_tensors, reading, save_tensors
from pace.fitting.arguments import dtype_of, plain_parameters
from pace.fitting.parameters import PARAMETERS
from pace.model.concepts import Concepts, under
from pace.model.gaussians import Prior
from pace.model.objective import Bound
from pace.model.selecting import Selection

if TYPE_CHECKING:
    from pace.explainer import PACE

FORMAT = "pace-model-5"
_HEADER = {"updates_": str, "n_steps_": int, "prefix_tokens_": int, "origin_": dict | None, "converged_": bool,
           "interrupted_": bool}  # fmt: skip
_PATTERN = {"format": FORMAT, "parameters": dict, "covariance": str, "prior_strength": float | int, **_HEADER}
_WORKING = ("gaussians.", "offset", "nest.parts.", "nest.means", "nest.to_")  # of the precision that a fit works with
_EXACT = ("alpha", "label_head", "pair_weights", "nest.kind_shares", "share_prior", "evidence", "concept_weights")
_REMEDY = "make it again with PACE.save, or `pace fit` in another folder"


def save_model(model: PACE, path: str | PathLike[str], statistics: bool) -> None:
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to save {path.name} in")
    concepts, prior = model._concepts, model._prior
    tensors = concepts.tensors()
    tensors["prior_covariance"] = prior.covariance
    tensors["lower_bounds"] = torch.tensor([tuple(b) for b in model.lower_bounds_], dtype=torch.float64).reshape(-1, 3)
    tensors["refinement"] = torch.from_numpy(model.refinement_)
    tensors["concept_weights"] = torch.from_numpy(model.concept_weights_)
    tensors["evidence"] = torch.from_numpy(model.evidence_)
    tensors["share_prior"] = torch.from_numpy(model.share_prior_)
    if model.neighbours_ is not None:
        tensors["neighbours"] = torch.from_numpy(model.neighbours_)
    if model.background_ is not None:
        tensors["background"] = torch.from_numpy(model.background_)
    if model.selection_ is not None:
        tensors |= {f"selection.{name}": t for name, t in model.selection_.tensors().items()}
    if statistics and model._statistics is not None:
        tensors |= {f"statistics.{name}": t for name, t in model._statistics.tensors().items()}
    header = {
        "format": FORMAT,
        "version": __version__,
        "parameters": plain_parameters(model),
        "covariance": concepts.gaussians.name,
        "prior_strength": prior.strength,
        **{name: getattr(model, name) for name in _HEADER},
    }
    save_tensors(path, tensors, header)


def load_model(kind: type[PACE], path: str | PathLike[str]) -> PACE:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no model file at {path}")
    tensors, header = read_tensors(path, _PATTERN, _REMEDY)
    with reading(path, _REMEDY):
        return _restored(kind, header, tensors)


def _restored(kind: type[PACE], header: dict[str, Any], tensors: dict[str, Tensor]) -> PACE:
    # An interrupted fit has no weights, and a single concept no neighbour to have evidence against.
    finite = (t for name, t in tensors.items() if name not in ("concept_weights", "selection.evidence"))
    if not all(bool(torch.isfinite(tensor).all()) for tensor in finite):
        raise ValueError("a number in it is not finite")
    working = tensors["gaussians.means"].dtype
    for names, dtype in ((_WORKING, working), (_EXACT, torch.float64)):
        if wrong := [name for name, tensor in tensors.items() if name.startswith(names) and tensor.dtype != dtype]:
            raise ValueError(f"{wrong[0]}: expected {dtype}; found {tensors[wrong[0]].dtype}")
    concepts = Concepts.from_tensors(header["covariance"], tensors)
    nest, d = concepts.nest, len(concepts.offset)
    size = d if nest is None else nest.to_parts.shape[1] + nest.to_kinds.shape[1]
    shapes = {
        "prior_covariance": (size, size),
        "concept_weights": (len(concepts),),
        "share_prior": concepts.alpha.shape,
        "evidence": concepts.label_head.shape,
    }
    if nest is not None:
        shapes["background"] = concepts.alpha.shape
        if tensors["background"].dtype != torch.bool:
            raise ValueError("which parts are background is not told as it should be")
    if (found := under("selection.", tensors)) and found["means"].ndim == found["numbers"].ndim + 1 == 2:
        shapes |= {"selection.evidence": found["means"].shape[:1], "selection.bounds": found["numbers"].shape}
    elif found:
        raise ValueError("how the number of concepts was found is not told as it should be")
    if wrong := [name for name, shape in shapes.items() if tensors[name].shape != shape]:
        raise ValueError(f"{wrong[0]} of shape {tuple(tensors[wrong[0]].shape)} does not fit the concepts")
    if not bool((tensors["share_prior"] > 0).all()) or tensors.get("neighbours", torch.ones(1, 1)).ndim != 2:
        raise ValueError("what its intervals are made of is out of range")
    model = kind(**header["parameters"])
    for name, parameter in PARAMETERS.items():
        parameter.check(getattr(model, name))
    dtype_of(model)
    if header["updates_"] not in ("exact", "paper") or min(header["n_steps_"], header["prefix_tokens_"]) < 0:
        raise ValueError("a value in its header is out of range")
    for name in _HEADER:
        setattr(model, name, header[name])
    model._concepts = concepts
    model._prior = Prior(tensors["prior_covariance"], header["prior_strength"])
    statistics, selection = under("statistics.", tensors), under("selection.", tensors)
    model._statistics = concepts.statistics_from(statistics) if statistics else None
    model.selection_ = Selection.from_tensors(selection) if selection else None
    model.lower_bounds_ = [Bound(*row) for row in tensors["lower_bounds"].tolist()]
    model.refinement_ = tensors["refinement"].numpy()
    model.concept_weights_ = tensors["concept_weights"].numpy()
    model.evidence_ = tensors["evidence"].numpy()
    model.share_prior_ = tensors["share_prior"].numpy()
    model.neighbours_ = tensors["neighbours"].numpy() if "neighbours" in tensors else None
    model.background_ = tensors["background"].numpy() if nest is not None else None
    model.n_iter_ = len(model.lower_bounds_)
    model.n_features_in_ = len(model._concepts.offset)
    return model
