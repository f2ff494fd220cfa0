"""The explanation of images that are known, by a model that is: names, predictions, reasons, pictures and pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pace.explanation import Array, Explanation
from pace.images.imageset import ImageSet
from pace.naming import Name, class_titles, hidden_among, use_of
from pace.observations import Observations
from pace.showing import summary

if TYPE_CHECKING:
    from pace.model_explainer import ModelExplainer

_EXAMPLES = 3  # concepts of each image that examples of the fit are shown for
_DIGITS = 6


class Reason(NamedTuple):
    """What a concept says for a class rather than another, in an image."""

    concept: int
    name: str
    share: float  # θ
    weight: float  # θ times how much more evidence the concept is for the one class; below 0 it is for the other


@dataclass(frozen=True, eq=False, repr=False)
class ModelExplanation(Explanation):
    """An `Explanation` that knows its images, what they are called, and what the model predicts.

    In a notebook it shows pictures.
    """

    explainer: ModelExplainer = None  # type: ignore[assignment]
    images: Any = None
    observations: Observations = None  # type: ignore[assignment]

    @property
    def names(self) -> list[Name]:
        """What the concepts are called now; as they were called, if others have been merged since."""
        return self.explainer.concepts.names_ if self._is_of_these_concepts else super().names

    @property
    def _is_of_these_concepts(self) -> bool:
        now = self.explainer.concepts.names_
        return self.called is not None and [one.into for one in self.called] == [one.into for one in now]

    @property
    def image_names(self) -> list[str]:
        return self.images.names if isinstance(self.images, ImageSet) else super().image_names

    def prediction(self, image: int) -> dict[str, Any] | None:
        if self.observations.predictions is None:
            return None
        said = np.asarray(self.observations.predictions[image])
        n = int(said.argmax())
        return {"class": n, "name": self._class_names[n], "probability": round(float(said[n]), _DIGITS)}

    def _evidence(self, concept: int, image: int) -> float | None:
        said, evidence = self.prediction(image), self.explainer.concepts.evidence_
        return round(float(evidence[concept, said["class"]]), _DIGITS) if said and evidence.size else None

    def concepts_of(self, name: str | int, n: int = 5) -> list[tuple[int, float]]:
        """The concepts that speak most for a class in the images predicted as it: mean θ times the evidence, above 0."""
        own = self._predictions.argmax(1) == (number := self._class(name))
        theta, concepts = self.theta[own if own.any() else slice(None)], self.explainer.concepts
        used = use_of(concepts.concept_weights_).used & ~hidden_among(self.names)
        return summary.class_concepts(theta, concepts.evidence_[:, number], used, n)

    def why(self, image: int = 0, one: str | int | None = None, other: str | int | None = None) -> list[Reason]:
        """Why an image is of `one` class and not the `other`, by concept, strongest first; by default the likeliest two."""
        likely = np.argsort(-self._predictions[image], kind="stable")
        a, b = (self._class(int(likely[place]) if name is None else name) for place, name in enumerate((one, other)))
        evidence, names, shown = self.explainer.concepts.evidence_, self.names, self.shown_concepts(image)
        weights = self.theta[image] * (evidence[:, a] - evidence[:, b])
        order = shown[np.argsort(-np.abs(weights[shown]), kind="stable")]
        return [Reason(int(k), names[k].long, float(self.theta[image, k]), float(weights[k])) for k in order]

    @property
    def _predictions(self) -> Array:
        if self.observations.n_classes < 2 or self.explainer.concepts.evidence_.shape[1] < 2:
            raise ValueError("this model predicts no classes that concepts could speak for; explain_model takes a head")
        return np.asarray(self.observations.predictions)

    @property
    def _class_names(self) -> list[str]:
        return summary.class_names(self.explainer.class_names, self.images, self.observations.n_classes)

    def _class(self, name: str | int) -> int:
        names = self._class_names
        known = {title: number for number, title in [*enumerate(class_titles(names)), *enumerate(names)]}
        number = known.get(name, name) if isinstance(name, str) else name
        if not isinstance(number, int) or not 0 <= number < len(names):
            raise ValueError(f"there is no class {name!r} among {len(names)}: {', '.join(names[:5])}, …")
        return number

    def figure(self, image: int = 0) -> Any:
        """A matplotlib figure of one image, its prediction, and where its largest concepts are."""
        from pace.showing.figures import overlay

        return overlay(
            self.images, self, image, preprocessing=self.explainer.backbone.preprocessing, title=self._title(image)
        )

    def report(self, path: str | PathLike[str], title: str | None = None, **more: Any) -> Path:
        """A page that opens on the first image, with all of these, and those of the fit that show the same concepts best.

        `more` goes to `write_report`.
        """
        from pace.showing.report import write_report

        explainer, names = self.explainer, self.image_names
        wanted = [k for m in range(len(self)) for k in self.shown_concepts(m, _EXAMPLES)]
        images = explainer.with_examples(self.images, wanted)  # none are added where they are there already
        shown = names[0] if len(names) == 1 else f"{len(names)} pictures"
        if images is not self.images:
            whole = explainer(images)
        else:
            whole = self if self._is_of_these_concepts else explainer.explained(images, self.observations)
        return write_report(
            path, explainer.concepts, images, whole.observations, explanation=whole, scores=explainer.scores,
            class_names=explainer.class_names, preprocessing=explainer.backbone.preprocessing,
            title=title or f"What the transformer sees in {shown}", **{"first": 0} | more,
        )  # fmt: skip

    def __getitem__(self, images: int | slice | Array | list[int]) -> ModelExplanation:
        rows = np.atleast_1d(np.arange(len(self))[images])
        kept = self.images.subset(rows.tolist()) if isinstance(self.images, ImageSet) else self.images[rows]
        found: Any = super().__getitem__(rows)
        return replace(found, images=kept, observations=self.observations[rows])  # type: ignore[no-any-return]

    def _title(self, image: int) -> str:
        said, name = self.prediction(image), Path(self.image_names[image]).name
        return name if said is None else f"{class_titles([said['name']])[0]}, {said['probability']:.0%} · {name}"

    def _repr_png_(self) -> bytes:
        return bytes(self.figure()._repr_png_())
