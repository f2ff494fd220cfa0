"""How objects show themselves in a notebook."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pace.explainer import PACE
    from pace.explanation import Array, Explanation

_IMAGES, _CONCEPTS, _CLASSES = 3, 12, 3  # shown at once


def explanation_png(explanation: Explanation) -> bytes | None:
    """θ of the first images as bars with intervals; None without matplotlib."""
    try:
        from pace.showing.figures.sheet import render
        from pace.showing.figures.theta import theta_bars
    except ModuleNotFoundError:
        return None
    if not len(explanation):
        return None
    return render(theta_bars(explanation, range(min(_IMAGES, len(explanation)))), "png", 120)


def explanation_html(explanation: Explanation) -> str:
    """The same picture with a caption, or a table where there is no matplotlib."""
    caption = f"<p>{escape(repr(explanation))}</p>"
    picture = explanation_png(explanation)
    if picture is None:
        return f"<div>{caption}{_theta_table(explanation)}</div>"
    words = "; ".join(_in_words(explanation, image) for image in range(min(_IMAGES, len(explanation))))
    source = f"data:image/png;base64,{b64encode(picture).decode()}"
    return f'<div>{caption}<img src="{source}" alt="{escape(words)}" style="max-width: 100%"></div>'


def model_html(model: PACE) -> str:
    """The concepts of a fitted model by use, each with its share and the classes it speaks for through η."""
    weights = np.nan_to_num(np.asarray(model.concept_weights_, np.float64))
    share = weights / (weights.sum() or 1.0)
    empty = set(model.empty_concepts_.tolist())
    order = [int(k) for k in np.argsort(-share, kind="stable") if int(k) not in empty]
    head = np.asarray(model.label_head_)
    first, rest = order[:_CONCEPTS], order[_CONCEPTS:]
    about = [
        f"{len(order)} of {len(share)} concepts in use" if empty else f"{len(share)} concepts",
        *([] if model.selection_ is None else [f"their number found in {model.selection_.images} images"]),
        f"{model.covariance} covariances, {model.updates_} updates",
        f"{model.n_iter_} {'batches' if model.n_steps_ else 'epochs'}",
    ]
    if model.lower_bounds_:
        about.append(f"bound {model.lower_bounds_[-1].total:,.2f} per image".replace("-", "−"))
    if model.interrupted_ or not (model.converged_ or model.n_steps_):
        about.append("interrupted" if model.interrupted_ else "not converged")
    parts = [f"<p><b>PACE</b>, fitted: {escape('; '.join(about))}</p>"]
    top = float(share.max()) or 1.0
    if first:
        parts.append(_concept_table(first, share, head, top))
    if rest:
        summary = f"<summary>{len(rest)} more concepts in use</summary>"
        parts.append(f"<details>{summary}{_concept_table(rest, share, head, top)}</details>")
    parts.append(f"<details><summary>Parameters</summary><pre>{escape(repr(model))}</pre></details>")
    return f"<div>{''.join(parts)}</div>"


def _concept_table(concepts: list[int], share: Array, head: Array, top: float) -> str:
    classes = head.shape[1] > 0
    columns = ["concept", "share of patches", *(["speaks for (η)"] if classes else [])]
    rows = []
    for k in concepts:
        bar = f'<meter min="0" max="{top:.6f}" value="{share[k]:.6f}" style="width: 8em"></meter> {share[k]:.1%}'
        cells = [
            f"<th scope='row' style='text-align: left'>{k}</th>",
            f"<td style='text-align: left; padding: 0 .8em 0 0'>{bar}</td>",
        ]
        if classes:
            best = [int(n) for n in np.argsort(-head[k], kind="stable")[:_CLASSES] if head[k, n] > 0]
            words = ", ".join(f"class {n} ({head[k, n]:+.2f})" for n in best) or "none"
            cells.append(f"<td style='text-align: left; padding: 0 .8em 0 0'>{escape(words)}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return _table(columns, rows)


def _theta_table(explanation: Explanation) -> str:
    shown = range(min(_IMAGES, len(explanation)))
    rows = [f"<tr><th scope='row'>{m}</th><td>{escape(_largest(explanation, m))}</td></tr>" for m in shown]
    return _table(["image", "largest θ, 90 % intervals"], rows)


def _table(columns: list[str], rows: list[str]) -> str:
    head = "".join(
        f"<th scope='col' style='text-align: left; padding: 0 .8em 0 0'>{escape(column)}</th>" for column in columns
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _in_words(explanation: Explanation, image: int) -> str:
    return f"image {image}: {_largest(explanation, image)}"


def _largest(explanation: Explanation, image: int) -> str:
    low, high = (end[0] for end in explanation[image].interval(0.9))
    top = explanation.shown_concepts(image, 3)
    theta = explanation.theta[image]
    return ", ".join(f"concept {k} {theta[k]:.2f} [{low[k]:.2f}, {high[k]:.2f}]" for k in top)
