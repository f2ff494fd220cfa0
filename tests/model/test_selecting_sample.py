"""The patches from which the number of concepts is found, and as how many independent ones they count."""

import numpy as np
import pytest
import torch

from pace import Observations
from pace.model.selecting.sketching import Sample
from pace.model.settings import Settings

IMAGES, TOKENS, DIM = 300, 20, 8


def sample_of(patches, attention=None, number=10**6):
    attention = np.ones(patches.shape[:2]) if attention is None else attention
    observations = Observations(patches.astype(np.float32), attention.astype(np.float32))
    return Sample.draw(observations, Settings(torch.device("cpu")), np.random.default_rng(0), number)


def worth(patches, means, attention=None):
    """Independent patches of an image."""
    sample = sample_of(patches, attention)
    centres = torch.as_tensor(means, dtype=torch.float32) - sample.offset
    return float(sample.discounted(centres, torch.eye(patches.shape[2])).weights.sum()) / len(patches)


def one_concept(correlation, seed=0):
    rng = np.random.default_rng(seed)
    shared, own = rng.normal(size=(IMAGES, 1, DIM)), rng.normal(size=(IMAGES, TOKENS, DIM))
    return np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own


@pytest.mark.parametrize("correlation", [0.0, 0.1, 0.5, 0.9])
def test_correlated_patches_count_as_the_independent_ones_that_would_fix_a_mean_as_well(correlation):
    expected = TOKENS / (1 + (TOKENS - 1) * correlation)
    assert worth(one_concept(correlation), np.zeros((1, DIM))) == pytest.approx(expected, rel=0.1)


def test_patches_count_as_they_are_alike_in_the_direction_in_which_they_differ_most():
    """There a concept would be cut into images. All eight directions together have a correlation of a third."""
    rng = np.random.default_rng(3)
    patches = rng.normal(size=(IMAGES, TOKENS, DIM))
    patches[:, :, 0] += 2 * rng.normal(size=(IMAGES, 1))
    assert worth(patches, np.zeros((1, DIM))) == pytest.approx(TOKENS / (1 + (TOKENS - 1) * 0.8), rel=0.1)


def test_to_be_of_the_same_concept_is_no_correlation():
    rng = np.random.default_rng(1)
    means = 10 * rng.normal(size=(3, DIM))
    theta = rng.dirichlet([0.3] * 3, IMAGES)
    concept = np.stack([rng.choice(3, TOKENS, p=mixture) for mixture in theta])
    patches = means[concept] + rng.normal(size=(IMAGES, TOKENS, DIM))
    assert worth(patches, means) > 0.95 * TOKENS
    assert worth(patches, means[:1]) < TOKENS / 4  # until the concepts are told apart


def test_a_patch_with_the_weight_of_ten_counts_as_one():
    attention = np.ones((IMAGES, TOKENS))
    attention[:, 0] = 10
    expected = (TOKENS + 9) ** 2 / (TOKENS + 99)
    assert worth(one_concept(0.0), np.zeros((1, DIM)), attention) == pytest.approx(expected, rel=0.05)
    attention[:, 0] = 0
    assert worth(one_concept(0.0), np.zeros((1, DIM)), attention) == pytest.approx(TOKENS - 1, rel=0.05)


def test_patches_of_a_concept_that_a_single_image_has_count_as_one():
    rng = np.random.default_rng(2)
    means = 100 * rng.normal(size=(6, DIM))
    assert worth(means[:, None] + rng.normal(size=(6, TOKENS, DIM)), means) == pytest.approx(1)


def test_of_one_image_nothing_is_taken_off():
    assert worth(one_concept(0.5)[:1], np.zeros((1, DIM))) == pytest.approx(TOKENS)


def test_patches_are_drawn_by_their_attention():
    patches = np.broadcast_to(np.arange(TOKENS, dtype=np.float64)[None, :, None], (IMAGES, TOKENS, 2)).copy()
    patches[:, :, 1] = np.arange(IMAGES)[:, None]  # no image is a copy of another
    attention = np.zeros((IMAGES, TOKENS))
    attention[:, 3], attention[:, 5], attention[:, -1] = 4, 1, 3
    drawn = sample_of(patches, attention, number=16 * IMAGES)
    assert drawn.observations.shape == (IMAGES, 16, 2)
    which, counts = np.unique(drawn.observations.embeddings[:, :, 0].numpy(), return_counts=True)
    assert which.tolist() == [3, 5, TOKENS - 1]
    np.testing.assert_allclose(counts / IMAGES, [8, 2, 6], atol=1e-6)
    assert torch.equal(drawn.weights, torch.ones(IMAGES * 16))


def test_few_patches_of_many_images_rather_than_all_of_few():
    def drawn(images, tokens):
        patches = np.zeros((images, tokens, 1), np.float32) + np.arange(images, dtype=np.float32)[:, None, None]
        observations = Observations(patches, np.ones((images, tokens), np.float32))
        return Sample.draw(observations, Settings(torch.device("cpu")), np.random.default_rng(0)).observations.shape[:2]

    assert drawn(3000, 50) == (2048, 16)
    assert drawn(1024, 50) == (1024, 32)
    assert drawn(200, 50) == (200, 50)
    assert drawn(9000, 4) == (8192, 4)
