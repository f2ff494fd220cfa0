"""Explainers that know nothing of a patch are caught by the patch level's scores; honest ones get no warning at all."""

from pathlib import Path

import patchless
import pytest
from patchless import CONCEPTS, PATCHLESS, TEST, TRAIN, explanation

from pace import PACE, Explanation
from pace.metrics import Scores, evaluate, score_explanations

TABLE = Path(__file__).parents[2] / "benchmarks" / "notes" / "patch-level.md"
COLUMNS = (
    "faithfulness", "within_image_information", "information_over_attention", "warp_gain", "warp_gain_over_attention",
    "warp_agreement",
)  # fmt: skip


@pytest.fixture(scope="module")
def world() -> patchless.Pictures:
    return patchless.pictures()


@pytest.fixture(scope="module")
def both_views(world) -> tuple[patchless.View, patchless.View]:
    return patchless.views(world)


def judged(world: patchless.Pictures, seen: Explanation, perturbed: Explanation) -> Scores:
    return score_explanations(
        seen[TRAIN],
        seen[TEST],
        perturbed[TEST],
        yhat_train=world.yhat[TRAIN],
        yhat_test=world.yhat[TEST],
        embeddings=world.seen.embeddings[TEST],
        attention=world.seen.attention[TEST],
        attention_perturbed=world.perturbed.attention[TEST],
        crops=world.perturbed.crops[TEST],
    )


def assert_documented(name: str, scores: Scores) -> None:
    """The figures in the table are these."""
    lines = TABLE.read_text(encoding="utf-8").replace("×", "x").splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {name} |")]
    cells = [float(cell.strip(" *").replace("−", "-")) for cell in row.strip("|").split("|")[1:]]
    assert cells == pytest.approx([scores[column].value for column in COLUMNS], abs=0.02)


@pytest.mark.parametrize("name", PATCHLESS)
def test_an_explainer_that_knows_nothing_of_a_patch_is_told_so(world, both_views, name):
    concepts = [PATCHLESS[name](view) for view in both_views]
    number = 1 + max(some.max() for some in concepts)
    scores = judged(world, *(explanation(some, number) for some in concepts))
    told = [warning for warning in scores.warnings if "there is no patch level" in warning]
    assert len(told) == 2  # neither the embeddings nor the other view know of one
    assert "no patch level" in scores.verdict
    assert not scores.verdict.startswith("Believe images and patches")
    assert_documented(name, scores)


def test_honest_k_means_is_believed(world, both_views):
    scores = judged(world, *(explanation(view.honest, CONCEPTS) for view in both_views))
    assert scores.warnings == []
    assert scores.verdict == "Believe images and patches: no test speaks against it."
    assert_documented("k-means", scores)


def test_pace_is_believed(world):
    model = PACE(CONCEPTS, progress=False).fit(world.seen[TRAIN], perturbed=world.perturbed[TRAIN])
    scores = evaluate(model, world.seen[TRAIN], world.seen[TEST], world.perturbed[TEST])
    assert scores.warnings == []
    assert scores.verdict == "Believe images and patches: no test speaks against it."
    assert scores["information_over_attention"].low > 0.3
    assert scores["warp_gain_over_attention"].low > 0.1
