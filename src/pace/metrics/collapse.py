"""When good scores mean nothing: the signs of a collapsed explanation, in plain words.

Limits are set between the figures of explanations known to have collapsed and of those that have not (docs/metrics.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from pace.metrics.scores import Score

SAME_EVERYWHERE = 0.1  # distance between images; a collapse showed 0.02, sound explanations 0.66 and more
STRANGERS = 0.8  # stability ratio
FEW = 3.5  # effective concepts of many (a collapse to two shows 2 to 3, since every concept keeps its prior share) ...
FEW_OF_FEW, FEW_OF_MANY = 0.6, 0.03  # ... and as a share of all concepts, where these are very few or very many
ONE_PER_IMAGE = 1.5  # concepts per image
NO_VARIETY = 1.05  # patch variety
CLS_ALONE = 0.5  # weight of CLS; 0.12 is usual
ECHO = 0.95  # agreement of the leading concept with the predicted class
TOLD = 0.1  # faithfulness gained by being told the prediction
WRONG_COLOURS = 0.5  # colour recovery; one concept per class gets 0.45
NO_PARTS = 0.05  # part consistency


def collapses(scores: Mapping[str, Score]) -> list[str]:
    """One sentence for every sign of a collapse that the scores show. Scores that are not there are not judged."""
    value = {name: score.value for name, score in scores.items()}
    found: list[str] = []

    def warn(wrong: bool, sentence: str) -> None:
        if wrong:
            found.append(sentence)

    if {"effective_concepts", "n_concepts"} <= value.keys():
        used, total = value["effective_concepts"], value["n_concepts"]
        few = used < max(min(FEW, FEW_OF_FEW * total), FEW_OF_MANY * total)
        warn(few, f"Only about {used:.1f} of {total:.0f} concepts are in use: the rest have collapsed into these.")
    if "between_images" in value:
        apart = value["between_images"]
        steady = f", and its stability of {value['stability']:.2f} only says so" if "stability" in value else ""
        warn(
            apart < SAME_EVERYWHERE,
            f"All images have nearly the same explanation (distance {apart:.2f} between images){steady}.",
        )
    if "stability_ratio" in value:
        ratio = value["stability_ratio"]
        warn(
            ratio > STRANGERS,
            f"A perturbed image is about as far from its own original as a stranger is (stability ratio {ratio:.2f}): "
            "the explanation does not recognise the image.",
        )
    if {"faithfulness", "majority_class"} <= value.keys():
        score, chance = scores["faithfulness"], value["majority_class"]
        reliably = score.value if score.low is None else score.low
        warn(
            reliably <= chance,
            f"The prediction is recovered no better ({score.value:.2f}) than by always naming the most frequent class "
            f"({chance:.2f}): the explanation says nothing about it.",
        )
    if {"faithfulness", "faithfulness_given_prediction"} <= value.keys():
        withheld, given = value["faithfulness"], value["faithfulness_given_prediction"]
        warn(
            given - withheld > TOLD,
            f"Faithfulness is {given:.2f} when the explanation is told the prediction and {withheld:.2f} when it is not: "
            "much of it only repeats the prediction.",
        )
    if "class_echo" in value:
        echo = value["class_echo"]
        warn(
            echo > ECHO,
            f"The leading concept of an image is its predicted class under another name (agreement {echo:.2f}): "
            "faithful, but it explains nothing.",
        )
    if "concepts_per_image" in value:
        distinct = value["concepts_per_image"]
        warn(
            distinct < ONE_PER_IMAGE,
            f"Nearly all patches of an image have the same concept ({distinct:.1f} concepts an image): "
            "there is no patch level.",
        )
        if "patch_variety" in value:
            variety = value["patch_variety"]
            warn(
                distinct >= ONE_PER_IMAGE and variety < NO_VARIETY,
                f"The patches of an image hardly differ in their concepts (patch variety {variety:.2f}): "
                "there is no patch level to speak of.",
            )
    if "cls_weight" in value:
        share = value["cls_weight"]
        warn(share > CLS_ALONE, f"CLS carries {share:.0%} of an image's weight: the patches have little say in it.")
    if "colour_recovery" in value:
        colours = value["colour_recovery"]
        warn(colours < WRONG_COLOURS, f"The concepts are not the true colours (agreement {colours:.2f}).")
    if "part_consistency" in value:
        parts = value["part_consistency"]
        warn(parts < NO_PARTS, f"The concepts do not follow the parts (agreement {parts:.2f}).")
    return found
