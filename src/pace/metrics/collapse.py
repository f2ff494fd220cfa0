"""When good scores mean nothing: warnings about explanations that have collapsed.

Each limit lies between the scores of explanations known to have collapsed and of sound ones (docs/metrics.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pace.metrics.scores import Score

SAME_EVERYWHERE = 0.1  # distance between images; a collapse showed 0.02, sound explanations 0.66 and more
NOT_RECOGNISED = 0.8  # stability ratio
FEW = 3.5  # effective concepts of many (a collapse to two shows 2 to 3, since every concept keeps its prior share) ...
FEW_OF_FEW, FEW_OF_MANY = 0.6, 0.03  # ... and as a share of all concepts, where these are very few or very many
ONE_PER_IMAGE = 1.5  # concepts per image
NO_VARIETY = 1.05  # patch variety
CLS_ALONE = 0.5  # weight of CLS; 0.12 is usual
ECHO = 0.95  # agreement of the leading concept with the predicted class
REPEATS_PREDICTION = 0.1  # faithfulness gained by being given the prediction
WRONG_COLOURS = 0.5  # colour recovery; one concept per class gets 0.45
NO_PARTS = 0.05  # part consistency


class Sign(NamedTuple):
    """A sign of collapse: `wrong` takes the values of some scores, which the sentence may quote by position."""

    scores: tuple[str, ...]
    wrong: Callable[..., bool]
    sentence: str


SIGNS = (
    Sign(
        ("effective_concepts", "n_concepts"),
        lambda used, total: used < max(min(FEW, FEW_OF_FEW * total), FEW_OF_MANY * total),
        "Only about {:.1f} of {:.0f} concepts are in use: the rest have collapsed into these.",
    ),
    Sign(
        ("between_images",),
        lambda apart: apart < SAME_EVERYWHERE,
        "All images have nearly the same explanation (distance {:.2f} between images), so good stability means nothing.",
    ),
    Sign(
        ("stability_ratio",),
        lambda ratio: ratio > NOT_RECOGNISED,
        "A perturbed image is about as far from its original as any other image is (stability ratio {:.2f}): "
        "the explanation does not recognise the image.",
    ),
    Sign(
        ("faithfulness", "majority_class", "faithfulness_low"),
        lambda value, chance, low: low <= chance,
        "The prediction is recovered no better ({:.2f}) than by always naming the most frequent class ({:.2f}): "
        "the explanation says nothing about it.",
    ),
    Sign(
        ("faithfulness_given_prediction", "faithfulness"),
        lambda given, withheld: given - withheld > REPEATS_PREDICTION,
        "Faithfulness is {:.2f} when the prediction is given to the explanation and {:.2f} when it is withheld: "
        "much of it only repeats the prediction.",
    ),
    Sign(
        ("class_echo",),
        lambda echo: echo > ECHO,
        "The leading concept of an image is its predicted class under another name (agreement {:.2f}): "
        "faithful, but it explains nothing.",
    ),
    Sign(
        ("concepts_per_image",),
        lambda distinct: distinct < ONE_PER_IMAGE,
        "Nearly all patches of an image have the same concept ({:.1f} concepts per image): there is no patch level.",
    ),
    Sign(
        ("patch_variety", "concepts_per_image"),
        lambda variety, distinct: variety < NO_VARIETY and distinct >= ONE_PER_IMAGE,
        "The patches of an image hardly differ in their concepts (patch variety {:.2f}): "
        "there is no patch level to speak of.",
    ),
    Sign(
        ("cls_weight",),
        lambda share: share > CLS_ALONE,
        "CLS carries {:.0%} of an image's weight: the patches hardly count.",
    ),
    Sign(
        ("colour_recovery",),
        lambda colours: colours < WRONG_COLOURS,
        "The concepts are not the true colours (agreement {:.2f}).",
    ),
    Sign(
        ("part_consistency",),
        lambda parts: parts < NO_PARTS,
        "The concepts do not follow the parts (agreement {:.2f}).",
    ),
)


def collapses(scores: Mapping[str, Score]) -> list[str]:
    """A sentence for every sign of collapse that the scores show; scores that are missing are not judged."""
    known = {name: score.value for name, score in scores.items()}
    if "faithfulness" in scores:
        low = scores["faithfulness"].low
        known["faithfulness_low"] = known["faithfulness"] if low is None else low
    found = []
    for sign in SIGNS:
        if known.keys() >= set(sign.scores):
            values = [known[name] for name in sign.scores]
            if sign.wrong(*values):
                found.append(sign.sentence.format(*values))
    return found
