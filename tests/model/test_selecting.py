"""The number of concepts: found in planted mixtures from any start, by a bound that is what it says."""

import math

import numpy as np
import pytest
import torch

from pace import Observations
from pace.model.selecting import Selection, first_guess, select
from pace.model.selecting.evidence import Clusters
from pace.model.selecting.grouping import Grouping
from pace.model.selecting.search import Search
from pace.model.selecting.sketching import Sample, Sketch
from pace.model.settings import Settings

CPU = Settings(torch.device("cpu"))


def plant(seed, number, dim=12, images=150, tokens=25, distance=9.0, covariance="tied"):
    """Images with Dirichlet mixtures of Gaussian patches; the largest concept is 20 times the smallest."""
    rng = np.random.default_rng([seed, number])
    sizes = np.geomspace(1, 20, number)
    means = rng.normal(size=(number, dim)) * distance / np.sqrt(2 * dim)
    theta = rng.dirichlet(max(2.0, number / 3) * sizes / sizes.sum(), images)
    concept = np.stack([rng.choice(number, tokens, p=mixture) for mixture in theta])
    patches = rng.normal(size=(images, tokens, dim))
    if covariance == "full":
        spread = np.exp(0.4 * rng.normal(size=(number, dim)))
        for k in range(number):
            turn = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
            patches[concept == k] = patches[concept == k] * spread[k] @ turn
    return uniform(means[concept] + patches), means


def uniform(patches):
    return Observations(patches.astype(np.float32), np.ones(patches.shape[:2], np.float32))


@pytest.fixture(scope="module")
def six():
    return plant(4, 6)[0]


@pytest.mark.parametrize(("number", "start"), [(1, 30), (8, 2), (8, 100), (15, 150)])
def test_the_planted_number_is_found_from_few_cells_and_from_many(number, start):
    observations, means = plant(number, number)
    found = select(observations, CPU, start=start)
    assert found.n_concepts == number
    # every planted mean is near one of those found
    assert np.linalg.norm(means[:, None] - found.means.numpy(), axis=2).min(1).max() < 2.0


def test_concepts_with_covariances_of_their_own_are_counted():
    """As if they shared one, so a wide concept may come out as two."""
    observations, means = plant(0, 6, dim=8, distance=12.0, covariance="full")
    found = select(observations, CPU)
    assert 6 <= found.n_concepts <= 9
    assert np.linalg.norm(means[:, None] - found.means.numpy(), axis=2).min(1).max() < 2.0


@pytest.mark.parametrize("seed", [0, 1])
def test_a_shift_of_a_whole_image_makes_no_concepts_however_many_are_allowed(seed):
    """The sketch takes more cells when more concepts are allowed, but patches still count the same."""
    observations, _ = plant(seed, 6, dim=16, images=200)
    rng = np.random.default_rng(seed)
    shift = 2.5 * rng.normal(size=(200, 1, 2)) @ np.linalg.qr(rng.normal(size=(16, 2)))[0].T
    shifted = uniform(observations.embeddings + shift)
    found = [select(shifted, CPU, most=most).n_concepts for most in (20, 300)]
    assert max(found) - min(found) <= 1
    assert 4 <= min(found) <= max(found) <= 10


def test_what_all_patches_of_an_image_share_makes_no_concept():
    observations, _ = plant(1, 8, distance=12.0)
    light = np.random.default_rng(10).normal(size=(150, 1, 12))
    assert select(uniform(observations.embeddings + light), CPU, seed=1).n_concepts == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_plain_backgrounds_are_two_concepts_beside_the_planted_ones(dtype):
    """Patches that are exactly the same: nothing varies in such a concept, and rounding must not be taken for variation."""
    observations, means = plant(2, 3, dim=8)
    patches = observations.embeddings.copy()
    patches[:, :5], patches[:, 5:10] = 12 * np.eye(8)[0], -12 * np.eye(8)[1]
    found = select(uniform(patches), Settings(torch.device("cpu"), dtype))
    expected = np.concatenate([means, [12 * np.eye(8)[0], -12 * np.eye(8)[1]]])
    assert found.n_concepts == 5
    assert np.linalg.norm(expected[:, None] - found.means.numpy(), axis=2).min(1).max() < 2.0


def test_constant_embeddings_are_one_concept():
    assert select(uniform(np.ones((60, 9, 4))), CPU).n_concepts == 1


def test_patches_count_by_their_attention():
    observations, _ = plant(2, 4, tokens=24)
    other = plant(9, 4, tokens=24)[0].embeddings  # concepts that nothing attends to
    embeddings = np.concatenate([observations.embeddings, other], 1)
    attention = np.concatenate([np.ones((150, 24)), np.zeros((150, 24))], 1).astype(np.float32)
    assert select(Observations(embeddings, attention), CPU).n_concepts == 4


def test_copies_of_an_image_are_looked_at_once():
    observations, _ = plant(3, 4, images=40)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(40), 12))
    found = select(observations[order], CPU)
    assert found.images == 40
    assert found.n_concepts == 4


def test_a_few_wide_directions_that_say_nothing_hide_no_concepts():
    observations, _ = plant(0, 8)
    noise = 30 * np.random.default_rng(0).normal(size=(*observations.shape[:2], 3))
    wide = uniform(np.concatenate([observations.embeddings, noise], 2))
    assert select(wide, CPU).n_concepts == 8
    assert len(first_guess(wide, CPU, 12)) >= 6


def test_differences_within_the_blur_make_no_concepts():
    """Three places 30 apart, and in each two that lie 1 apart."""
    rng = np.random.default_rng(0)
    place = rng.integers(3, size=(120, 25))
    patches = 0.1 * rng.normal(size=(120, 25, 6))
    patches[:, :, 0] += 30 * (place == 0) + rng.integers(2, size=(120, 25))
    patches[:, :, 1] += 30 * (place == 1)
    assert select(uniform(patches), CPU).n_concepts == 3


def test_there_are_never_more_than_the_most_that_is_allowed():
    observations, _ = plant(8, 8)
    for start in (2, 100):
        assert select(observations, CPU, start=start, most=5).n_concepts == 5


def test_color_has_four_colours_and_black():
    pytest.importorskip("timm")
    from pace import Backbone
    from pace.backbones.color_vit import LAYER, SIZE, load_model
    from pace.images import Color

    backbone = Backbone(load_model(), layer=LAYER)
    images = Color("train", n_per_class=60, size=SIZE, seed=1)
    assert select(backbone.observe(images, progress=False), CPU).n_concepts == 5


def test_the_bound_is_best_at_the_number_found():
    moves = []
    found = select(plant(3, 12)[0], CPU, start=3, report=lambda *move: moves.append(move))
    assert moves[-1][0] == found.n_concepts == 12
    best = int(found.bounds.argmax())
    assert (int(found.numbers[best]), float(found.bounds[best])) == moves[-1]
    assert set(range(1, found.n_concepts + 1)) <= set(found.numbers.tolist())
    assert max(found.numbers) > found.n_concepts  # more were tried, and rejected
    assert (np.diff(found.evidence.numpy()) <= 0).all()
    assert found.evidence.min() > 0  # what the best merge would lose


@pytest.mark.parametrize("seed", [38, 74])
def test_no_smaller_number_has_a_better_bound_even_where_only_two_merges_in_a_row_gain(seed):
    """Few images of clouds that run into each other, shifted from image to image."""
    rng = np.random.default_rng(seed)
    images, tokens, dim, number = (int(rng.integers(*ends)) for ends in ((5, 60), (5, 40), (2, 20), (2, 15)))
    centres = rng.uniform(0.7, 3) * rng.normal(size=(number, dim))
    concept = np.stack([rng.choice(number, tokens, p=theta) for theta in rng.dirichlet(np.full(number, 0.4), images)])
    patches = centres[concept] + rng.normal(size=(images, tokens, dim))
    patches += rng.uniform(0, 1.5) * rng.normal(size=(images, 1, dim))
    found = select(uniform(patches), CPU, seed=seed)
    assert found.numbers[found.bounds.argmax()] == found.n_concepts


def test_a_start_from_one_concept_splits_and_the_bound_rises_with_every_move():
    observations, _ = plant(5, 4)
    sample = Sample.draw(observations, CPU, np.random.default_rng(0))
    spread = (sample.x.T @ sample.x / len(sample.x)).double()
    moves = []
    drawn = Sketch(torch.zeros(1, 12), sample, spread, spread)
    search = Search(drawn, 50, CPU, lambda *move: moves.append(move))
    assert len(search.run()) == 4
    assert [moves[0][0], moves[-1][0]] == [1, 4]
    assert (np.diff([bound for _, bound in moves]) > 0).all()


def test_moving_and_scaling_the_embeddings_does_the_same_to_the_concepts(six):
    one, two = select(six, CPU, seed=3), select(uniform(six.embeddings * 4 + 8), CPU, seed=3)
    assert two.n_concepts == one.n_concepts == 6
    np.testing.assert_allclose(two.means, one.means * 4 + 8, rtol=1e-3, atol=1e-3)


def test_a_selection_survives_a_file_and_says_what_it_found(tmp_path, six):
    from safetensors.torch import load_file, save_file

    found = select(six, CPU)
    save_file(found.tensors(), tmp_path / "selection.safetensors")
    again = Selection.from_tensors(load_file(tmp_path / "selection.safetensors"))
    assert torch.equal(again.means, found.means)
    assert str(again) == str(found)
    assert str(found).startswith("6 concepts, from 150 images")
    assert "       6                   0.0" in str(found)


def test_what_a_merge_gains_is_what_the_bound_of_the_merged_partition_has_more():
    observations, means = plant(0, 5, dim=6, images=40)
    settings = Settings(torch.device("cpu"), torch.float64)
    sample = Sample.draw(observations, settings, np.random.default_rng(0))
    spread = sample.x.T @ sample.x / len(sample.x)
    search = Search(Sketch(torch.as_tensor(means) - sample.offset, sample, spread, spread), 50, settings)
    found = search.run()
    pairs, gains = search.merge_gains(found)
    assert len(gains) >= 4
    for pair, gain in zip(pairs.tolist(), gains.tolist(), strict=True):
        merged = search.merged(found, [tuple(pair)], gain)
        direct = merged.clusters.evidence() - len(merged) * math.log(40) / 2
        for counts in merged.counts.T:
            direct += float((torch.lgamma(counts + merged.alpha) - torch.lgamma(merged.alpha)).sum())
            direct -= float(torch.lgamma((counts + merged.alpha).sum()) - torch.lgamma(merged.alpha.sum()))
        # κ0 is chosen anew for the merged sums; nothing else may differ
        assert direct - found.bound == pytest.approx(gain, rel=0.05, abs=5)


def test_a_split_gains_what_merging_back_would_lose():
    rng = np.random.default_rng(0)
    x = torch.as_tensor(rng.normal(size=(300, 6)) + 4 * rng.normal(size=(5, 6))[np.arange(300) % 5])
    concept, weights = torch.arange(300) % 5, torch.ones(300, dtype=torch.float64)
    spread = x.T @ x / 300
    clusters = Clusters.of(x, weights, Grouping(concept, 5), spread)
    split = torch.tensor([0, 3])
    rows = torch.isin(concept, split).nonzero().squeeze(1)
    group = torch.searchsorted(split, concept[rows])
    gains = []
    for share in (0.3, 0.7):
        side = torch.as_tensor(rng.random(len(rows)) < share)
        halves = Clusters.of(x[rows], weights[rows], Grouping(2 * group + side, 4), spread)
        at_once = clusters.split_gains(split, halves)
        for p, k in enumerate(split.tolist()):
            apart = torch.where(concept == k, 5, concept)
            apart[rows[(group == p) & ~side]] = k
            divided = Clusters.of(x, weights, Grouping(apart, 6), spread)
            alone = -float(divided.merge_gains(torch.tensor([[k, 5]])))
            assert float(at_once[p]) == pytest.approx(alone, rel=1e-9)
            gains.append(round(alone, 3))
    assert len(set(gains)) == 4


def clusters_of(weight, first):
    first = torch.tensor(first, dtype=torch.float64)
    return Clusters(torch.tensor(weight).double(), first, torch.eye(first.shape[1], dtype=torch.float64))


def test_halves_share_what_their_sample_lacks_of_the_concept():
    whole = clusters_of([10.0, 9.0], [[1.0, 2.0], [-1.0, -2.0]])
    complete = clusters_of([4.0, 6.0], [[3.0, 0.0], [-2.0, 2.0]])
    lacking = clusters_of([4.0, 6.0], [[3.5, 0.5], [-1.25, 2.75]])
    one, other = (float(whole.split_gains(torch.tensor([0]), halves)) for halves in (complete, lacking))
    assert one == pytest.approx(other, rel=1e-9)


def test_halves_further_apart_than_all_patches_spread_are_no_split():
    whole = clusters_of([10.0], [[0.0, 0.0, 0.0]])
    halves = clusters_of([5.0, 5.0], [[15.0, 0, 0], [-15.0, 0, 0]])
    assert whole.split_gains(torch.tensor([0]), halves).tolist() == [-math.inf]
