"""A model and its concepts as one object: `explain_model` learns them, `pace.load_run` reads them from a folder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict
from datetime import datetime
from functools import partial
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pace.atomic import write_atomically
from pace.backbones import Backbone, ModelChoice, choose_layer, open_backbone, open_model, usual_device
from pace.backbones.heads import HEADS, Neighbours, ZeroShot, fit_head, named_by, pooled_features, save_head
from pace.editing import Edits, What
from pace.explainer import PACE
from pace.files import CONCEPTS, GALLERY, HEAD
from pace.images.datasets import has_splits
from pace.images.given import images_from
from pace.images.imageset import ImageSet
from pace.model_explanation import ModelExplanation
from pace.naming import use_of
from pace.notebook import model_html
from pace.observations import Lazy, Observations
from pace.observing.extract import observe, observe_pair
from pace.showing import summary

if TYPE_CHECKING:
    from pace.metrics import Scores

_GALLERY_SIZE = 6  # images of the fit that are named for every concept
_GALLERY_SAMPLE = 4096  # images to choose them from, if these have to be observed again
_EXAMPLES = 3  # of these shown beside images that are explained


class ModelExplainer:
    """Fitted concepts that know their model: call it with a picture, a folder or a list to have them explained.

    backbone, concepts : the model at its block, and the `PACE` fitted to it, with its names and merges
    edits : those names, hidden concepts and merges (`pace.editing.Edits`), which the methods of the same names change
    class_names : names of the classes that the model predicts, if they are known
    gallery : for every concept the names of the images of the fit that show it best
    images : what the concepts were learned from, if that is known
    scores : of the latest `pace evaluate`, or of `evaluate`
    """

    def __init__(
        self,
        backbone: Backbone,
        concepts: PACE,
        class_names: Sequence[str] | None = None,
        gallery: list[list[str]] | None = None,
        images: ImageSet | Callable[[], ImageSet] | None = None,
        scores: Scores | None = None,
        choice: ModelChoice | None = None,
        source: str | PathLike[str] | None = None,
        edits: Edits | None = None,
    ) -> None:
        self.backbone, self.scores = backbone, scores
        self.class_names = None if class_names is None else list(class_names)
        self._fitted = concepts, gallery or [[] for _ in concepts.means_]
        self.edits = edits or Edits(concepts.names_)
        self._merges: list[list[int]] = []
        self.concepts, self.gallery = self._fitted
        self._take_up()
        self._images, self._choice, self._source = images, choice, source  # model and images by name, if they have one

    @property
    def images(self) -> ImageSet | None:
        if callable(self._images):
            self._images = self._images()
        return self._images

    def __call__(self, images: Any, *, batch_size: int = 64, progress: bool | None = None) -> ModelExplanation:
        """Explain whatever `backbone.observe` takes: a file, a folder, a Pillow image, an array, a tensor, a list of these."""
        given = images_from(images)
        return self.explained(given, observe(self.backbone, given, batch_size=batch_size, progress=progress))

    def explained(self, images: Any, observations: Observations) -> ModelExplanation:
        """The explanation of images that were observed already."""
        found = vars(self.concepts.explain(observations))
        return ModelExplanation(**found, explainer=self, images=images, observations=observations)

    def evaluate(self, images: Any, *, seed: int = 0, batch_size: int = 64, **options: Any) -> Scores:
        """Scores on unseen images, of their test split if they have splits, and what they mean.

        `options` are those of `pace.metrics.evaluate`.
        """
        from pace.metrics import evaluate

        if self.images is None:
            raise ValueError("evaluate: needs the images of the fit, which are not known; use pace.metrics.evaluate")
        train = observe(self.backbone, self.images, batch_size=batch_size)
        unseen = images_from(images, split="test" if has_splits(images) else "train")
        test = observe_pair(self.backbone, unseen, seed=seed, batch_size=batch_size)
        self.scores = evaluate(self.concepts, train, *test, seed=seed, **options)
        return self.scores

    def name(self, what: What, name: str) -> str:
        """Call a concept (12 or "A3") or a part ("A") so, wherever it is shown; with an empty name as before.

        In a run that was loaded this is kept, as are the other changes; each is returned in words.
        """
        return self._changed(self.edits.name(what, name))

    def hide(self, *what: What) -> str:
        """Leave concepts, or all kinds of a part, out of lists; their shares and numbers stay what they are."""
        return self._changed(self.edits.hide(*what))

    def show(self, *what: What) -> str:
        """Show hidden ones again."""
        return self._changed(self.edits.show(*what))

    def merge(self, *what: What) -> str:
        """Make these concepts one, under the number of the first, as `PACE.merged` does; scores are then no longer known."""
        return self._changed(self.edits.merge(*what))

    def undo(self) -> str:
        """Take the last change back."""
        return self._changed(self.edits.undo())

    def _changed(self, said: str) -> str:
        if self.edits.merges != self._merges:
            self.scores = None
        self._take_up()
        return said

    def _take_up(self) -> None:
        """Concepts and gallery as the edits have them."""
        (concepts, gallery), merges = self._fitted, self.edits.merges
        if merges == self._merges and merges:
            concepts, gallery = self.concepts, self.gallery
        else:
            for first, *rest in merges:
                concepts, gallery = concepts.merged(first, *rest), list(gallery)
                in_turn = zip_longest(*(gallery[k] for k in (first, *rest)))
                names = dict.fromkeys(name for some in in_turn for name in some if name)
                gallery[first] = list(names)[:_GALLERY_SIZE]
        if self.edits.changes:
            concepts = copy(concepts)
            concepts.names_ = self.edits.names
        self.concepts, self.gallery, self._merges = concepts, gallery, merges

    def with_examples(self, images: Any, concepts: Sequence[int]) -> Any:
        """The images, followed by those of the fit that show these concepts best, if they are known."""
        names = dict.fromkeys(name for concept in concepts for name in self.gallery[concept][:_EXAMPLES])
        if not names or not isinstance(images, ImageSet) or isinstance(images, _Joined):
            return images
        try:
            own = self.images
        except (ValueError, OSError) as error:
            warnings.warn(f"concepts are only shown in these pictures: {error}", stacklevel=2)
            own = None
        if own is None:
            return images
        place = {name: number for number, name in enumerate(own.names)}
        if unknown := [name for name in names if name not in place]:
            raise ValueError(
                f"{unknown[0]!r:.80}, in the gallery, is no image of the fit; run `pace fit` again, in another folder"
            )
        there, examples = set(images.keys()), own.subset(place[name] for name in names)
        new = [number for number, key in enumerate(examples.keys()) if key not in there]
        return _Joined(images, examples.subset(new)) if new else images

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write a folder as `pace fit` does, which `pace.load_run` and the command line's --run read."""
        path, source = Path(folder).expanduser(), self._source
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(f"{path} is there already; choose a new folder")
        head = self.backbone.head
        if not isinstance(head, (torch.nn.Linear, Neighbours, ZeroShot, type(None))):
            raise ValueError("save: needs the model's own classifier, or a head that `explain_model` fitted")
        path.mkdir(parents=True, exist_ok=True)
        if head is not None:
            save_head(head, path / HEAD)
        if source is not None and Path(source).expanduser().exists():
            source = Path(source).expanduser().resolve()
        kept = None if source is None or self.images is None else self.images.fingerprint()
        how = {"data_root": None, "split": None, "limit": None, "skip_unreadable": False, "max_pixels": None,
               "seed": self.concepts.seed}  # fmt: skip
        record: dict[str, Any] = {
            "format": "pace-run-1", "command": "fit", "status": "finished", "folder": str(path.resolve()),
            "started": datetime.now().astimezone().isoformat(timespec="milliseconds"), "seconds": None,
            "configuration": {"observations": None}, "seed": self.concepts.seed,
            "model": model_record(self.backbone, self._choice) | {"class_names": self.class_names},
            "images": how | {"images": source and str(source), "fingerprint": kept},
            "results": self.write_into(path), "warnings": [],
        }  # fmt: skip
        write_atomically(path / "run.json", json.dumps(record, indent=1, default=lambda array: array.tolist()).encode())
        self.edits.save(path)
        return path

    def write_into(self, folder: Path) -> dict[str, Any]:
        """Concepts and gallery as files, as they were learned; returns what ``run.json`` says of them."""
        learner, gallery = self._fitted
        learner.save(folder / CONCEPTS)
        write_atomically(folder / GALLERY, json.dumps({"images": gallery}).encode())
        found = learner.selection_
        return {
            "concepts": len(learner.means_),
            "selection": found and {name: getattr(found, name) for name in ("images", "numbers", "bounds", "evidence")},
            "empty_concepts": learner.empty_concepts_,
            "shares": use_of(learner.concept_weights_).shares,
            "epochs": learner.n_iter_,
            "converged": learner.converged_,
            "interrupted": learner.interrupted_,
            "bound": [bound._asdict() for bound in learner.lower_bounds_],
        }

    def __repr__(self) -> str:
        total, parts = len(self.concepts.means_), self.concepts.part_of_
        of_parts = "" if parts is None else f" of {self.concepts.n_parts_} parts"
        return f"ModelExplainer({total} concepts{of_parts}, {self.backbone!r})"

    def _repr_html_(self) -> str:
        return model_html(self.concepts, self.class_names)


def explain_model(
    model: Any,
    images: Any,
    n_concepts: int | str = 100,
    *,
    layer: int | tuple[int, int] | None = None,
    head: Any = None,
    class_names: Sequence[str] | None = None,
    seed: int = 0,
    batch_size: int = 64,
    **parameters: Any,
) -> ModelExplainer:
    """Learn the concepts that a model uses for images: a `ModelExplainer`, which explains others.

    Parameters
    ----------
    model
        A vision transformer, a `Backbone`, or a name or file that `pace.backbones.load` reads.
    images
        What `backbone.observe` takes; of a folder with train/ in it, these.
    layer
        The block to explain, or two, of which the first tells parts and the second kinds; by default what `choose_layer`
        finds.
    head
        Instead of the model's own classifier: a module, or "probe" or "knn" for one fitted to the labels of the images, or
        "clusters" of the model's own features.
    class_names
        Of the classes that the model predicts; by default those of the model, or the folders', if there are as many.
    parameters
        Others of `PACE`, such as ``parts=None``.
    """
    pictures, choice = images_from(images), None
    names: Sequence[str] | None = None
    choose = partial(choose_layer, images=pictures, seed=seed, batch_size=batch_size)
    own = None if isinstance(head, str) else head
    if isinstance(model, Backbone):
        backbone = model
    elif isinstance(model, (str, PathLike)):
        choice = ModelChoice(model, layer=layer)
        network, names = open_model(choice)
        backbone = open_backbone(network, choice, usual_device(), choose, own)
    elif layer is None:
        backbone = Backbone(model, choose(model), own, attention_layer=-1)
    else:
        backbone = Backbone(model, layer, own)
    if isinstance(head, str):
        if head not in HEADS or not isinstance(pictures, ImageSet):
            such = "a module, None, or, for files, one of"
            raise ValueError(f"head: expected {such} {', '.join(map(repr, HEADS))}; found {head!r}")
        fitted = fit_head(head, pooled_features(backbone, pictures, batch_size), pictures.labels)
        backbone.head, names = fitted.to(backbone.device), named_by(head, fitted, pictures.class_names)
    seen, perturbed = observe_pair(backbone, pictures, seed=seed, batch_size=batch_size)
    if not seen.n_classes:
        instead = 'head="probe" or "knn" makes some from labels, head="clusters" from the model\'s own features'
        warnings.warn(f"this model has no classifier, so there are no predictions to explain; {instead}", stacklevel=2)
    concepts = PACE(n_concepts, seed=seed, **parameters).fit(seen, perturbed=perturbed)
    known = class_names or (names if len(names or ()) == seen.n_classes else None)
    called = summary.class_names(known, pictures, seen.n_classes) or None
    own_images = pictures if isinstance(pictures, ImageSet) else None
    gallery = None if own_images is None else typical_images(concepts, seen, own_images)
    source = images if isinstance(images, (str, PathLike)) else None
    return ModelExplainer(backbone, concepts, called, gallery, own_images, choice=choice, source=source)


def model_record(backbone: Backbone, choice: ModelChoice | None) -> dict[str, Any]:
    """For ``run.json``: enough to open the same model again, and to notice another one."""
    known = asdict(choice or ModelChoice(""))
    return known | {
        "name": str(known["name"]) or None,
        "layer": backbone.place,
        "attention_layer": backbone.attention_layer,
        "count_cls": backbone.count_cls,
        "head": None if backbone.head is None else HEAD,
        "fingerprint": backbone.fingerprint(),
        "preprocessing": asdict(backbone.preprocessing),
    }


def typical_images(concepts: PACE, observations: Observations, images: ImageSet) -> list[list[str]]:
    """For every concept the names of the images with the patches nearest to it."""
    numbers = np.arange(len(images))
    if isinstance(observations, Lazy) and len(images) > _GALLERY_SAMPLE:
        numbers = np.sort(np.random.default_rng(concepts.seed).choice(numbers, _GALLERY_SAMPLE, replace=False))
        observations = observations[numbers]
    near = summary.typical_patches(concepts.means_, observations, min(_GALLERY_SIZE, len(numbers)))
    return [[images.names[numbers[image]] for image in row] for row in near[..., 0]]


class _Joined(ImageSet):
    """Some images, then examples from the fit, which are called so."""

    def __init__(self, images: ImageSet, examples: ImageSet) -> None:
        self.own, self.examples = images, examples
        super().__init__([*images.names, *(f"{name} (of the fit)" for name in examples.names)], None, None)

    def __getitem__(self, index: int) -> Tensor:
        return self.own[index] if index < len(self.own) else self.examples[index - len(self.own)]

    def fingerprint(self) -> str:
        return f"{self.own.fingerprint()}+{self.examples.fingerprint()}"
