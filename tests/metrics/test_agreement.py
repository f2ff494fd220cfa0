import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from pace.metrics import (
    bootstrap,
    colour_accuracy,
    colour_purity,
    colour_recovery,
    kind_accuracy,
    part_ari,
    part_consistency,
    part_consistency_by_position,
    part_recovery,
    reconstruction,
    seeds_alike,
)
from pace.metrics.agreement import Contingency, cell_of

RNG = np.random.default_rng(0)
COLOURS = RNG.integers(5, size=(30, 4, 4))
COLOUR_METRICS = (colour_recovery, colour_accuracy, colour_purity)


def phi_of(concepts, k=10):
    return np.eye(k)[concepts.reshape(len(concepts), -1)]


def test_the_true_colours_are_recovered_whatever_the_concepts_are_called():
    phi = phi_of(np.array([7, 2, 9, 0, 4])[COLOURS])
    assert [metric(phi, COLOURS) for metric in COLOUR_METRICS] == pytest.approx([1, 1, 1])


def test_prefix_tokens_are_left_out():
    phi = np.concatenate([phi_of(np.zeros((30, 1), int)), phi_of(COLOURS)], 1)
    assert colour_recovery(phi, COLOURS, 1) == pytest.approx(1)
    with pytest.raises(ValueError, match=r"colours: expected 30 images of 17 patches.*found \(30, 4, 4\)"):
        colour_recovery(phi, COLOURS)


def test_agreement_is_scikit_learns():
    concepts = np.where(RNG.random(COLOURS.shape) < 0.5, COLOURS, RNG.integers(10, size=COLOURS.shape))
    expected = normalized_mutual_info_score(COLOURS.ravel(), concepts.ravel())
    assert colour_recovery(phi_of(concepts), COLOURS) == pytest.approx(expected)


def test_a_colour_split_over_concepts_is_pure_but_matched_in_part():
    split = COLOURS * 2 + RNG.integers(2, size=COLOURS.shape)
    assert colour_purity(phi_of(split), COLOURS) == 1
    assert 0.4 < colour_accuracy(phi_of(split), COLOURS) < 0.7
    assert 0.7 < colour_recovery(phi_of(split), COLOURS) < 1


@pytest.mark.parametrize(
    "concepts",
    [
        np.zeros_like(COLOURS),  # one concept for all patches
        np.broadcast_to(np.arange(30)[:, None, None] % 2, COLOURS.shape),  # one concept per class
        np.random.default_rng(1).integers(5, size=COLOURS.shape),  # random
    ],
    ids=["one", "per-class", "random"],
)
def test_degenerate_patches_recover_no_colour(concepts):
    assert colour_recovery(phi_of(concepts), COLOURS) < 0.1
    assert colour_accuracy(phi_of(concepts), COLOURS) < 0.4
    assert colour_purity(phi_of(concepts), COLOURS) < 0.4
    parts = np.tile([0, 5, 10], (30, 1))
    assert part_consistency(phi_of(concepts), parts) < 0.1


def test_concepts_that_follow_parts_are_consistent():
    concepts = np.zeros((20, 9), int)
    parts = np.stack([RNG.permutation(9)[:3] for _ in range(20)])
    np.put_along_axis(concepts, parts, [[1, 2, 3]], 1)
    assert part_consistency(phi_of(concepts), parts) == pytest.approx(1)
    hidden = np.where(RNG.random(parts.shape) < 0.3, -1, parts)
    assert part_consistency(phi_of(concepts), hidden) == pytest.approx(1)
    with_cls = np.concatenate([phi_of(np.zeros((20, 1), int)), phi_of(concepts)], 1)
    assert part_consistency(with_cls, parts, 1) == pytest.approx(1)


PARTS, KINDS = COLOURS // 2, COLOURS  # three parts, the last of a single kind


def test_true_parts_are_recovered_by_the_parts_of_concepts_and_kinds_by_concepts():
    phi, part_of = phi_of(np.array([7, 2, 9, 0, 4])[KINDS]), np.array([1, 0, 0, 0, 2, 0, 0, 0, 0, 1])
    assert part_recovery(phi, PARTS, part_of) == pytest.approx(1)
    assert part_recovery(phi, PARTS) == pytest.approx(normalized_mutual_info_score(PARTS.ravel(), KINDS.ravel()))
    assert kind_accuracy(phi, PARTS, KINDS) == 1
    with pytest.raises(ValueError, match=r"true_kinds: expected 30 images of 16 patches"):
        kind_accuracy(phi, PARTS, KINDS[:, :2])


def test_patches_without_a_true_part_do_not_count():
    known = np.arange(16).reshape(4, 4) % 3 > 0
    phi = phi_of(np.where(known, KINDS, 0), 5)
    parts, kinds = (np.where(known, names, -1) for names in (PARTS, KINDS))
    part_of = [0, 0, 1, 1, 2]
    assert part_recovery(phi, parts, part_of) == pytest.approx(1)
    assert kind_accuracy(phi, parts, kinds) == 1
    assert max(part_recovery(phi, PARTS, part_of), kind_accuracy(phi, PARTS, KINDS)) < 0.9


def test_a_part_leads_by_the_sum_of_its_kinds():
    phi = np.array([[[0.4, 0.3, 0.3], [1, 0, 0]]])
    assert part_recovery(phi, [[1, 0]], [0, 1, 1]) == pytest.approx(1)
    assert part_recovery(phi, [[1, 0]]) == 0


def test_every_part_of_several_kinds_counts_alike_when_kinds_are_told():
    """One concept for each part tells of no kind more than which is most frequent."""
    parts, kinds = np.array([[0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2]]), np.array([[0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 4]])
    assert kind_accuracy(phi_of(parts), parts, kinds) == pytest.approx((6 / 8 + 1 / 2) / 2)
    assert np.isnan(kind_accuracy(phi_of(parts), parts, parts))


def test_a_patch_with_two_parts_counts_for_both():
    phi = phi_of(np.array([[1, 2], [1, 2]]))
    expected = normalized_mutual_info_score([0, 1, 2, 0, 1, 2], [1, 1, 2, 1, 1, 2])
    assert part_consistency(phi, [[0, 0, 1], [0, 0, 1]]) == pytest.approx(expected)


def test_the_rand_index_is_scikit_learns():
    concepts, parts = RNG.integers(6, size=(30, 16)), RNG.integers(-1, 16, size=(30, 5))
    image, part = np.nonzero(parts >= 0)
    concepts[image, parts[image, part]] = np.where(
        RNG.random(len(part)) < 0.5, part, concepts[image, parts[image, part]]
    )
    phi, leading = phi_of(concepts), concepts[image, parts[image, part]]
    assert part_ari(phi, parts) == pytest.approx(adjusted_rand_score(part, leading))
    score = bootstrap(part_ari, phi, parts)
    assert score.low < score.value < score.high
    weights = RNG.integers(3, size=(1, 30))
    drawn = np.repeat(np.arange(len(image)), weights[0, image])
    expected = adjusted_rand_score(part[drawn], leading[drawn])
    assert Contingency(30, image, leading, part).rand_index().values(weights)[0] == pytest.approx(expected)


def test_concepts_that_are_parts_agree_and_one_concept_agrees_with_nothing():
    parts = np.stack([RNG.permutation(16)[:5] for _ in range(30)])
    concepts = np.zeros((30, 16), int)
    np.put_along_axis(concepts, parts, np.tile(np.arange(5), (30, 1)), 1)
    assert part_ari(phi_of(concepts), parts) == pytest.approx(1)
    assert part_ari(phi_of(0 * concepts), parts) == 0
    assert part_ari(phi_of(0 * concepts), parts[:, :1]) == 0


def test_position_alone_is_as_good_as_parts_keep_their_places():
    quadrants = phi_of(np.tile(np.repeat(np.repeat([[2, 5], [7, 1]], 2, 0), 2, 1), (30, 1, 1)))
    still = np.tile([0, 3, 12, 15], (30, 1))
    assert part_consistency_by_position(quadrants, still, (4, 4)) == pytest.approx(1)
    moving = np.stack([RNG.permutation(16)[:4] for _ in range(30)])
    value = part_consistency_by_position(quadrants, moving, (4, 4))
    assert value < 0.2
    assert value == pytest.approx(part_consistency(quadrants, moving))  # the concepts are the four cells
    assert part_consistency_by_position(phi_of(0 * COLOURS), still, (4, 4)) == 0  # one concept, one cell


def test_cells_are_as_many_as_asked_for_or_a_few_less_and_reach_out():
    x, y = np.random.default_rng(0).random((2, 10_000))
    for cells, made in ((1, 1), (2, 2), (4, 4), (7, 6), (8, 8), (16, 16), (100, 100)):
        assert len(np.unique(cell_of(x, y, cells))) == made
    np.testing.assert_array_equal(cell_of(np.array([-1.0, 0.2, 2.0]), np.array([0.1, 0.9, 7.0]), 4), [0, 2, 3])


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 4))
@settings(deadline=None, max_examples=20)
def test_ranges_and_symmetries(seed, k, colours):
    rng = np.random.default_rng(seed)
    phi, truth = rng.random((4, 6, k)), rng.integers(colours, size=(4, 6))
    for metric in COLOUR_METRICS:
        value = metric(phi, truth)
        assert 0 <= value <= 1 + 1e-12
        assert metric(phi[:, :, rng.permutation(k)], rng.permutation(colours)[truth]) == pytest.approx(value)
    parts = rng.integers(-1, 6, size=(4, 3))
    parts[0, 0] = 0
    value = part_consistency(phi, parts)
    assert 0 <= value <= 1
    assert part_consistency(phi[:, :, rng.permutation(k)], parts) == pytest.approx(value)


def test_bad_parts_are_refused():
    phi = phi_of(COLOURS)
    with pytest.raises(ValueError, match=r"parts: expected patch numbers \(30, parts\)"):
        part_consistency(phi, np.zeros((29, 3), int))
    with pytest.raises(ValueError, match=r"parts: expected visible patches 0 to 15, −1 for none; found \[ 0 16\]"):
        part_consistency(phi, np.tile([0, 16], (30, 1)))
    with pytest.raises(ValueError, match=r"found \[-1\]"):
        part_consistency(phi, np.full((30, 3), -1))


def test_the_same_concepts_under_other_names_are_alike_and_unrelated_ones_are_not():
    phi = phi_of(COLOURS)
    assert seeds_alike(phi, phi_of(np.array([7, 2, 9, 0, 4])[COLOURS])) == pytest.approx(1)
    unrelated = RNG.choice(5, p=[0.6, 0.1, 0.1, 0.1, 0.1], size=COLOURS.shape)
    assert abs(seeds_alike(phi, phi_of(unrelated))) < 0.1
    assert seeds_alike(phi, phi_of(np.zeros_like(COLOURS))) == pytest.approx(0, abs=1e-12)
    assert seeds_alike(*[phi_of(np.zeros_like(COLOURS))] * 2) == 0  # one concept for all says nothing
    with_cls = [np.concatenate([phi_of(RNG.integers(5, size=(30, 1))), phi], 1) for _ in range(2)]
    assert seeds_alike(*with_cls, prefix_tokens=1) == pytest.approx(1)
    with pytest.raises(ValueError, match=r"phi_other: expected images and patches \(30, 16\)"):
        seeds_alike(phi, phi[:, 1:])


def test_seeds_alike_by_hand():
    # Matched 0-0 and 1-1: 3 of 4 patches; by chance 2/4 · 1/4 + 2/4 · 3/4 = 1/2.
    first, second = phi_of(np.array([[0, 0, 1, 1]]), 2), phi_of(np.array([[0, 1, 1, 1]]), 3)
    assert seeds_alike(first, second) == pytest.approx((3 / 4 - 1 / 2) / (1 - 1 / 2))
    assert seeds_alike(second, first) == pytest.approx(0.5)
    # A concept that another fit has split in two keeps its larger half.
    whole, split = np.repeat([[0, 1]], 6, 1), np.array([[0, 0, 0, 0, 2, 2, 1, 1, 1, 1, 1, 1]])
    chance = 1 / 2 * 4 / 12 + 1 / 2 * 1 / 2
    expected = (10 / 12 - chance) / (1 - chance)
    assert seeds_alike(phi_of(whole), phi_of(split)) == pytest.approx(expected)
    score = bootstrap(seeds_alike, phi_of(COLOURS), phi_of(np.where(RNG.random(COLOURS.shape) < 0.7, COLOURS, 5)))
    assert score.low < score.value < score.high < 0.9


def test_reconstruction_is_the_share_of_variance_that_scikit_learn_finds():
    from sklearn.metrics import r2_score

    phi, concepts, offset = RNG.random((70, 5, 3)), RNG.normal(size=(3, 4)), RNG.normal(size=4)
    tokens = offset + phi @ concepts + 0.3 * RNG.normal(size=(70, 5, 4))
    rebuilt = (offset + phi @ concepts)[:, 1:].reshape(-1, 4)
    expected = r2_score(tokens[:, 1:].reshape(-1, 4), rebuilt, multioutput="variance_weighted")
    assert reconstruction(phi, tokens, concepts, offset, prefix_tokens=1) == pytest.approx(expected)
    assert reconstruction(np.ones((70, 5, 1)), tokens, tokens.mean((0, 1))[None], 0.0) == pytest.approx(0)
    assert reconstruction(-phi, tokens, concepts, offset) < 0
