"""All scores of a model in one call, with warnings in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pace.metrics import agreement, declare, effects, faithful, local, sparse, stable
from pace.metrics.collapse import signs_of_collapse, verdict
from pace.metrics.hiding import Hiding
from pace.metrics.inputs import labels_of
from pace.metrics.scores import Score, Scores

if TYPE_CHECKING:
    from pace.explainer import PACE
    from pace.observations import Observations

# In reading order. A metric's parameters are named after what `score_explanations` passes it.
METRICS = [
    found
    for module in (faithful, stable, sparse, local, effects, agreement)
    for found in vars(module).values()
    if isinstance(found, declare.Metric)
]


_INPUTS = {
    "yhat_train", "yhat_test", "yhat_perturbed", "embeddings", "attention", "attention_perturbed", "token_weights", "crops",
    "concepts", "offset", "phi_other", "hiding", "importance", "colours", "parts",
    "true_parts", "true_kinds",
}  # fmt: skip


def evaluate(
    model: PACE,
    train: Observations,
    test: Observations,
    perturbed: Observations | None = None,
    *,
    colours: Any = None,
    parts: Any = None,
    true_parts: Any = None,
    true_kinds: Any = None,
    hiding: Hiding | None = None,
    bootstrap: int = 200,
    seed: int = 0,
) -> Scores:
    """All scores of a fitted model on test images, each with its interval, `warnings` where it has collapsed, and a `verdict`.

    ŷ is withheld when images are explained, except for `faithfulness_given_prediction`.

    Parameters
    ----------
    train
        Observations the regression from θ to ŷ is fitted on; usually those the model was fitted on.
    perturbed
        The test images perturbed, in the same order; without them stability is not scored, and without their `crops` not
        whether patches follow the picture.
    colours : (M, rows, columns), optional
        True colours of the test images' patches, on Color.
    parts : (M, n_parts), optional
        The patch that holds each part, −1 for none, on CUB.
    true_parts, true_kinds : (M, rows, columns), optional
        Part and kind of the test images' patches, on Birds.
    hiding
        Some of the test images, whose concepts are removed and added to see what the prediction depends on; see `hide`.
    bootstrap, seed
        Number of resamples for the intervals (0 for none), and the seed for these, the folds and the network.
    """
    import torch

    given: Any = None
    random = importance = None
    device = torch.device(model.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if train.n_classes and test.n_classes:
        from pace.metrics.by_lot import random_mixtures

        used = max(1, len(model.means_) - len(model.empty_concepts_))
        random = random_mixtures(train, test, used, seed=seed, device=device)
        if model.label_head_.shape[1] and model.part_of_ is None:  # kinds are told without ŷ
            given = [model.explain(some, use_predictions=True, patches=False).theta for some in (train, test)]
            given = [torch.as_tensor(given[0], device=device), given[1]]
    learned = model.explain(train, patches=False)
    theta: Any = torch.as_tensor(learned.theta, device=device)  # where the regressions run
    found, attention = model.explain(test), test.attention[:]
    if hiding is not None and test.n_classes:
        importance = model.importance(found.theta, labels_of(test.predictions, len(test)))[hiding.rows]
    return score_explanations(
        replace(learned, theta=theta),
        found,
        None if perturbed is None else model.explain(perturbed),
        yhat_train=_whole(train, "predictions"),
        yhat_test=_whole(test, "predictions"),
        yhat_perturbed=_whole(perturbed, "predictions"),
        given_prediction=given,
        random=random,
        embeddings=test.embeddings,
        attention=attention,
        attention_perturbed=_whole(perturbed, "attention"),
        token_weights=attention,
        crops=_whole(perturbed, "crops"),
        concepts=model.means_,
        offset=0.0,
        colours=colours,
        parts=parts,
        true_parts=true_parts,
        true_kinds=true_kinds,
        hiding=hiding,
        importance=importance,
        bootstrap=bootstrap,
        seed=seed,
    )


def score_explanations(
    train: Any,
    test: Any,
    perturbed: Any = None,
    *,
    given_prediction: Sequence[Any] | None = None,
    random: Sequence[Any] | None = None,
    bootstrap: int = 200,
    seed: int = 0,
    **inputs: Any,
) -> Scores:
    """`evaluate` for explanations of any method: every score that can be computed from what is given.

    Parameters
    ----------
    train, test, perturbed : Explanation
        Or anything with `theta` and, for the patch level, `phi`, `grid` and `prefix_tokens`.
    given_prediction, random
        θ of train and test when the method was given ŷ, and for concepts drawn by lot (`pace.metrics.by_lot`).
    yhat_train, yhat_test, yhat_perturbed
        The transformer's predictions, as labels or distributions.
    embeddings, attention, attention_perturbed, token_weights : (M, J, d), (M, J)
        Of the tokens of the test images and, where named so, of their perturbed versions: embeddings (anything with `shape`
        and slicing), attention of CLS, and weight in θ, which in PACE is the attention.
    crops : (M, 4)
        What the perturbed images show of the images (`Observations.crops`).
    concepts, offset : (K, …), 0 or (d,)
        What describes every concept at the dataset level, such as its mean; what φ · concepts is added to rebuild a token.
    phi_other
        φ of the same images by a second fit, with another start.
    hiding, importance : Hiding, (n, K)
        Some of the images to hide patches of, and how much each concept matters for the prediction there; by default their θ.
    colours, parts, true_parts, true_kinds
        As in `evaluate`.
    """
    if unknown := inputs.keys() - _INPUTS:
        raise TypeError(f"score_explanations: no metric takes {unknown.pop()!r}; expected {', '.join(sorted(_INPUTS))}")
    known = {name: value for name, value in inputs.items() if value is not None}
    notes = []
    if not {"yhat_train", "yhat_test"} <= known.keys():
        notes.append("There are no predictions, so faithfulness is not measured.")
    elif len(np.unique(labels_of(known["yhat_train"], len(train.theta), "yhat_train"))) == 1:
        notes.append("The transformer predicts one class for all training images: there is nothing to be faithful to.")
        del known["yhat_train"]
    if "hiding" in known:
        known.setdefault("importance", test.theta[known["hiding"].rows])
    for name, pair in (("given", given_prediction), ("random", random)):
        if pair is not None:
            known |= {f"theta_train_{name}": pair[0], f"theta_test_{name}": pair[1]}
    if perturbed is not None:
        known |= {"theta_perturbed": perturbed.theta, "phi_perturbed": getattr(perturbed, "phi", None)}
    known |= {"theta": test.theta, "theta_train": train.theta, "theta_test": test.theta, "explanation": test}
    known |= {name: getattr(test, name, None) for name in ("phi", "grid", "prefix_tokens", "part_of")}
    known |= {"yhat": known.get("yhat_test")}
    scores = _every_score({name: value for name, value in known.items() if value is not None}, bootstrap, seed)
    signs = signs_of_collapse(scores)
    return Scores(scores.values(), [*notes, *(sign.sentence for sign in signs)], verdict(scores, signs))


def _every_score(known: Mapping[str, Any], bootstrap: int, seed: int) -> dict[str, Score]:
    """The metrics whose parameters are known."""
    scores = {}
    for metric in METRICS:
        parameters = metric.__signature__.parameters
        if all(name in known or parameter.default is not parameter.empty for name, parameter in parameters.items()):
            arguments = {name: known[name] for name in parameters if name in known}
            score = declare.bootstrap(metric, **arguments, resamples=bootstrap, seed=seed)
            if np.isfinite(score.value):  # NaN: it does not apply to these images
                scores[score.name] = score
    return scores


def _whole(observations: Observations | None, field: str) -> Any:
    array = getattr(observations, field, None)
    return None if array is None else array[:]
