"""Explainers that know nothing of a patch are caught by the patch level's scores; honest ones get no warning at all."""

import patchless
import pytest
from patchless import CONCEPTS, PATCHLESS, TEST, TRAIN, explanation

from pace import PACE, Explanation
from pace.metrics import Scores, score_explanations

HONEST = {"EM": {"refine": 0}, "PACE": {}, "PACE, refined": {"refine": 100}}


@pytest.fixture(scope="module")
def world() -> patchless.Pictures:
    return patchless.pictures()


@pytest.fixture(scope="module")
def both_views(world) -> tuple[patchless.View, patchless.View]:
    return patchless.views(world)


def judged(world: patchless.Pictures, seen: Explanation, perturbed: Explanation, **other: object) -> Scores:
    options = {
        "embeddings": world.seen.embeddings[TEST],
        "attention": world.seen.attention[TEST],
        "attention_perturbed": world.perturbed.attention[TEST],
        "crops": world.crops[TEST],
        **other,
    }
    labels = {"yhat_train": world.yhat[TRAIN], "yhat_test": world.yhat[TEST]}
    return score_explanations(seen[TRAIN], seen[TEST], perturbed[TEST], **labels, **options)


@pytest.mark.parametrize("name", PATCHLESS)
def test_an_explainer_that_knows_nothing_of_a_patch_is_told_so(world, both_views, name):
    concepts = [PATCHLESS[name](view) for view in both_views]
    number = 1 + max(some.max() for some in concepts)
    scores = judged(world, *(explanation(some, number) for some in concepts))
    told = [warning for warning in scores.warnings if "there is no patch level" in warning]
    assert len(told) == 2  # neither the embeddings nor the other view know of one
    assert "no patch level" in scores.verdict
    assert not scores.verdict.startswith("Believe images and patches")


def test_honest_k_means_is_believed(world, both_views):
    scores = judged(world, *(explanation(view.honest, CONCEPTS) for view in both_views))
    assert scores.warnings == []
    assert scores.verdict == "Believe images and patches: all tests are passed."


@pytest.mark.parametrize("name", HONEST)
def test_pace_is_believed(world, name):
    model = PACE(CONCEPTS, progress=False, **HONEST[name]).fit(world.seen[TRAIN], perturbed=world.perturbed[TRAIN])
    scores = judged(world, model.explain(world.seen), model.explain(world.perturbed))
    assert scores.warnings == []
    assert scores.verdict == "Believe images and patches: all tests are passed."


def test_without_crops_the_patch_level_is_not_praised(world, both_views):
    seen, perturbed = (explanation(view.honest, CONCEPTS) for view in both_views)
    scores = judged(world, seen, perturbed, crops=None, bootstrap=0)
    assert scores.warnings == []
    assert scores.verdict == "Believe the image level only: the patch level was not tested (no warp gain)."
