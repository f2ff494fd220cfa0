"""What a live page shows: the pictures of a set, those that were dropped on it, and what is predicted without concepts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pace.ablation import hide_somehow, take_away
from pace.explanation import Array
from pace.files import DamagedFile
from pace.images import ByName, ImageSet, Perturbation, UnreadableImageError, decode, normalize, to_float
from pace.images.preparation import resize_and_crop
from pace.metrics.hiding import Hiding
from pace.metrics.inputs import patches_of
from pace.model_explainer import ModelExplainer
from pace.model_explanation import ModelExplanation
from pace.observations import Observations
from pace.showing.report import contents
from pace.showing.report.pictures import encode, read_pictures
from pace.showing.report.writing import render
from pace.showing.summary import class_names
from pace.terminal import visible

LARGEST = 30 << 20  # bytes of a picture's file

_KEPT = 100  # dropped pictures; the one dropped first is forgotten first
_READY = 64  # pictures whose patches are kept for the next concept that is taken away
_NARROW = 20  # times as long as wide; the model would see a tiny part of it, enlarged beyond all memory
_CLASSES = 5  # listed when concepts are taken away
_SHEET = 19_000_000  # characters of the set's pictures, as in a report
_LONGEST = 120  # characters of a name
_WHOLE = np.array([[0, 0, 1, 1]], np.float32)  # what a picture shows of itself


class Refused(ValueError):
    """What was asked for cannot be done: one line, for whoever asked."""

    def __init__(self, line: str, status: int = 400) -> None:
        super().__init__(line)
        self.status = status


class _Shown(NamedTuple):
    """A picture as the model saw it."""

    pixels: Tensor  # (3, H, W), uint8
    phi: Array  # (patches, K)


@dataclass(frozen=True)
class _Added:
    """A picture that was dropped on the page."""

    name: str
    explanation: ModelExplanation
    moved: ModelExplanation  # of its perturbed view
    picture: str  # WebP in base64
    moved_picture: str


class Session:
    """All that one page can ask for. It is not safe to ask two things at a time.

    Pictures have numbers: those of the set from 0 on, then those that were added. Nothing is read from disk later.
    """

    def __init__(
        self, explainer: ModelExplainer, images: ImageSet, views: tuple[Observations, Observations], title: str
    ) -> None:
        """`views` are the images as they are, and perturbed by `ByName(Perturbation(), images.names)`."""
        self.explainer, self.images, self.title = explainer, images, title
        how = explainer.backbone.preprocessing
        self._pixels = torch.stack([resize_and_crop(images[number], how) for number in range(len(images))])
        self._explanation, self._moved = (explainer.explained(images, seen) for seen in views)
        self._classes = class_names(explainer.class_names, images, views[0].n_classes)
        self._pictures = read_pictures(self._pixels, len(images), None, "images")
        moved = [_perturbed(pixels, name)[0] for pixels, name in zip(self._pixels, images.names, strict=True)]
        others = read_pictures(torch.stack(moved), len(images), None, "images")
        self._encoded = encode([*self._pictures, *others], _SHEET)
        self.revision = 0  # how often names, hidden concepts or merges were changed
        self._added: dict[int, _Added] = {}
        self._next = len(images)
        self._hidings: dict[int, Hiding] = {}
        self._contents = self._of_set()

    @property
    def dropped(self) -> int:
        """How many pictures were added so far."""
        return self._next - len(self.images)

    def _of_set(self) -> dict[str, Any]:
        model, seen = self.explainer.concepts, self._explanation
        known = contents.learning(model) | contents.trust(self.explainer.scores)
        known |= contents.of_images(model, self.images, seen.observations, seen, self._classes, self._pictures)
        known |= contents.beside(seen, self._moved, self._moved.observations, bool(self._classes))
        return known | {"perturbedPictures": True}

    def page(self) -> bytes:
        live = {
            "predicts": bool(self._classes),
            "largest": LARGEST,
            "added": [self._entry(number) for number in self._added],
            "changed": bool(self.explainer.edits.changes),
            "revision": str(self.revision),
        }
        return render(
            {"title": self.title, "first": None, "without": [], "live": live, **self._contents}, self._encoded
        )

    def add(self, name: str, file: bytes) -> dict[str, Any]:
        """Explain a picture, and give it the next number."""
        name = visible(PurePath(name.replace("\\", "/")).name)[:_LONGEST] or "picture"
        pixels = self._read(name, file)
        view, crop = _perturbed(pixels, name)
        seen = self._observed(torch.stack([to_float(pixels), view]), np.concatenate([_WHOLE, crop]))
        explanation, moved = (self.explainer.explained(pixels[None], seen[[row]]) for row in range(2))
        picture, other = (encode(read_pictures(one[None], 1, None, "picture"), _SHEET)[0] for one in (pixels, view))
        number, self._next = self._next, self._next + 1
        self._added[number] = _Added(name, explanation, moved, picture, other)
        for oldest in list(self._added)[:-_KEPT]:
            del self._added[oldest]
        return self._entry(number)

    def _read(self, name: str, file: bytes) -> Tensor:
        """Its pixels as the model sees them."""
        try:
            pixels = decode(BytesIO(file))
        except UnreadableImageError as error:
            raise Refused(
                f"{name}: {error.reason.replace('PIL.Image.MAX_IMAGE_PIXELS', '--max-pixels')}", 415
            ) from error
        if max(pixels.shape[1:]) > _NARROW * min(pixels.shape[1:]):
            height, width = pixels.shape[1:]
            raise Refused(f"{name}: {width} x {height} pixels are too narrow a picture", 415)
        return resize_and_crop(pixels, self.explainer.backbone.preprocessing)

    def _observed(self, images: Tensor, crops: Array) -> Observations:
        """As `observe` has it, which would look at all of the model's weights first to see that they are the same."""
        backbone, known = self.explainer.backbone, self._explanation.observations
        batch = backbone(normalize(images.to(backbone.device), backbone.preprocessing))
        return Observations(*batch, known.grid, known.prefix_tokens, crops=crops, origin=known.origin)

    def _entry(self, number: int) -> dict[str, Any]:
        """An added picture as the page has those of the set."""
        one = self._added[number]
        seen = one.explanation
        pointed = int((seen.theta @ self.explainer.concepts.label_head_).argmax()) if self._classes else None
        view = contents.view(seen, seen.observations, bool(self._classes))
        moved = contents.beside(seen, one.moved, one.moved.observations, bool(self._classes))
        known = {"number": number, "name": one.name, "picture": one.picture, "view": view, "pointed": pointed}
        return known | {"moved": {"picture": one.moved_picture, **moved}}

    def without(self, picture: int, concepts: Sequence[int], compare: bool) -> dict[str, Any]:
        """The likeliest classes of a picture without some concepts; to `compare`, also without as much elsewhere."""
        known = len(self.explainer.concepts.means_)
        if not self._classes:
            raise Refused("this model predicts no classes")
        if wrong := [k for k in concepts if not 0 <= k < known]:
            raise Refused(f"concepts: expected numbers from 0 to {known - 1}; found {wrong[0]}")
        shown = self._shown(picture)
        hiding, grid = self._hiding(picture, shown.pixels), self._explanation.grid
        sets, row = [sorted(set(concepts))], np.zeros(1, np.int64)
        found = take_away(hiding, shown.phi[None], row, sets, grid=grid, compare=compare)
        top = np.argsort(-np.maximum(found.before[0], found.after[0]), kind="stable")[:_CLASSES]
        cases = ("before", "after", "low", "high", *(("area", "attention") if compare else ()))
        rows = [{"class": int(n)} | {case: round(float(getattr(found, case)[0, n]), 4) for case in cases} for n in top]
        return {"classes": rows}

    def change(self, do: str, what: Sequence[int | str], name: str) -> dict[str, Any]:
        """Name a concept or a part, hide or show some, merge some, or undo the last of these; says what was done.

        Kept in the run, as `pace name` does it.
        """
        explainer, merges = self.explainer, self.explainer.edits.merges
        changes: dict[str, Callable[[], str]] = {
            "name": lambda: explainer.name(what[0], name),
            "hide": lambda: explainer.hide(*what),
            "show": lambda: explainer.show(*what),
            "merge": lambda: explainer.merge(*what),
            "undo": explainer.undo,
        }
        if do not in changes or (do == "name" and len(what) != 1):
            raise Refused(f"expected one of {', '.join(changes)}, and one concept or part to name")
        try:
            said = changes[do]()
        except (DamagedFile, OSError) as error:  # these name files
            warnings.warn(f"names: {error}", stacklevel=2)
            raise Refused("the names cannot be kept; the terminal of pace serve says why", 500) from error
        except ValueError as error:
            raise Refused(str(error)) from error
        if explainer.edits.merges != merges:
            self._explanation, self._moved = self._again(self._explanation), self._again(self._moved)
            self._added = {
                number: replace(one, explanation=self._again(one.explanation), moved=self._again(one.moved))
                for number, one in self._added.items()
            }
        self._contents = self._of_set()
        self.revision += 1
        return {"said": said}

    def _again(self, explanation: ModelExplanation) -> ModelExplanation:
        return self.explainer.explained(explanation.images, explanation.observations)

    def _shown(self, number: int) -> _Shown:
        if 0 <= number < len(self.images):
            return _Shown(self._pixels[number], _phi(self._explanation, number))
        if number not in self._added:
            raise Refused("this picture is not kept any more; drop it again", 404)
        added = self._added[number].explanation
        return _Shown(added.images[0], _phi(added, 0))

    def _hiding(self, number: int, pixels: Tensor) -> Hiding:
        """Predictions with patches hidden, ready for the pictures that were asked for last."""
        hiding = self._hidings.pop(number, None)
        if hiding is None:
            hiding = hide_somehow(self.explainer.backbone, to_float(pixels)[None], np.zeros(1, np.int64))
        self._hidings[number] = hiding
        for oldest in list(self._hidings)[:-_READY]:
            del self._hidings[oldest]
        return hiding


def _perturbed(pixels: Tensor, name: str) -> tuple[Tensor, Array]:
    """A picture's perturbed view (3, H, W) in [0, 1], and its crop (1, 4), as `pace report` has them."""
    perturb = ByName(Perturbation(), [name])
    return perturb(to_float(pixels)[None], [0])[0], perturb.crops([0], (pixels.shape[1], pixels.shape[2]))


def _phi(explanation: ModelExplanation, row: int) -> Array:
    assert explanation.phi is not None
    phi: Array = patches_of(explanation.phi[[row]], explanation.prefix_tokens)[0]
    return phi
