"""How a fitted model and an explanation show themselves in a notebook: tables that need no matplotlib."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from pace.naming import Name, class_titles, use_of

if TYPE_CHECKING:
    from pace.explainer import PACE
    from pace.explanation import Explanation

_IMAGES, _SHARES, _CONCEPTS, _CLASSES = 3, 5, 12, 3  # shown at once
_CELL = "style='text-align: left; padding: 0 .8em 0 0'"


def explanation_html(explanation: Explanation) -> str:
    """The first images, as pictures if they are known, with their largest parts or concepts θ and credible intervals."""
    names, by_part = explanation.names, explanation.part_of is not None
    rows = []
    for m in range(min(_IMAGES, len(explanation))):
        one = explanation[m]
        low, high = (end[0] for end in (one.part_interval(0.9) if by_part else one.interval(0.9)))
        said = explanation.prediction(m)
        title = escape(explanation.image_names[m]) + (
            "" if said is None else f"<br>{escape(class_titles([said['name']])[0])}"
        )
        for n in one.shown_parts(0, _SHARES) if by_part else one.shown_concepts(0, _SHARES):
            share = one.parts[0, n]
            name = escape(names[one.kind_of(0, n)].label)
            rows.append([title, name, _meter(share, 1, f"{share:.2f}"), f"{low[n]:.2f} to {high[n]:.2f}"])
            title = ""
    table = _table(["image", _column(names), "share θ", "90 % interval"], rows)
    return f"<div><p>{escape(repr(explanation))}</p>{_pictures(explanation)}{table}</div>"


def _pictures(explanation: Any) -> str:
    """The figures of the first images, where these are known and matplotlib is installed."""
    try:
        shown = range(min(_IMAGES, len(explanation)) if hasattr(explanation, "figure") else 0)
        drawn = [b64encode(explanation.figure(m)._repr_png_()).decode() for m in shown]
    except ModuleNotFoundError:
        return ""
    return "".join(f'<img src="data:image/png;base64,{png}" style="max-width: 100%"><br>' for png in drawn)


def model_html(model: PACE, class_names: Sequence[str] | None = None) -> str:
    """The concepts of a fitted model by use, each with its share of the images and the classes it speaks for."""
    use, evidence = use_of(model.concept_weights_), model.evidence_
    names = model.names_
    order = [k for k in use.order if not names[k].hidden]
    columns = [_column(names), "share of the images"]
    rows = [
        [escape(names[k].label), _meter(use.shares[k], use.shares.max(), f"{use.shares[k]:.1%}")]
        for k in order[:_CONCEPTS]
    ]
    if evidence.shape[1]:
        columns.append("speaks for")
        called = class_titles(class_names or []) or [f"class {n}" for n in range(evidence.shape[1])]
        rows = [[*row, escape(_spoken_for(evidence[k], called))] for k, row in zip(order, rows, strict=False)]
    facts = escape("; ".join(_facts(model, len(use.order))))
    left = [(len(order) - len(rows), "more concepts in use"), (len(use.order) - len(order), "hidden")]
    rest = ", ".join(f"{count} {what}" for count, what in left if count)
    more = f"<p>and {rest}</p>" if rest else ""
    parameters = f"<details><summary>Parameters</summary><pre>{escape(repr(model))}</pre></details>"
    return f"<div><p><b>PACE</b>, fitted: {facts}</p>{_table(columns, rows)}{more}{parameters}</div>"


def _column(names: list[Name]) -> str:
    return "concept" if not names or names[0].part is None else "part and kind"


def _facts(model: PACE, used: int) -> list[str]:
    total = len(model.means_)
    facts = [f"{total} concepts" if used == total else f"{used} of {total} concepts in use"]
    if model.selection_ is not None:
        facts.append(f"their number found in {model.selection_.images} images")
    done = f"{model.n_iter_} {'batches' if model.n_steps_ else 'epochs'}"
    facts += [f"{model.covariance} covariances, {model.updates_} updates", done]
    if model.lower_bounds_:
        facts.append(f"bound {model.lower_bounds_[-1].total:,.2f} per image".replace("-", "−"))
    if model.interrupted_ or not (model.converged_ or model.n_steps_):
        facts.append("interrupted" if model.interrupted_ else "not converged")
    return facts


def _spoken_for(evidence: np.ndarray, names: Sequence[str]) -> str:
    """The classes that a concept speaks for most, and how much likelier they are where it is."""
    best = [n for n in np.argsort(-evidence, kind="stable")[:_CLASSES] if evidence[n] > 0]
    return ", ".join(f"{names[n]} ({evidence[n]:+.2f})" for n in best) or "none"


def _meter(value: float, most: float, text: str) -> str:
    return f'<meter min="0" max="{most or 1.0:.6f}" value="{value:.6f}" style="width: 8em"></meter> {text}'


def _table(columns: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th scope='col' {_CELL}>{column}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td {_CELL}>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
