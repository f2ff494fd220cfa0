"""Within-image information and the warp scores, with worked-out answers."""

import numpy as np
import pytest
import torch

from pace.metrics import (
    bootstrap,
    information_over_attention,
    warp_agreement,
    warp_gain,
    warp_gain_over_attention,
    within_image_information,
)
from pace.places import matching_patches

GRID = (4, 4)
RNG = np.random.default_rng(0)
WHOLE = np.array([[0.0, 0, 1, 1]])


def one_hot(concepts):
    return np.eye(6, dtype=np.float32)[np.asarray(concepts)]


@pytest.fixture
def concepts():
    """Two or three of five concepts in each of 40 images."""
    found = [np.random.default_rng(m).choice([m % 5, (m + 1) % 5, (m * m) % 5], 16) for m in range(40)]
    return np.array(found)


@pytest.fixture
def embeddings(concepts):
    """A concept's, an image's and a place's mean, and nothing else."""
    parts = RNG.normal(size=(6, 8))[concepts], RNG.normal(size=(40, 1, 8)), RNG.normal(size=(16, 8))
    return sum(parts)


def test_concepts_explain_all_that_is_neither_image_nor_place(concepts, embeddings):
    value = within_image_information(one_hot(concepts), embeddings, GRID)
    assert value == pytest.approx(1, abs=0.01)  # less what the prior holds back
    noisy = embeddings + 10 * RNG.normal(size=embeddings.shape)
    assert within_image_information(one_hot(concepts), noisy, GRID) < 0.1


def test_no_information_in_places_in_images_and_in_lots(concepts, embeddings):
    assert within_image_information(one_hot(np.tile(np.arange(16) // 4, (40, 1))), embeddings, GRID) == 0
    assert within_image_information(one_hot(np.repeat(concepts[:, :1], 16, 1)), embeddings, GRID) == 0
    lots = one_hot(np.random.default_rng(1).integers(5, size=(40, 16)))
    assert -0.1 < within_image_information(lots, embeddings, GRID) < 0.01
    shuffled = np.random.default_rng(1).permuted(concepts, axis=1)  # the right concepts, at the wrong patches
    assert -0.1 < within_image_information(one_hot(shuffled), embeddings, GRID) < 0.05


def test_information_by_hand():
    """Two concepts change places; in the one half of the images they are 2 apart, in the other 4."""
    first = np.random.default_rng(0).permutation(4)[:2]
    order = np.concatenate([first, np.setdiff1d(np.arange(4), first)])
    concepts, embeddings = np.empty((4, 2), int), np.empty((4, 2, 1))
    concepts[order] = [[0, 1], [1, 0], [0, 1], [1, 0]]
    embeddings[order, :, 0] = [[2, -2], [-2, 2], [1, -1], [-1, 1]]
    # Σ z² = 1 for each concept and Σ zx = 4 or 2; with the prior 3 c = 4 or 2. Left of 2² and 1²: (2 − 2/3)² and (1 − 4/3)².
    expected = 1 - (16 / 9 + 1 / 9) / (4 + 1)
    assert within_image_information(one_hot(concepts), embeddings, (1, 2)) == pytest.approx(expected)


def test_a_concept_of_one_half_alone_predicts_nothing(concepts, embeddings):
    """Concept 5 is in one image only: what is known of the others' patches stays as good."""
    first = concepts.copy()
    first[0] = np.where(concepts[0] == concepts[0, 0], 5, concepts[0])
    measure = within_image_information.measure(one_hot(first), embeddings, GRID)
    others = np.ones((1, 40))
    others[0, 0] = 0
    assert measure.values(others)[0] > 0.98


def test_information_is_that_of_tensors_of_batches_and_of_tokens_with_a_prefix(monkeypatch, concepts, embeddings):
    noisy = embeddings + RNG.normal(size=embeddings.shape)
    value = within_image_information(one_hot(concepts), noisy, GRID)
    assert within_image_information(one_hot(concepts), torch.tensor(noisy), GRID) == value
    cls = np.full((40, 1, 8), 100.0)
    prefixed = np.concatenate([one_hot(concepts)[:, :1], one_hot(concepts)], 1)
    assert within_image_information(prefixed, np.concatenate([cls, noisy], 1), GRID, 1) == value
    monkeypatch.setattr("pace.metrics.inputs._NUMBERS", 1)  # one image at a time
    assert within_image_information(one_hot(concepts), noisy, GRID) == pytest.approx(value, abs=1e-5)


def test_information_has_an_interval_and_needs_two_images(concepts, embeddings):
    noisy = embeddings + RNG.normal(size=embeddings.shape)
    score = bootstrap(within_image_information, one_hot(concepts), noisy, GRID)
    assert 0.2 < score.low < score.value < score.high < 1
    assert np.isnan(within_image_information(one_hot(concepts[:1]), noisy[:1], GRID))


def test_patches_of_a_view_are_found_in_the_picture():
    here = np.arange(16).reshape(4, 4)
    crops = [[0, 0, 1, 1], [1, 0, 0, 1], [0, 0, 0.5, 0.5], [0.5, 0.5, 1, 1], [1, 0, 0.5, 0.5]]
    whole, mirrored, corner, opposite, both = matching_patches(np.array(crops, np.float32), GRID).reshape(-1, 4, 4)
    np.testing.assert_array_equal(whole, here)
    np.testing.assert_array_equal(mirrored, here[:, ::-1])
    np.testing.assert_array_equal(corner, here[:2, :2].repeat(2, 0).repeat(2, 1))
    np.testing.assert_array_equal(opposite, here[2:, 2:].repeat(2, 0).repeat(2, 1))
    np.testing.assert_array_equal(both, here[:2, 2:][:, ::-1].repeat(2, 0).repeat(2, 1))
    np.testing.assert_array_equal(matching_patches(WHOLE, (2, 3)), [np.arange(6)])


def test_the_warp_scores_of_a_mirrored_picture():
    """Concepts 0 0 1 2 in a row, mirrored: no place of the grid keeps its concept."""
    row, crops = np.array([[0, 0, 1, 2]]), np.array([[1.0, 0, 0, 1]])
    follows, stays = one_hot(row[:, ::-1]), one_hot(row)
    assert warp_gain(one_hot(row), follows, crops, (1, 4)) == 1 - 0
    assert warp_gain(one_hot(row), stays, crops, (1, 4)) == 0 - 1
    assert warp_agreement(one_hot(row), follows, crops, (1, 4)) == 1
    # Chance is (2/4)² + (1/4)² + (1/4)² = 3/8.
    assert warp_agreement(one_hot(row), stays, crops, (1, 4)) == pytest.approx((0 - 3 / 8) / (1 - 3 / 8))
    once = one_hot([[2, 1, 0, 1]])  # one patch has another concept: chance is 1/8 + 2/16 + 1/8
    assert warp_gain(one_hot(row), once, crops, (1, 4)) == 3 / 4 - 0
    assert warp_agreement(one_hot(row), once, crops, (1, 4)) == pytest.approx((3 / 4 - 5 / 16) / (1 - 5 / 16))


def test_warp_agreement_is_pooled_and_does_not_apply_to_images_of_one_concept():
    both, crops = one_hot([[0, 1], [2, 2]]), WHOLE.repeat(2, 0)
    moved = one_hot([[1, 0], [2, 2]])
    assert warp_agreement(both, moved, crops, (1, 2)) == pytest.approx((0 - 1 / 2) / (1 / 2))
    assert np.isnan(warp_agreement(both[1:], moved[1:], crops[1:], (1, 2)))
    assert warp_gain(both[1:], moved[1:], crops[1:], (1, 2)) == 0


def test_concepts_are_laid_out_again_by_attention(concepts, embeddings):
    """Concepts 0 and 1 have the most attention, on average, in the one image and the other."""
    phi, crops = one_hot([[0, 1, 0, 1], [0, 0, 0, 1]]), np.array([[1.0, 0, 0, 1]] * 2)
    attention = np.array([[9.0, 1, 2, 3], [1.0, 2, 3, 4]])
    laid_out = one_hot([[0, 1, 1, 0], [0, 0, 0, 1]])
    expected = warp_gain(laid_out, laid_out, crops, (1, 4))
    assert expected == pytest.approx(((1 - 1) + (0.5 - 1)) / 2)
    over = warp_gain_over_attention(phi, phi, attention, attention, crops, (1, 4))
    assert over == pytest.approx(warp_gain(phi, phi, crops, (1, 4)) - expected)
    in_order = RNG.random((40, 16)) - concepts  # every patch of concept 0 has more than any of concept 1
    assert information_over_attention(one_hot(concepts), embeddings, in_order, GRID) == 0
    at_random = RNG.random((40, 16))
    assert information_over_attention(one_hot(concepts), embeddings, at_random, GRID) > 0.9


def test_bad_input_is_refused(concepts, embeddings):
    phi = one_hot(concepts)
    with pytest.raises(ValueError, match="grid: expected 16 patches as phi has; found 3 x 4"):
        within_image_information(phi, embeddings, (3, 4))
    with pytest.raises(ValueError, match=r"embeddings: expected 40 images of 16 tokens; found \(40, 15\)"):
        within_image_information(phi, embeddings[:, 1:], GRID)
    with pytest.raises(ValueError, match="expected 40 images; found 1 and 40"):
        warp_gain(phi, phi, WHOLE, GRID)
    with pytest.raises(ValueError, match=r"crops: expected \(images, 4\)"):
        matching_patches(np.ones((3, 5)), GRID)
    with pytest.raises(ValueError, match=r"attention: expected patches \(40, 16\) as phi has; found \(40, 15\)"):
        information_over_attention(phi, embeddings, np.ones((40, 15)), GRID)
