"""How a fitted model and an explanation show themselves in a notebook: tables that need no matplotlib."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from pace.naming import Name, concept_names

if TYPE_CHECKING:
    from pace.explainer import PACE
    from pace.explanation import Explanation

_IMAGES, _SHARES, _CONCEPTS, _CLASSES = 3, 5, 12, 3  # shown at once
_CELL = "style='text-align: left; padding: 0 .8em 0 0'"


def explanation_html(explanation: Explanation) -> str:
    """The largest θ of the first images, with credible intervals; where concepts are kinds of parts, the largest parts."""
    names, by_part = explanation.names, explanation.part_of is not None
    rows = []
    for m in range(min(_IMAGES, len(explanation))):
        one = explanation[m]
        low, high = (end[0] for end in (one.part_interval(0.9) if by_part else one.interval(0.9)))
        for n in one.shown_parts(0, _SHARES) if by_part else one.shown_concepts(0, _SHARES):
            share = one.parts[0, n]
            name = names[one.kind_of(0, n)].label
            rows.append([f"{m}", name, _meter(share, 1, f"{share:.2f}"), f"{low[n]:.2f} to {high[n]:.2f}"])
    table = _table(["image", _column(names), "share θ", "90 % interval"], rows)
    return f"<div><p>{escape(repr(explanation))}</p>{table}</div>"


def model_html(model: PACE) -> str:
    """The concepts of a fitted model by use, each with its share of the patches and the classes it speaks for."""
    weights = np.nan_to_num(np.asarray(model.concept_weights_, np.float64))
    shares = weights / (weights.sum() or 1.0)
    used = [k for k in np.argsort(-shares, kind="stable").tolist() if k not in model.empty_concepts_]
    head = np.asarray(model.label_head_)
    names = concept_names(model.part_of_, weights)
    columns = [_column(names), "share of patches"]
    rows = [[names[k].label, _meter(shares[k], shares.max(), f"{shares[k]:.1%}")] for k in used[:_CONCEPTS]]
    if head.shape[1]:
        columns.append("speaks for (η)")
        rows = [[*row, _spoken_for(head[k])] for k, row in zip(used, rows, strict=False)]
    facts = escape("; ".join(_facts(model, len(used))))
    more = f"<p>and {len(used) - len(rows)} more concepts in use</p>" if used[_CONCEPTS:] else ""
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


def _spoken_for(weights: np.ndarray) -> str:
    """The classes that a concept speaks for more than for the average class, as the report counts them."""
    evidence = weights - weights.mean()
    best = [n for n in np.argsort(-evidence, kind="stable")[:_CLASSES] if evidence[n] > 0]
    return ", ".join(f"class {n} ({evidence[n]:+.2f})" for n in best) or "none"


def _meter(value: float, most: float, text: str) -> str:
    return f'<meter min="0" max="{most or 1.0:.6f}" value="{value:.6f}" style="width: 8em"></meter> {text}'


def _table(columns: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th scope='col' {_CELL}>{column}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td {_CELL}>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
