"""When good scores mean nothing: warnings in words, and a verdict in one line.

Where a trivial explanation's score is known (`majority_class`, position's part consistency, concepts laid out by attention),
a score must be above it with its whole interval. The other limits lie between the scores of explanations known to have
collapsed and of sound ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Literal, NamedTuple

from pace.metrics.scores import Score
from pace.metrics.sparse import COVERED, COVERED_ATTENTION

Level = Literal["image", "patch", "importance"]

# A level is believed when these were measured, and nothing warns of it.
_NEEDED: dict[Level, dict[str, str]] = {
    "image": {"faithfulness": "faithfulness", "stability_ratio": "stability ratio"},
    "patch": {
        "information_over_attention": "information over attention",
        "warp_gain_over_attention": "warp gain over attention",
    },
}


class Sign(NamedTuple):
    """A warning: the level that it concerns, why that level is not to be believed in a few words, and in a sentence."""

    level: Level
    reason: str
    sentence: str


def signs_of_collapse(scores: Mapping[str, Score]) -> list[Sign]:
    """Every sign of collapse that the scores show, the most telling first; scores that are missing are not judged."""
    # A missing score is NaN, which is neither above nor below a limit.
    value = defaultdict(lambda: math.nan, {name: score.value for name, score in scores.items()})
    low = value | {name: score.low for name, score in scores.items() if score.low is not None}
    high = value | {name: score.high for name, score in scores.items() if score.high is not None}
    faithful, given = value["faithfulness"], value["faithfulness_given_prediction"]
    fidelity, over = value["logit_fidelity"], value["fidelity_over_random"]
    apart, ratio, echo = (value[name] for name in ("between_images", "stability_ratio", "class_echo"))
    used, total, majority = (value[name] for name in ("effective_concepts", "n_concepts", "majority_class"))
    area, attended, cls = (value[name] for name in ("leading_area", "leading_attention", "cls_weight"))
    information, gain = value["within_image_information"], value["warp_gain"]
    effect, by_attention, by_lot = (value[name] for name in ("concept_effect", "effect_by_attention", "effect_by_lot"))
    colours, parts, by_position = (
        value[name] for name in ("colour_recovery", "part_consistency", "part_consistency_by_position")
    )
    # A collapse of many concepts to two shows 2 to 3 effective ones, since every concept keeps its prior share.
    few = max(min(3.5, 0.6 * total), 0.03 * total)
    signs = {
        # A collapse showed 0.02, sound explanations 0.66 and more.
        Sign("image", "all images have nearly the same explanation",
             f"All images have nearly the same explanation (distance {apart:.2f} between images), so good stability means "
             "nothing."): apart < 0.1,
        Sign("image", "few of its concepts are in use",
             f"Only about {used:.1f} of {total:.0f} concepts are in use: the rest have collapsed into these."): used < few,
        Sign("image", "it says nothing about the prediction",
             f"The prediction is recovered no better ({faithful:.2f}) than by always naming the most frequent class "
             f"({majority:.2f}): the explanation says nothing about it."): low["faithfulness"] <= majority,
        Sign("image", "concepts drawn by lot say as much about the prediction",
             f"Over all classes the explanation says no more about the prediction ({fidelity:.2f}) than concepts drawn by lot "
             f"do ({fidelity - over:.2f})."): low["fidelity_over_random"] <= 0,
        Sign("image", "its concepts are the classes under other names",
             f"The leading concept of an image is its predicted class under another name (agreement {echo:.2f}): faithful, "
             "but it explains nothing."): echo > 0.95,
        Sign("image", "a perturbed image might as well be another image",
             "A perturbed image is about as far from its original as any other image is (stability ratio "
             f"{ratio:.2f}): the explanation does not recognise the image."): high["stability_ratio"] >= 1,
        Sign("image", "the patches hardly count beside CLS",
             f"CLS carries {cls:.0%} of an image's weight: the patches hardly count."): cls > 0.5,  # 0.12 is usual
        Sign("image", "much of it only repeats the prediction",
             f"Faithfulness is {given:.2f} when the prediction is given to the explanation and {faithful:.2f} when it is "
             "withheld: much of it only repeats the prediction."): given - faithful > 0.1,
        Sign("patch", "one concept covers the picture",
             f"One concept covers a typical image ({_shares(area, attended)}): there is no patch level to speak "
             "of."): area > COVERED or attended > COVERED_ATTENTION,
        Sign("patch", "no patch level (a patch's place and attention say as much)",
             "The concept of a patch says no more of it than its place and attention do (within-image information "
             f"{_beside(information, value['information_over_attention'])}): there is no patch level."):
            min(low["within_image_information"], low["information_over_attention"]) <= 0,
        Sign("patch", "no patch level (concepts do not follow the picture)",
             "When the picture is cropped and mirrored, the concepts follow it no better than place and attention do (warp "
             f"gain {_beside(gain, value['warp_gain_over_attention'])}): there is no patch level."):
            min(low["warp_gain"], low["warp_gain_over_attention"]) <= 0,
        Sign("importance", "random patches matter as much",
             f"The prediction depends no more on an image's most important concepts (effect {effect:.2f}) than on random "
             f"patches ({by_lot:.2f})."): low["gain_over_lot"] <= 0,
        Sign("importance", "the patches with most attention matter as much",
             f"The prediction depends no more on an image's most important concepts (effect {effect:.2f}) than on the patches "
             f"with most attention ({by_attention:.2f})."): low["gain_over_attention"] <= 0,
        # One concept per class gets 0.45.
        Sign("patch", "the concepts are not the true colours",
             f"The concepts are not the true colours (agreement {colours:.2f})."): colours < 0.5,
        Sign("patch", "the concepts follow the parts no better than position does",
             f"The concepts follow the parts ({parts:.2f}) no better than a patch's position does "
             f"({by_position:.2f})."): low["part_consistency"] <= by_position,
    }  # fmt: skip
    return [sign for sign, shown in signs.items() if shown]


def verdict(scores: Mapping[str, Score], signs: list[Sign]) -> str:
    """What may be believed, in one line: a level that was tested and that nothing warns of."""
    doubts = {}
    for level, needed in _NEEDED.items():
        missing = " or ".join(words for name, words in needed.items() if name not in scores)
        reasons = [sign.reason for sign in signs if sign.level == level]
        if reasons or missing:
            doubts[level] = reasons[0] if reasons else f"the {level} level was not tested (no {missing})"
    believed = [level for level in _NEEDED if level not in doubts]
    unimportant = [sign.reason for sign in signs if sign.level == "importance"]
    aside = f", but not which concepts matter ({unimportant[0]})" if unimportant and believed else ""
    if not doubts:
        return f"Believe images and patches{aside or ': no test speaks against it'}."
    head = f"Believe the {believed[0]} level only{aside}" if believed else "Do not believe it"
    return f"{head}: {'; '.join(doubts.values())}."


def _beside(value: float, over: float) -> str:
    return f"{value:.3f}" if math.isnan(over) else f"{value:.3f}, by attention alone {value - over:.3f}"


def _shares(area: float, attended: float) -> str:
    attention = "" if math.isnan(attended) else f", {attended:.0%} of their attention"
    return f"{area:.0%} of its patches{attention}"
