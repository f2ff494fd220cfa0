"""The methods of a run: their names, titles and options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pace import PACE
from pace.baselines import EXPLAINERS, Explainer, TrueColors, explainer

COLORS = "true-colors"  # needs the ground truth, so it is not among EXPLAINERS
REFERENCES = (
    "kmeans", "gmm", "semi-nmf", "sae", "sae-8x", "sae-matryoshka",
    "random", "lot", "position", "attention-rank", "embedding", "majority", COLORS,
)  # fmt: skip
# The paper's, and references that say nothing about what a patch shows: a score that they reach is no score.
DEFAULT_METHODS = (
    "pace", "pace-paper", "shap", "lime", "saliency", "agi", "craft", "lot", "position", "attention-rank",
)  # fmt: skip

# A method without a title here goes by its name. Up to a comma it is what the paper calls the method.
_TITLES = {
    "pace": "PACE",
    "pace-paper": "PACE, printed rules",
    "shap": "SHAP",
    "shap-kernel": "SHAP, kernel",
    "lime": "LIME",
    "saliency": "Saliency",
    "agi": "AGI",
    "craft": "CRAFT",
    "craft-sobol": "CRAFT, Sobol",
    "craft-per-class": "CRAFT, per class",
    "kmeans": "k-means",
    "gmm": "Gaussian mixture",
    "semi-nmf": "Semi-NMF",
    "sae": "Sparse autoencoder",
    "sae-8x": "Sparse autoencoder, 8 x K",
    "sae-matryoshka": "Sparse autoencoder, nested",
    "random": "Random centres",
    "lot": "k-means laid out by lot",
    "position": "Position alone",
    "attention-rank": "Attention rank",
    "embedding": "Mean embedding",
    "majority": "Majority class",
    COLORS: "True colours",
}


@dataclass(frozen=True)
class Method:
    """A row of the tables. `label` is its name, or another one to tell two configurations of it apart."""

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        title = _TITLES.get(self.name, self.name)
        return title if self.label == self.name else f"{title} ({self.label})"

    @property
    def printed_as(self) -> str:
        """What the paper calls it, if it is in the paper."""
        return _TITLES.get(self.name, self.name).partition(",")[0]

    @property
    def is_reference(self) -> bool:
        """Whether it is only there to read the others by and does not compete with them."""
        return self.name in REFERENCES

    def make(self) -> Explainer:
        return explainer(self.name, **self.options)


def choose_methods(
    names: Sequence[str], concepts: int, repeats: Mapping[str, int], options: Mapping[str, Mapping[str, Any]]
) -> list[Method]:
    """Methods by name, ``label=name`` for a second configuration, or "references" for all of these.

    `concepts` is K of all methods that have it as an option, `repeats` the runs of "shap" and "lime"; `options` are by label.
    """
    known = [*EXPLAINERS, COLORS]
    if not names:
        raise ValueError(f"methods: expected some of {', '.join(known)}; found none")
    chosen: dict[str, Method] = {}
    for text in [part for name in names for part in (REFERENCES if name == "references" else (name,))]:
        label, _, name = text.rpartition("=")
        if name not in known:
            raise ValueError(f"method {name!r} is not known; expected some of {', '.join([*known, 'references'])}")
        if label and not re.fullmatch(r"[\w.-]+", label):  # it is part of file names
            raise ValueError(f"label {label!r}: expected letters, digits, '.', '_' and '-' only")
        label = label or name
        if label in chosen:
            raise ValueError(f"method {label!r} is there twice; give one of them its own label, as in tied=pace")
        own = {"n_concepts": concepts} if "n_concepts" in _options(name) else {}
        family = name.partition("-")[0]
        if family in repeats:
            own["repeats"] = repeats[family]
        chosen[label] = Method(label, name, {**own, **options.get(label, {})})
        _check(chosen[label])
    if stray := sorted(options.keys() - chosen.keys()):
        add = stray[0] if stray[0] in EXPLAINERS else f"{stray[0]}=pace, say,"
        raise ValueError(f"options for {stray[0]!r}, not one of the methods {', '.join(chosen)}; add {add} to them")
    return list(chosen.values())


def _options(name: str) -> set[str]:
    taken = {*inspect.signature(TrueColors if name == COLORS else EXPLAINERS[name]).parameters}
    if name.startswith("pace"):
        taken |= {*inspect.signature(PACE).parameters}
    return taken - {"known", "options", "seed", "device"}


def _check(method: Method) -> None:
    """Before hours of work rather than after."""
    known = _options(method.name)
    if unknown := method.options.keys() - known:
        raise ValueError(f"{method.label} has no option {unknown.pop()!r}; it has {', '.join(sorted(known)) or 'none'}")
    if method.name != COLORS:
        try:
            method.make()
        except ValueError as error:
            raise ValueError(f"{method.label}: {error}") from error
