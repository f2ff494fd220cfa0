"""The number of concepts: found in planted mixtures from any start, by a bound that is what it says."""

import math

import numpy as np
import pytest
import torch

from pace import PACE, Observations
from pace.fitting.parameters import prior_strength_of, settings_of
from pace.model.selecting import Selection, first_guess, select
from pace.model.selecting.evidence import OwnCovariances, OwnVariances, SharedCovariance
from pace.model.selecting.grouping import Grouping
from pace.model.selecting.sampling import Sample
from pace.model.selecting.search import Search


def plant(seed, number, dim=12, images=150, tokens=25, distance=9.0, covariance="tied"):
    """Images with Dirichlet mixtures of Gaussian patches; the largest concept is 20 times the smallest."""
    rng = np.random.default_rng([seed, number])
    sizes = np.geomspace(1, 20, number)
    means = rng.normal(size=(number, dim)) * distance / np.sqrt(2 * dim)
    theta = rng.dirichlet(max(2.0, number / 3) * sizes / sizes.sum(), images)
    concept = np.stack([rng.choice(number, tokens, p=mixture) for mixture in theta])
    patches = rng.normal(size=(images, tokens, dim))
    if covariance != "tied":
        spread = np.exp(0.4 * rng.normal(size=(number, dim)))
        for k in range(number):
            turn = np.linalg.qr(rng.normal(size=(dim, dim)))[0] if covariance == "full" else np.eye(dim)
            patches[concept == k] = patches[concept == k] * spread[k] @ turn
    return Observations((means[concept] + patches).astype(np.float32), np.ones((images, tokens), np.float32)), means


def find(observations, covariance="tied", **options):
    model = PACE(covariance=covariance, device="cpu")
    settings = settings_of(model, observations)
    strength = prior_strength_of(model, observations, settings)
    return select(observations, settings, covariance=covariance, strength=strength, **options)


@pytest.mark.parametrize(("number", "start"), [(1, 30), (3, 10), (3, 150), (8, 2), (8, 100), (15, 5), (15, 150)])
def test_the_planted_number_is_found_from_few_cells_and_from_many(number, start):
    observations, means = plant(number, number)
    found = find(observations, start=start)
    assert found.n_concepts == number
    # every planted mean is near one of those that were found
    assert np.linalg.norm(means[:, None] - found.means.numpy(), axis=2).min(1).max() < 2.0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_images_with_a_shift_of_their_own_are_no_concepts_however_many_are_allowed(seed):
    """The sketch takes more cells the more are allowed, and patches are worth the same all the same."""
    observations, _ = plant(seed, 6, dim=16, images=200)
    rng = np.random.default_rng(seed)
    shift = 2.5 * rng.normal(size=(200, 1, 2)) @ np.linalg.qr(rng.normal(size=(16, 2)))[0].T
    shifted = Observations(observations.embeddings + shift.astype(np.float32), observations.attention)
    found = [find(shifted, most=most).n_concepts for most in (20, 60, 300)]
    assert max(found) - min(found) <= 1
    assert 4 <= min(found) <= max(found) <= 10


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("number", "dim", "dtype"), [(3, 8, "float32"), (6, 32, "float32"), (6, 32, "float64")])
def test_patches_that_are_exactly_the_same_are_one_concept(number, dim, dtype, seed):
    """As padding and plain backgrounds are: nothing varies, and rounding must not be taken for what does."""
    rng = np.random.default_rng(seed)
    patches = rng.normal(size=(number, dim))[rng.integers(number, size=(60, 10))].astype(dtype)
    observations = Observations(patches, np.ones((60, 10), dtype))
    found = select(observations, settings_of(PACE(device="cpu", dtype=dtype), observations))
    assert 1 <= found.n_concepts <= number
    assert 1 <= found.worth <= 10.001


def test_patches_without_attention_make_no_concepts():
    """Hardly any patch has attention: three in thirty thousand here."""
    patches = np.random.default_rng(0).normal(size=(3, 10000, 2)).astype(np.float32)
    attention = np.zeros((3, 10000), np.float32)
    attention[:, 0] = 1
    assert find(Observations(patches, attention)).n_concepts <= 3


def test_too_few_patches_for_covariances_of_their_own_say_so():
    patches = np.random.default_rng(0).normal(size=(10, 10, 200)).astype(np.float32)
    with pytest.raises(ValueError, match=r"100 patches of 200 dimensions .* set n_concepts by hand"):
        find(Observations(patches, np.ones((10, 10), np.float32)), covariance="full")


def blended(seed):
    """Few images of clouds that run into each other, shifted from image to image."""
    rng = np.random.default_rng(seed)
    images, tokens, dim, number = (int(rng.integers(*ends)) for ends in ((5, 60), (5, 40), (2, 20), (2, 15)))
    centres = rng.uniform(0.7, 3) * rng.normal(size=(number, dim))
    concept = np.stack([rng.choice(number, tokens, p=theta) for theta in rng.dirichlet(np.full(number, 0.4), images)])
    patches = centres[concept] + rng.normal(size=(images, tokens, dim))
    patches += rng.uniform(0, 1.5) * rng.normal(size=(images, 1, dim))
    return Observations(patches.astype(np.float32), np.ones((images, tokens), np.float32))


@pytest.mark.parametrize("seed", [38, 74])
def test_no_number_on_the_curve_has_a_better_bound_than_the_one_that_is_found(seed):
    """Also where two merges in a row gain and neither alone does, as with these."""
    found = find(blended(seed), seed=seed)
    assert found.numbers[found.bounds.argmax()] == found.n_concepts


@pytest.mark.parametrize("copies", [1, 12])
def test_copies_of_an_image_are_looked_at_once(copies):
    observations, _ = plant(3, 4, images=40)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(40), copies))
    found = find(observations[order])
    assert found.images == 40
    assert found.n_concepts == 4


def test_a_few_images_many_times_over_are_as_good_as_once():
    observations, _ = plant(0, 4, dim=16, images=5, tokens=20)
    many = observations[np.tile(np.arange(5), 20)]
    assert find(many).images == 5
    assert len(PACE("auto", device="cpu").fit(many).means_) <= 10


def test_a_few_wide_directions_that_tell_nothing_hide_no_concepts():
    observations, _ = plant(0, 8)
    noise = 30 * np.random.default_rng(0).normal(size=(*observations.shape[:2], 3)).astype(np.float32)
    wide = Observations(np.concatenate([observations.embeddings, noise], 2), observations.attention)
    assert find(wide).n_concepts == 8
    assert len(first_guess(wide, settings_of(PACE(device="cpu"), wide), 12)) >= 6


def test_splits_with_one_covariance_gain_all_at_once_what_merges_back_would_lose():
    rng = np.random.default_rng(0)
    x = torch.as_tensor(rng.normal(size=(300, 6)) + 4 * rng.normal(size=(5, 6))[np.arange(300) % 5])
    concept, weights = torch.arange(300) % 5, torch.ones(300, dtype=torch.float64)
    evidence = SharedCovariance(x.T @ x / 300, 0.25, torch.eye(6, dtype=torch.float64))
    sums = evidence.held(x, Grouping(concept, 5), weights, None)
    split = torch.tensor([0, 3])
    rows = torch.isin(concept, split).nonzero().squeeze(1)
    group = torch.searchsorted(split, concept[rows])
    gains = []
    for share in (0.3, 0.7):
        side = torch.as_tensor(rng.random(len(rows)) < share)
        parts = evidence.held(x[rows], Grouping(2 * group + side, 4), weights[rows], None)
        fast = evidence.split_gains(sums, split, parts)
        for p, k in enumerate(split.tolist()):
            two = {name: parts[name][2 * p : 2 * p + 2] for name in evidence.by_concept}
            slow = -evidence.merge_gains(evidence.divided(sums, split[p : p + 1], two), torch.tensor([[k, 5]]))
            assert float(fast[p]) == pytest.approx(float(slow), rel=1e-9)
            gains.append(round(float(slow), 3))
    assert len(set(gains)) == 4


def test_what_halves_of_some_patches_lack_of_their_concept_both_have_a_share_in():
    evidence = SharedCovariance(torch.eye(2, dtype=torch.float64), 0.1, torch.eye(2, dtype=torch.float64))
    sums = evidence.blurred({"weight": torch.tensor([10.0, 9.0]), "first": torch.tensor([[1.0, 2.0], [-1.0, -2.0]])})
    sums = {name: rows.double() for name, rows in sums.items()}
    first = torch.tensor([[3.0, 0.0], [-2.0, 2.0]], dtype=torch.float64)
    whole, some = (
        {"weight": torch.tensor([4.0, 6.0]).double(), "first": f}
        for f in (first, first + torch.tensor([[0.5], [0.75]]))
    )
    one, other = (float(evidence.split_gains(sums, torch.tensor([0]), parts)) for parts in (whole, some))
    assert one == pytest.approx(other, rel=1e-9)


def test_halves_further_apart_than_all_patches_spread_are_no_split():
    evidence = SharedCovariance(torch.eye(3, dtype=torch.float64), 0.0, torch.eye(3, dtype=torch.float64))
    whole = {"weight": torch.tensor([10.0]), "first": torch.zeros(1, 3)}
    apart = {"weight": torch.tensor([5.0, 5.0]), "first": torch.tensor([[15.0, 0, 0], [-15.0, 0, 0]])}
    sums, parts = ({name: t.double() for name, t in part.items()} for part in (whole, apart))
    assert evidence.split_gains(evidence.blurred(sums), torch.tensor([0]), parts).tolist() == [-math.inf]


@pytest.mark.parametrize("covariance", ["full", "diag"])
@pytest.mark.parametrize("seed", [0, 1])
def test_concepts_with_covariances_of_their_own_are_counted_as_such(covariance, seed):
    observations, _ = plant(seed, 6, dim=8, distance=12.0, covariance=covariance)
    assert find(observations, covariance, start=60, seed=seed).n_concepts == 6


def test_low_rank_concepts_are_counted_with_one_covariance():
    observations, _ = plant(0, 5)
    low_rank, tied = (find(observations, family) for family in ("low_rank", "tied"))
    np.testing.assert_allclose(low_rank.means, tied.means, rtol=1e-4, atol=1e-4)


def test_the_bound_rises_with_every_move_and_the_best_number_is_the_one_found():
    found = find(plant(3, 12)[0], start=3)
    bounds = [move.bound for move in found.moves]
    assert found.moves[0].kind == "start"
    assert (np.diff(bounds) > 0).all()
    assert found.moves[-1].number == found.n_concepts
    best = int(found.bounds.argmax())
    assert int(found.numbers[best]) == found.n_concepts
    assert float(found.bounds[best]) == bounds[-1]
    assert set(range(1, found.n_concepts + 1)) <= set(found.numbers.tolist())
    assert max(found.numbers) > found.n_concepts  # more were tried, and rejected
    assert float(found.posterior.sum()) == pytest.approx(1)
    assert (np.diff(found.evidence.numpy()) <= 0).all()
    assert found.evidence.min() > 0  # what the best merge would lose


def test_a_start_from_one_concept_has_to_split():
    observations, _ = plant(5, 4)
    found = find(observations, start=1)
    search, _ = searching(observations)
    everything = search.run(torch.zeros(1, observations.dim, dtype=torch.float64))
    assert [move.kind for move in search.moves][:2] == ["start", "split"]
    assert len(everything) == found.n_concepts == 4


def test_what_lies_within_the_blur_is_one_concept_and_without_it_two():
    rng = np.random.default_rng(0)
    side = rng.integers(2, size=(120, 25))
    far = rng.integers(2, size=(120, 25))
    patches = 0.1 * rng.normal(size=(120, 25, 6))
    patches[:, :, 0] += 30 * far
    patches[:, :, 1] += side
    observations = Observations(patches.astype(np.float32), np.ones((120, 25), np.float32))
    assert find(observations, blur=0.0).n_concepts == 4
    assert find(observations, blur=0.5).n_concepts <= 2


@pytest.mark.parametrize("number", [3, 8])
def test_what_all_patches_of_an_image_share_makes_no_concept(number):
    observations, _ = plant(1, number, distance=12.0)
    light = np.random.default_rng(10).normal(size=(150, 1, 12)).astype(np.float32)
    found = find(Observations(observations.embeddings + light, observations.attention), seed=1)
    assert found.n_concepts == number
    assert found.worth < 10 < find(observations).worth <= 25


def test_there_are_never_more_than_the_most_that_is_allowed():
    observations, _ = plant(8, 8)
    for start in (2, 100):
        assert find(observations, start=start, most=5).n_concepts == 5


def test_color_has_four_colours_and_black():
    pytest.importorskip("timm")
    from pace import Backbone
    from pace.backbones.color_vit import LAYER, SIZE, load_model
    from pace.images import Color

    backbone = Backbone(load_model(), layer=LAYER)
    images = Color("train", n_per_class=60, size=SIZE, seed=1)
    assert find(backbone.observe(images, progress=False)).n_concepts == 5


def test_patches_count_by_their_attention():
    observations, _ = plant(2, 4, tokens=24)
    other = plant(9, 4, tokens=24)[0].embeddings  # concepts that nothing looks at
    embeddings = np.concatenate([observations.embeddings, other], 1)
    attention = np.concatenate([np.ones((150, 24)), np.zeros((150, 24))], 1).astype(np.float32)
    assert find(Observations(embeddings, attention)).n_concepts == 4


def test_the_same_seed_gives_the_same_concepts():
    observations, _ = plant(4, 6)
    one, two = find(observations, seed=3), find(observations, seed=3)
    assert torch.equal(one.means, two.means)
    assert one.moves == two.moves


def test_moving_the_embeddings_moves_the_concepts_and_nothing_else():
    observations, _ = plant(4, 6)
    moved = Observations(observations.embeddings * 4 + 8, observations.attention)
    one, two = find(observations), find(moved)
    assert two.n_concepts == one.n_concepts
    np.testing.assert_allclose(two.means, one.means * 4 + 8, rtol=1e-3, atol=1e-3)


def test_constant_embeddings_are_one_concept():
    observations = Observations(np.ones((6, 9, 4), np.float32), np.ones((6, 9), np.float32))
    assert find(observations).n_concepts == 1


def test_a_selection_survives_a_file_and_says_what_it_found(tmp_path):
    from safetensors.torch import load_file, save_file

    found = find(plant(1, 4)[0])
    save_file(found.tensors(), tmp_path / "selection.safetensors")
    again = Selection.from_tensors(load_file(tmp_path / "selection.safetensors"))
    assert again.moves == found.moves
    assert torch.equal(again.means, found.means)
    assert str(again) == str(found)
    assert str(found).startswith("4 concepts, from 150 images")
    assert again.worth == found.worth
    older = {name: tensor for name, tensor in found.tensors().items() if name != "worth"}
    assert math.isnan(Selection.from_tensors(older).worth)


def test_bad_arguments_are_refused():
    observations, _ = plant(1, 2, images=4)
    with pytest.raises(ValueError, match="updates='exact'"):
        select(observations, settings_of(PACE(updates="paper"), observations))
    with pytest.raises(ValueError, match="start=0"):
        find(observations, start=0)
    with pytest.raises(ValueError, match="found start=100, most=300, blur=1"):
        find(observations, blur=1.0)


def searching(observations, kind=SharedCovariance, family="tied"):
    settings = settings_of(PACE(device="cpu", dtype="float64"), observations)
    sample = Sample.draw(observations, settings, np.random.default_rng(0))
    spread = sample.x.T @ sample.x / len(sample.x)
    return Search(sample, kind(spread, 0.1, spread), family, 1.0, 50, settings, lambda move: None), sample


@pytest.mark.parametrize(
    ("kind", "family"), [(SharedCovariance, "tied"), (OwnCovariances, "full"), (OwnVariances, "diag")]
)
def test_what_a_merge_gains_is_what_the_bound_of_the_merged_partition_has_more(kind, family):
    """From sums, with the same α and prior: the two ways to the merged bound agree but for what they round or hold fixed."""
    observations, means = plant(0, 5, dim=6, images=40)
    search, sample = searching(observations, kind, family)
    found = search.run(torch.as_tensor(means) - sample.offset)
    pairs, gains = search.merge_gains(found)
    for pair, gain in zip(pairs.tolist(), gains.tolist(), strict=True):
        merged = search.merged(found, [tuple(pair)], gain)
        direct = search._evidence.total(merged.sums) - len(merged) * math.log(40) / 2
        for counts in merged.counts.T:
            direct += float((torch.lgamma(counts + merged.alpha) - torch.lgamma(merged.alpha)).sum())
            direct -= float(torch.lgamma((counts + merged.alpha).sum()) - torch.lgamma(merged.alpha.sum()))
        # κ0 and s are chosen anew for the merged sums; nothing else may differ
        assert direct - found.bound == pytest.approx(gain, rel=0.05, abs=5)


def test_evidence_with_own_covariances_is_the_normal_inverse_wishart_marginal():
    """One dimension, by numerical integration over μ and σ²."""
    x = torch.tensor([0.3, -0.4, 1.1, 0.8], dtype=torch.float64)
    kappa, likeness, within = 0.5, 4.0, 0.7
    variance = torch.logspace(-3, 3, 1001, dtype=torch.float64)[:, None]
    mean = torch.linspace(-12, 12, 1001, dtype=torch.float64)
    log_likelihood = -(len(x) * torch.log(2 * math.pi * variance) / 2)
    log_likelihood = log_likelihood - (x[:, None, None] - mean).square().sum(0) / (2 * variance)
    log_prior = torch.log(kappa / (2 * math.pi * variance)) / 2 - kappa * mean.square() / (2 * variance)
    shape, scale = (2 + likeness) / 2, likeness * within / 2
    log_prior = (
        log_prior + shape * math.log(scale) - math.lgamma(shape) - (shape + 1) * variance.log() - scale / variance
    )
    inner = torch.trapezoid((log_likelihood + log_prior).exp(), mean, dim=1)
    expected = math.log(torch.trapezoid(inner, variance[:, 0]))
    identity = torch.ones(1, 1, dtype=torch.float64)
    n, first, second = torch.tensor([4.0], dtype=torch.float64), x.sum()[None, None], x.square().sum()
    full = OwnCovariances(identity, 0.0, within * identity)
    diag = OwnVariances(identity, 0.0, within * identity)
    sums = {"weight": n, "first": first}
    assert float(full._each(sums | {"second": second[None, None, None]}, kappa, likeness)) == pytest.approx(
        expected, abs=1e-3
    )
    assert float(diag._each(sums | {"second": second[None, None]}, kappa, likeness)) == pytest.approx(
        expected, abs=1e-3
    )
