"""Parts and kinds: the bounds rise, planted ones are found, and with one kind a part it is the paper's model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pace import PACE, Observations
from pace.model.concepts import Concepts, bound_of, update
from pace.model.gaussians import FAMILIES, Prior
from pace.model.learning import Memory, expect_all, explain_batch, infer_parts
from pace.model.merging import merged
from pace.model.nesting import Nest, add_kinds, infer_kinds
from pace.model.parting import nested_start
from pace.model.settings import Settings

EXACT = Settings(torch.device("cpu"), torch.float64)
GRID = (6, 6)
PARTS, KINDS, DIM = 3, 4, 12


def birds(images=60, seed=0, view=0, noise=0.3):
    """Observations of images with three parts in stripes, each of one of four kinds; and the true part and kind of patches.

    `view` draws another noise for the same images, and turns them upside down from 1 on.
    """
    truth, rng = np.random.default_rng(seed), np.random.default_rng((seed, view))
    parts = np.zeros((PARTS, DIM))
    parts[:, :PARTS] = 3 * np.eye(PARTS)
    kinds = np.zeros((PARTS, KINDS, DIM))
    kinds[..., PARTS : PARTS + 8] = np.random.default_rng(99).normal(scale=1.5, size=(PARTS, KINDS, 8))
    chosen = truth.integers(KINDS, size=(images, PARTS))
    rows = np.sort(truth.choice(PARTS, (images, GRID[0])), 1)
    if view:
        rows = rows[:, ::-1]
    part = np.repeat(rows, GRID[1], 1)
    kind = np.take_along_axis(chosen, part, 1)
    patches = parts[part] + kinds[part, kind] + noise * rng.normal(size=(*part.shape, DIM))
    label = chosen[:, 0]  # the kind of the first part decides
    crops = np.tile([0, 0, 1, 1], (images, 1)).astype(np.float32)
    predictions = 0.9 * np.eye(KINDS)[label] + 0.025
    seen = Observations(patches, np.ones(part.shape), predictions, grid=GRID, crops=crops if view else None)
    return seen, part, part * KINDS + kind


def begun(family, seen, n_concepts=PARTS * KINDS):
    alpha = torch.full((PARTS,), 0.1, dtype=torch.float64)
    concepts, covariance = nested_start(seen, None, PARTS, n_concepts, alpha, family, 2, EXACT, 0)
    return concepts, Prior(covariance, 5.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bound_of_the_parts_never_falls_over_epochs(family):
    seen, *_ = birds(24, noise=1.0)
    concepts, prior = begun(family, seen, 8)
    memory, bounds = Memory(1, len(seen), seen.n_tokens, concepts, EXACT), []
    for _ in range(8):
        statistics = expect_all(seen, None, concepts, EXACT, memory)
        bounds.append(bound_of(statistics, concepts, prior, len(seen)).embedding)
        concepts = update(concepts, statistics, prior, EXACT)
    assert np.diff(bounds).min() > -1e-8 * abs(bounds[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bound_of_the_kinds_never_falls_while_parts_stay(family):
    seen, *_ = birds(40, noise=1.0)
    concepts, prior = begun(family, seen, 8)
    parts, bounds = look(concepts, seen), []
    for _ in range(8):
        nest, gaussians = concepts.nest, concepts.gaussians
        found = infer_kinds(*parts, nest, gaussians)
        bounds.append(float(found.bound.sum()) + 0.5 * float(nest.kind_shares.log().sum()))
        sums = nest.empty_sums(gaussians)
        add_kinds(found, nest, gaussians, sums)
        after = gaussians.maximise(sums, nest.priors(prior)[1])
        learned = nest.maximise(sums, nest.priors(prior)[0])
        concepts = replace(concepts, gaussians=after, nest=replace(nest, kind_shares=learned.kind_shares))
    assert bounds[-1] > bounds[0]
    assert np.diff(bounds).min() > -1e-8 * abs(bounds[0])


def look(concepts, seen):
    """What the kinds of some images are told from: their parts, embeddings less the offset, and what patches count."""
    batch = seen.batch(slice(None), dtype=torch.float64)
    x = batch.embeddings - concepts.offset
    found, weights, _ = infer_parts(x, batch.attention, concepts, concepts.nest, EXACT)
    return found, x, weights.count


def test_with_one_kind_for_every_part_it_is_the_papers_model():
    seen, *_ = birds(10, noise=1.0)
    batch = seen.batch(slice(None), dtype=torch.float64)
    rng, k = np.random.default_rng(1), 5
    flat = FAMILIES["tied"].seed(torch.from_numpy(rng.normal(size=(k, DIM))), torch.eye(DIM, dtype=torch.float64), 0)
    whole, one = torch.eye(DIM, dtype=torch.float64), torch.ones(k, dtype=torch.float64)
    alpha, zero = torch.full((k,), 0.3, dtype=torch.float64), torch.zeros(DIM, dtype=torch.float64)
    heads = torch.zeros(k, KINDS, dtype=torch.float64), one
    plain = Concepts(flat, zero, alpha, *heads)
    nested = replace(plain, nest=Nest(torch.arange(k), flat, whole, whole, one, flat.means))
    # The model of parts sees patches beside their image, so the flat one is shown the same.
    share = batch.attention / batch.attention.sum(1, keepdim=True)
    beside = batch._replace(embeddings=batch.embeddings - torch.einsum("mj,mjd->md", share, batch.embeddings)[:, None])
    found, expected = explain_batch(batch, nested, EXACT), explain_batch(beside, plain, EXACT)
    np.testing.assert_allclose(found.gamma, expected.gamma, rtol=1e-9)
    np.testing.assert_allclose(found.phi, expected.phi, atol=1e-9)
    prior = Prior(torch.block_diag(whole, whole), 5.0)
    statistics = expect_all(seen, None, nested, EXACT)
    centred = Observations(beside.embeddings.numpy(), batch.attention.numpy(), batch.predictions.numpy(), grid=GRID)
    of_plain = expect_all(centred, None, plain, EXACT)
    bounds = (
        bound_of(statistics, nested, prior, len(seen)),
        bound_of(of_plain, plain, Prior(whole, 5.0), len(seen)),
    )
    np.testing.assert_allclose(*bounds, rtol=1e-9)
    means = update(nested, statistics, prior, EXACT).nest.parts.means
    np.testing.assert_allclose(means, update(plain, of_plain, Prior(whole, 5.0), EXACT).gaussians.means, atol=1e-9)


def test_phi_gamma_and_psi_are_the_rules_of_the_docstring_in_float64():
    from scipy.special import digamma, softmax
    from scipy.stats import multivariate_normal

    seen, *_ = birds(6, noise=1.0)
    concepts, _ = begun("tied", seen, 8)
    exact = replace(EXACT, sweep_tol=1e-13)
    nest, batch = concepts.nest, seen.batch(slice(None), dtype=torch.float64)
    x = batch.embeddings - concepts.offset
    found, weights, _ = infer_parts(x, batch.attention, concepts, nest, exact)
    psi = infer_kinds(found, x, weights.count, nest, concepts.gaussians).psi.numpy()
    phi, gamma, part_of = found.phi.numpy(), found.gamma.numpy(), nest.part_of.numpy()
    u = ((x - x.mean(1, keepdim=True)) @ nest.to_parts).numpy()
    of_parts, of_kinds = nest.parts.covariances().numpy(), concepts.gaussians.covariances().numpy()
    for m in range(len(seen)):
        field = digamma(gamma[m]) - digamma(gamma[m].sum())
        near = np.stack([multivariate_normal.logpdf(u[m], mean, of_parts) for mean in nest.parts.means.numpy()], 1)
        np.testing.assert_allclose(phi[m], softmax(near + field, 1), atol=1e-6)
        np.testing.assert_allclose(gamma[m], concepts.alpha.numpy() + phi[m].sum(0), rtol=1e-6)
        for part in range(PARTS):
            own = part_of == part
            v = np.average(x[m].numpy(), axis=0, weights=phi[m][:, part]) @ nest.to_kinds.numpy()
            said = [multivariate_normal.logpdf(v, mean, of_kinds) for mean in concepts.gaussians.means.numpy()[own]]
            expected = softmax(nest.kind_shares.log().numpy()[own] + said)
            np.testing.assert_allclose(psi[m][own], expected, atol=1e-6)


@pytest.fixture(scope="module")
def fitted():
    seen, part, concept = birds(120)
    perturbed = birds(120, view=1)[0]
    model = PACE(PARTS * KINDS, parts=PARTS, seed=0, device="cpu").fit(seen, perturbed=perturbed)
    return model, seen, perturbed, part, concept


def test_a_part_that_gets_little_attention_is_background(fitted, tmp_path):
    model, seen, perturbed, part, _ = fitted
    assert not model.background_.any()
    looked_at = [
        Observations(view.embeddings, np.where(truth == 1, 0.1, 1.0), view.predictions, grid=GRID, crops=view.crops)
        for view, truth in ((seen, part), (perturbed, birds(120, view=1)[1]))
    ]
    model = PACE(PARTS * KINDS, parts=PARTS, seed=0, device="cpu").fit(looked_at[0], perturbed=looked_at[1])
    maps = model.explain(looked_at[0]).by_part(model.explain(looked_at[0]).phi)
    (found,) = np.flatnonzero(model.background_)
    assert maps[part == 1, found].mean() > 0.9
    assert {name.part_long for name in model.names_ if name.part_given} == {"background C"}
    model.save(tmp_path / "m.safetensors")
    assert PACE.load(tmp_path / "m.safetensors").background_.tolist() == model.background_.tolist()


def agreement(found, truth):
    from sklearn.metrics import normalized_mutual_info_score

    return normalized_mutual_info_score(truth.ravel(), found.ravel())


def test_planted_parts_and_kinds_are_found(fitted):
    model, *_ = fitted
    fresh, part, concept = birds(80, seed=5)
    explanation = model.explain(fresh)
    assert model.n_parts_ == explanation.n_parts == PARTS
    assert agreement(np.stack([explanation.part_map(m) for m in range(80)]), part) > 0.95
    assert agreement(explanation.phi.argmax(2), concept) > 0.95
    shares = np.stack([(part == p).mean(1) for p in range(PARTS)], 1)
    np.testing.assert_allclose(np.sort(explanation.parts, 1), np.sort(shares, 1), atol=0.1)  # α takes some


def test_in_an_image_a_part_has_one_kind(fitted):
    model, seen, *_ = fitted
    explanation = model.explain(seen)
    leading = np.stack([explanation.kinds[:, model.part_of_ == part].max(1) for part in range(PARTS)], 1)
    assert np.average(leading, weights=explanation.parts) > 0.95


def test_refining_moves_kinds_and_leaves_parts_as_they_are(fitted):
    model, seen, perturbed, *_ = fitted
    plain = PACE(PARTS * KINDS, parts=PARTS, seed=0, device="cpu", refine=0).fit(seen, perturbed=perturbed)
    assert len(model.refinement_) == 600
    assert model.refinement_[-20:, 1].mean() > model.refinement_[:20, 1].mean()  # the prediction follows better
    assert np.abs(model.means_ - plain.means_).max() > 0
    np.testing.assert_array_equal(model.explain(seen).parts.round(6), plain.explain(seen).parts.round(6))


def test_of_two_blocks_the_first_tells_parts_and_the_second_kinds():
    columns = np.tile(np.repeat(np.arange(3), 2), GRID[0])  # of every picture, and much plainer than its parts

    def both(images, seed, view=0, blocks="3 and 5"):
        seen, part, concept = birds(images, seed, view)
        noise = 0.3 * np.random.default_rng((seed, view, 1)).normal(size=seen.embeddings.shape)
        shows_parts = np.arange(DIM) < PARTS
        first, second = (np.where(shows_parts == own, seen.embeddings, noise) for own in (True, False))
        second[..., :3] += 9 * np.eye(3)[columns]
        patches = np.concatenate([first, second], 2)
        told = {"crops": seen.crops, "origin": {"block": blocks}}
        return Observations(patches, seen.attention, seen.predictions, grid=GRID, **told), part, concept

    for blocks, found in (("3 and 5", True), ("3", False)):
        model = PACE(PARTS * KINDS, parts=PARTS, device="cpu").fit(
            both(120, 0, 0, blocks)[0], perturbed=both(120, 0, 1, blocks)[0]
        )
        fresh, part, concept = both(80, 5, 0, blocks)
        explanation = model.explain(fresh)
        parts = np.stack([explanation.part_map(m) for m in range(80)])
        assert (agreement(parts, part) > 0.95) == found
        assert (agreement(explanation.phi.argmax(2), concept) > 0.95) == found


def test_concepts_that_do_not_differ_between_images_are_no_kinds():
    rng = np.random.default_rng(0)
    means = 4 * rng.normal(size=(12, 8))
    patches = means[rng.integers(12, size=(60, 36))] + 0.5 * rng.normal(size=(60, 36, 8))
    model = PACE(12, device="cpu", max_iter=5).fit(Observations(patches, np.ones((60, 36)), grid=GRID))
    assert model.part_of_ is None
    assert model.n_parts_ == 12


def test_saved_and_loaded_it_explains_alike(fitted, tmp_path):
    model, seen, *_ = fitted
    model.save(tmp_path / "nested.safetensors")
    loaded = PACE.load(tmp_path / "nested.safetensors")
    np.testing.assert_array_equal(loaded.part_of_, model.part_of_)
    np.testing.assert_array_equal(loaded.explain(seen).theta, model.explain(seen).theta)


def test_an_interrupted_fit_resumes_to_the_same_bits(tmp_path, monkeypatch):
    seen, perturbed = birds(40, noise=1.0)[0], birds(40, view=1, noise=1.0)[0]
    options = {"parts": PARTS, "device": "cpu", "max_iter": 12, "refine": 10}
    whole = PACE(8, **options).fit(seen, perturbed=perturbed)
    from pace.fitting import loop

    epochs, real = [], loop.update

    def stop_at_five(*given):
        epochs.append(1)
        if len(epochs) == 5:
            raise RuntimeError("power cut")
        return real(*given)

    monkeypatch.setattr(loop, "update", stop_at_five)
    with pytest.raises(RuntimeError, match="power cut"):
        PACE(8, **options).fit(seen, perturbed=perturbed, checkpoint=tmp_path / "c", checkpoint_every=0)
    monkeypatch.setattr(loop, "update", real)
    resumed = PACE(8, **options).fit(seen, perturbed=perturbed, checkpoint=tmp_path / "c")
    np.testing.assert_array_equal(resumed.explain(seen).theta, whole.explain(seen).theta)
    np.testing.assert_array_equal(resumed.means_, whole.means_)


def test_minibatches_find_the_planted_parts_too():
    seen, part, _ = birds(120)
    model = PACE(PARTS * KINDS, parts=PARTS, minibatch=40, max_iter=6, device="cpu").fit(seen)
    assert agreement(model.explain(seen).by_part(model.explain(seen).phi).argmax(2), part) > 0.95


def test_batches_can_be_learned_one_after_another():
    seen, part, _ = birds(120)
    model = PACE(PARTS * KINDS, parts=PARTS, device="cpu")
    for start in range(0, 120, 40):
        model.partial_fit(seen[start : start + 40])
    explanation = model.explain(seen)
    assert agreement(explanation.by_part(explanation.phi).argmax(2), part) > 0.9


def test_intervals_hold_what_they_are_of(fitted):
    model, *_ = fitted
    explanation = model.explain(birds(100, seed=7)[0])
    for shares, (low, high) in (
        (explanation.parts, explanation.part_interval(0.9)),
        (explanation.theta, explanation.interval(0.9)),
    ):
        assert ((low <= shares) & (shares <= high)).all()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"updates": "paper", "parts": 2}, "exact"),
        ({"parts": 9}, "at most 8"),
        ({"parts": 2, "alpha": [1.0] * 8}, "alpha"),
    ],
)
def test_what_parts_cannot_be_is_said_in_one_line(wrong, why):
    with pytest.raises(ValueError, match=why):
        PACE(8, device="cpu", **wrong).fit(birds(5)[0])


def test_as_many_parts_as_concepts_are_flat_concepts():
    seen, *_ = birds(30)
    nested, flat = (PACE(6, parts=parts, device="cpu", max_iter=5).fit(seen) for parts in (6, None))
    np.testing.assert_array_equal(nested.explain(seen).theta, flat.explain(seen).theta)


def test_concepts_are_moved_with_all_they_are_made_of():
    concepts, _ = begun("tied", birds(12)[0], 8)
    there = Concepts.from_tensors("tied", concepts.to(torch.device("cpu"), torch.float32).tensors())
    assert there.nest.parts.means.dtype == torch.float32
    assert there.nest.kind_shares.dtype == torch.float64
    assert len(there) == 8


@pytest.mark.parametrize("block", [2, 4])
def test_ninety_percent_intervals_of_parts_cover_planted_shares(block):
    """Patches come in blocks of one part; images have some of every part, since it is told beside the others; kinds by lot."""

    def drawn(images, seed, view=0):
        rng = np.random.default_rng(seed)
        shares, cells = rng.dirichlet(np.full(3, 4.0), images), 12 // block
        part = np.stack([rng.choice(3, (cells, cells), p=theta) for theta in shares])
        part = part.repeat(block, 1).repeat(block, 2).reshape(images, -1)
        kinds = np.random.default_rng(99).normal(scale=1.5, size=(3, 4, 8))
        kind = np.take_along_axis(rng.integers(4, size=(images, 3)), part, 1)
        noise = 0.3 * np.random.default_rng((seed, view)).normal(size=(*part.shape, 11))
        patches = np.concatenate([3 * np.eye(3)[part], kinds[part, kind]], 2) + noise
        crops = np.tile([0, 0, 1, 1], (images, 1)) if view else None
        return Observations(patches, np.ones(part.shape), grid=(12, 12), crops=crops), shares, part

    model = PACE(12, parts=3, device="cpu").fit(drawn(200, 0)[0], perturbed=drawn(200, 0, view=1)[0])
    fresh, shares, part = drawn(300, 5)
    explanation = model.explain(fresh)
    leading = explanation.by_part(explanation.phi).argmax(2)
    found = [np.bincount(leading[part == p]).argmax() for p in range(3)]  # which part each of the true ones is
    assert (np.take(found, part) == leading).mean() > 0.99  # intervals cannot know of parts that were not found
    low, high = (ends[:, found] for ends in explanation.part_interval(0.9))
    assert 0.85 <= ((low <= shares) & (shares <= high)).mean() <= 0.95


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_kinds_are_one_kind_with_both_shares_and_parts_stay_what_they_are(family):
    seen, *_ = birds(40)
    concepts, prior = begun(family, seen)
    for _ in range(3):
        concepts = update(concepts, expect_all(seen, None, concepts, EXACT), prior, EXACT)
    one, other = torch.nonzero(concepts.nest.part_of == 1).squeeze(1)[:2].tolist()
    held = torch.arange(1.0, len(concepts) + 1, dtype=torch.float64)
    after = merged(concepts, (one, other), held)
    batch = seen.batch(np.arange(10), EXACT.device, EXACT.dtype)
    before, now = explain_batch(batch, concepts, EXACT), explain_batch(batch, after, EXACT)
    torch.testing.assert_close(concepts.nest.of_parts(now.phi), concepts.nest.of_parts(before.phi))
    assert float(now.gamma[:, other].max()) < 1e-12
    elsewhere = concepts.nest.part_of != 1
    torch.testing.assert_close(now.gamma[:, elsewhere], before.gamma[:, elsewhere])
    expected = (held[one] * concepts.means[one] + held[other] * concepts.means[other]) / (held[one] + held[other])
    torch.testing.assert_close(after.means[one], expected)
    torch.testing.assert_close(
        after.nest.of_parts(after.nest.kind_shares), concepts.nest.of_parts(concepts.nest.kind_shares)
    )
