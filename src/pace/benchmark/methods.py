"""The methods of a run: what they are called, made with, and compared to in the paper."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pace import PACE
from pace.baselines import EXPLAINERS, Explainer, explainer

COLORS = "true-colors"  # made from Color's own truth, so it is not among EXPLAINERS
REFERENCES = ("kmeans", "gmm", "semi-nmf", "embedding", "majority", COLORS)
PAPER_METHODS = ("pace", "pace-paper", "shap", "lime", "saliency", "agi", "craft")

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
    "embedding": "Mean embedding",
    "majority": "Majority class",
    COLORS: "True colours",
}
_PRINTED_AS = {
    name: name.partition("-")[0].upper() for name in EXPLAINERS if name.startswith(("pace", "shap", "craft"))
} | {"lime": "LIME", "saliency": "Saliency", "agi": "AGI"}


@dataclass(frozen=True)
class Method:
    """A row of the tables. `label` is its name, unless another was given to tell two configurations of it apart."""

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        title = _TITLES.get(self.name, self.name)
        return title if self.label == self.name else f"{title} ({self.label})"

    @property
    def printed_as(self) -> str | None:
        """What the paper calls it."""
        return _PRINTED_AS.get(self.name)

    @property
    def is_reference(self) -> bool:
        """Whether it is there to read the others by, and does not compete with them."""
        return self.name in REFERENCES

    @property
    def asks_model(self) -> bool:
        """Whether it needs what the rest of the model reads, and not only the tokens that count."""
        return self.name != COLORS and self.make().asks_model

    def make(self) -> Explainer:
        return explainer(self.name, **self.options)


def choose_methods(
    names: Sequence[str],
    concepts: int = 100,
    repeats: Mapping[str, int] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Method]:
    """Methods by name, ``label=name`` for a second configuration, or "references" for all of these.

    `concepts` is K of all that have one to choose, `repeats` the runs of "shap" and "lime"; `options` are by label.
    """
    options = options or {}
    expanded = [part for name in names for part in (REFERENCES if name == "references" else (name,))]
    if not expanded:
        raise ValueError(f"methods: expected some of {', '.join([*EXPLAINERS, COLORS])}; found none")
    chosen = []
    for text in expanded:
        label, _, name = text.rpartition("=")
        if name not in EXPLAINERS and name != COLORS:
            known = ", ".join([*EXPLAINERS, COLORS, "references"])
            raise ValueError(f"method {name!r} is not known; expected some of {known}")
        if label and not re.fullmatch(r"[\w.-]+", label):  # it names files as well
            raise ValueError(f"label {label!r}: expected letters, digits, '.', '_' and '-' alone")
        own = {"n_concepts": concepts} if "n_concepts" in _options(name) else {}
        family = name.partition("-")[0]
        if repeats and family in repeats:
            own["repeats"] = repeats[family]
        chosen.append(Method(label or name, name, {**own, **options.get(label or name, {})}))
    labels = [method.label for method in chosen]
    twice = {label for label in labels if labels.count(label) > 1}
    if twice:
        raise ValueError(f"method {twice.pop()!r} is there twice; give one of them a label of its own, as in tied=pace")
    stray = sorted(options.keys() - set(labels))
    if stray:
        add = stray[0] if stray[0] in EXPLAINERS else f"{stray[0]}=pace, say,"
        raise ValueError(
            f"options for {stray[0]!r}, which is not among the methods {', '.join(labels)}; add {add} to them"
        )
    for method in chosen:
        _check(method)
    return chosen


def _options(name: str) -> set[str]:
    from pace.baselines import TrueColors

    taken = inspect.signature(TrueColors if name == COLORS else EXPLAINERS[name]).parameters
    more = inspect.signature(PACE).parameters if name.startswith("pace") else {}
    return ({*taken, *more} | {"use_predictions"} if more else {*taken}) - {"known", "options", "seed", "device"}


def _check(method: Method) -> None:
    """Before hours of work rather than after them."""
    unknown = method.options.keys() - _options(method.name)
    if unknown:
        known = ", ".join(sorted(_options(method.name)))
        raise ValueError(f"{method.label} has no option {unknown.pop()!r}; it has {known or 'none'}")
    if method.name != COLORS:
        try:
            method.make()
        except ValueError as error:  # a value that it cannot work with
            raise ValueError(f"{method.label}: {error}") from error
