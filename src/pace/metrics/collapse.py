"""When good scores mean nothing: warnings about explanations that have collapsed.

Each limit lies between the scores of explanations known to have collapsed and of sound ones (docs/metrics.md).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from pace.metrics.scores import Score


def collapses(scores: Mapping[str, Score]) -> list[str]:
    """A sentence for every sign of collapse that the scores show; scores that are missing are not judged."""
    # A missing score is NaN, which is neither above nor below a limit.
    value = defaultdict(lambda: math.nan, {name: score.value for name, score in scores.items()})
    faithful, given = value["faithfulness"], value["faithfulness_given_prediction"]
    low = scores["faithfulness"].low if "faithfulness" in scores else None
    apart, ratio, echo = (value[name] for name in ("between_images", "stability_ratio", "class_echo"))
    used, total, majority = (value[name] for name in ("effective_concepts", "n_concepts", "majority_class"))
    distinct, variety, cls = (value[name] for name in ("concepts_per_image", "patch_variety", "cls_weight"))
    effect, attention, lot = (value[name] for name in ("concept_effect", "effect_by_attention", "effect_by_lot"))
    colours, parts = value["colour_recovery"], value["part_consistency"]
    # A collapse of many concepts to two shows 2 to 3 effective ones, since every concept keeps its prior share.
    few = max(min(3.5, 0.6 * total), 0.03 * total)
    signs = {
        f"Only about {used:.1f} of {total:.0f} concepts are in use: the rest have collapsed into these.": used < few,
        # A collapse showed 0.02, sound explanations 0.66 and more.
        f"All images have nearly the same explanation (distance {apart:.2f} between images), so good stability means "
        "nothing.": apart < 0.1,
        f"A perturbed image is about as far from its original as any other image is (stability ratio {ratio:.2f}): the "
        "explanation does not recognise the image.": ratio > 0.8,
        f"The prediction is recovered no better ({faithful:.2f}) than by always naming the most frequent class "
        f"({majority:.2f}): the explanation says nothing about it.": (faithful if low is None else low) <= majority,
        f"Faithfulness is {given:.2f} when the prediction is given to the explanation and {faithful:.2f} when it is "
        "withheld: much of it only repeats the prediction.": given - faithful > 0.1,
        f"The leading concept of an image is its predicted class under another name (agreement {echo:.2f}): faithful, "
        "but it explains nothing.": echo > 0.95,
        f"Nearly all patches of an image have the same concept ({distinct:.1f} concepts per image): there is no patch "
        "level.": distinct < 1.5,
        f"The patches of an image hardly differ in their concepts (patch variety {variety:.2f}): there is no patch "
        "level to speak of.": variety < 1.05 and distinct >= 1.5,
        f"CLS carries {cls:.0%} of an image's weight: the patches hardly count.": cls > 0.5,  # 0.12 is usual
        f"The prediction depends no more on an image's most important concepts (effect {effect:.2f}) than on random "
        f"patches ({lot:.2f}).": _lowest(scores, "gain_over_lot") <= 0,
        f"The prediction depends no more on an image's most important concepts (effect {effect:.2f}) than on the patches "
        f"with most attention ({attention:.2f}).": _lowest(scores, "gain_over_attention") <= 0,
        # One concept per class gets 0.45.
        f"The concepts are not the true colours (agreement {colours:.2f}).": colours < 0.5,
        f"The concepts do not follow the parts (agreement {parts:.2f}).": parts < 0.05,
    }
    return [sentence for sentence, shown in signs.items() if shown]


def _lowest(scores: Mapping[str, Score], name: str) -> float:
    """The lower end of a score's interval, its value without one, NaN without the score."""
    if name not in scores:
        return math.nan
    score = scores[name]
    return score.value if score.low is None else score.low
