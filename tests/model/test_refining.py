"""Refining: faithfulness and stability reach the concepts themselves."""

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations
from pace.fitting.distributed import Team
from pace.fitting.parameters import refinement_of, settings_of
from pace.model import refining
from pace.model.feeding import Chunk
from pace.model.refining import Refinement, _climb, _folded, _look, _unsteadiness, images_in_step

D, TOKENS, CLASSES = 12, 16, 3


def images(n: int, seed: int) -> tuple[Observations, Observations]:
    """Two views of images: the loudest directions change with the view and say nothing, a quiet one holds the class."""
    label = np.arange(n) % CLASSES

    def view(number: int) -> Observations:
        rng = np.random.default_rng([seed, number])
        patches = 0.3 * rng.normal(size=(n, TOKENS, D))
        patches[:, :, :2] += rng.normal(size=(n, 1, 2))
        patches[:, :, 2] += 0.3 * (label - 1)[:, None]
        patches[:, : TOKENS // 2, 3] += 2.0  # two kinds of patches, in every image
        return Observations(patches.astype(np.float32), np.ones((n, TOKENS)), np.eye(CLASSES)[label], grid=(4, 4))

    return view(0), view(1)


TRAIN, TRAIN_PERTURBED = images(192, 0)
TEST, TEST_PERTURBED = images(60, 1)


def fitted(**parameters) -> PACE:
    chosen = {"n_concepts": 6, "covariance": "tied", "alpha": "learn", "max_iter": 20, "tol": 1e-3, "device": "cpu"}
    return PACE(**(chosen | parameters)).fit(TRAIN, perturbed=TRAIN_PERTURBED)


def faithful(model: PACE) -> float:
    """Share of test images whose prediction a nearest class mean in θ gives."""
    theta, test = model.transform(TRAIN), model.transform(TEST)
    centres = np.stack([theta[TRAIN.predictions.argmax(1) == c].mean(0) for c in range(CLASSES)])
    found = ((test[:, None] - centres) ** 2).sum(2).argmin(1)
    return float((found == TEST.predictions.argmax(1)).mean())


def moved(model: PACE) -> float:
    return float(np.abs(model.transform(TEST) - model.transform(TEST_PERTURBED)).sum(1).mean())


@pytest.fixture(scope="module")
def plain() -> PACE:
    return fitted()


@pytest.fixture(scope="module")
def refined() -> PACE:
    return fitted(refine=300, faithfulness_weight=1.0, stability_weight=1.0)


def test_concepts_that_served_the_loudest_directions_come_to_serve_the_prediction(plain, refined):
    assert faithful(plain) < 0.75
    assert faithful(refined) > 0.9


def test_a_perturbed_view_keeps_more_of_its_concepts(plain, refined):
    assert moved(refined) < 0.5 * moved(plain)


def test_the_weighted_sum_of_the_terms_rises(refined):
    sums = refined.refinement_.sum(1)
    assert len(sums) == 300
    stretches = sums.reshape(4, 75).mean(1)
    assert (np.diff(stretches) > 0).all()


def test_the_embeddings_alone_hold_the_concepts_where_em_left_them(plain):
    still = fitted(refine=50, faithfulness_weight=0.0, stability_weight=0.0)
    terms = still.refinement_[:, 0]
    assert terms[-10:].mean() >= terms[:10].mean() - 0.01
    assert abs(moved(still) - moved(plain)) < 0.2


def test_one_concept_for_all_images_is_not_steady():
    """Its distance to a perturbed view is least, but other images are no further."""
    apart, alike = torch.eye(4, dtype=torch.float64), torch.full((4, 4), 0.25, dtype=torch.float64)
    near = 0.9 * apart + 0.1 * alike
    assert float(_unsteadiness(apart, near)) == pytest.approx(0.15 / 1.95)
    nudge = 1e-3 * torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(_unsteadiness(alike, alike + nudge)) == pytest.approx(1, abs=1e-9)
    assert float(_unsteadiness(alike, alike)) == 0  # and not 0 / 0


@pytest.mark.parametrize("at_once", [1, 7, 63, 64])
@pytest.mark.parametrize("pairs", [True, False])
def test_the_slope_of_a_step_is_that_of_the_whole_sum_however_it_is_divided(at_once, pairs):
    """Here to 1e-12 of its length, in float64."""
    draw = torch.Generator().manual_seed(0)
    means, metric, head = (
        torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((6, D), (D, D), (6, 3))
    )
    learned = [tensor.requires_grad_() for tensor in (means, 0.3 * metric, head)]
    alpha = torch.full((6,), 0.1, dtype=torch.float64)
    views = [TRAIN, TRAIN_PERTURBED] if pairs else [TRAIN]
    chosen, weights, looked = np.arange(0, 192, 3), Refinement(1, 0.7, 1.3), []
    halves = torch.stack([torch.arange(0, TOKENS, 2), torch.arange(1, TOKENS + 1, 2) % TOKENS])

    def look(some):
        looked.append(len(some))
        batches = [view.batch(some, "cpu", torch.float64) for view in views]
        return _look(
            batches, [batch.embeddings for batch in batches], halves, learned[1], learned[0], learned[2], alpha
        )

    whole = look(chosen)
    stability = -_unsteadiness(*whole.phi_bars) if pairs else torch.zeros((), dtype=torch.float64)
    total = whole.terms[0] + weights.faithfulness * whole.terms[1] + weights.stability * stability
    expected = torch.autograd.grad(total, learned)
    terms, log_theta, slopes = _climb(look, chosen, len(views), learned, weights, Chunk(at_once), Team())
    torch.testing.assert_close(terms, torch.stack([*whole.terms, stability]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_theta, whole.log_theta, rtol=1e-12, atol=1e-12)
    for slope, other in zip(slopes, expected, strict=True):
        assert float((slope - other).norm() / other.norm()) < 1e-12
    assert max(looked[1:]) == at_once
    assert len(looked) - 1 == (1 if at_once == 64 else 2 * -(-64 // at_once))  # what is seen whole is seen once


def test_an_image_whose_attention_is_on_one_patch_is_refined_like_any_other():
    """Half of its patches may then have none of it."""
    attention = np.ones((len(TRAIN), TOKENS))
    attention[::7] = np.arange(TOKENS) == 3
    views = [Observations(v.embeddings, attention, v.predictions, v.grid) for v in (TRAIN, TRAIN_PERTURBED)]
    model = PACE(6, refine=20, max_iter=2, tol=1.0, device="cpu").fit(views[0], perturbed=views[1])
    assert np.isfinite(model.refinement_).all()


def test_a_step_keeps_to_the_budget_of_memory(monkeypatch):
    looked = []

    def look(views, *rest):
        looked.append(len(views[0].attention))
        return _look(views, *rest)

    monkeypatch.setattr(refining, "_look", look)
    free = fitted(refine=4, max_iter=2)
    assert set(looked) == {64}
    looked.clear()
    tight = fitted(refine=4, max_iter=2, memory="300kB")
    half = settings_of(tight, TRAIN).working_memory(tight._concepts.gaussians) // 2
    image = 2 * TOKENS * 4 * (4 * D + 8 * 6)  # two views, float32, copies of embeddings and of φ (docs/refining.md)
    assert max(looked) == half // image == 11
    np.testing.assert_allclose(tight.means_, free.means_, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(tight.refinement_, free.refinement_, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", ["there", "back"])
def test_where_memory_runs_out_a_step_is_done_in_smaller_chunks(where, monkeypatch):
    expected, looked = fitted(refine=4, max_iter=2), []

    def short(*_):
        raise torch.OutOfMemoryError

    def look(views, *rest):
        looked.append(len(views[0].attention))
        seen = _look(views, *rest)
        if looked[-1] > 20 and where == "there":
            short()
        if looked[-1] > 20 and seen.terms.requires_grad:
            seen.terms.register_hook(short)
        return seen

    monkeypatch.setattr(refining, "_look", look)
    found = fitted(refine=4, max_iter=2)
    assert looked[0] == 64
    assert max(looked[3:]) == 16  # once it was too much, it is not tried again
    np.testing.assert_allclose(found.means_, expected.means_, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.refinement_, expected.refinement_, rtol=1e-5, atol=1e-5)


def test_perturbed_views_alone_can_be_refined_for_and_the_fit_resumed(tmp_path, monkeypatch):
    from pace.fitting.checkpoints import Checkpoint

    def fit(checkpoint):
        bare = [Observations(view.embeddings, view.attention) for view in (TRAIN, TRAIN_PERTURBED)]
        model = PACE(6, refine=3, max_iter=2, n_init=1, device="cpu")
        return model.fit(bare[0], perturbed=bare[1], checkpoint=checkpoint, checkpoint_every=0.0)

    def stopped(self, saved):
        write(self, saved)
        if "refining.step" in saved.common:
            raise SystemExit

    write, whole = Checkpoint.write, fit(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "write", stopped)
        with pytest.raises(SystemExit):
            fit(tmp_path / "stopped")
    np.testing.assert_array_equal(fit(tmp_path / "stopped").means_, whole.means_)


def test_em_before_it_learns_from_the_images_as_they_are(plain, refined):
    alone = PACE(**(plain.get_params() | {"refine": 0})).fit(TRAIN)
    assert refined.lower_bounds_ == alone.lower_bounds_
    # Perturbed views come in after it, for the heads as well.
    assert (refined.pair_weights_ != alone.pair_weights_).any()


def test_the_same_seed_gives_the_same_concepts():
    np.testing.assert_array_equal(fitted(refine=2).means_, fitted(refine=2).means_)


def test_the_refined_metric_folds_back_into_means_and_a_covariance():
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(5, 5, generator=generator, dtype=torch.float64) + 3 * torch.eye(5, dtype=torch.float64)
    means = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    patches = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    direct = torch.cdist(patches @ factor, means).square()
    torch.testing.assert_close(_folded(factor, means).mahalanobis(patches), direct)


def test_a_refined_model_survives_its_file(refined, tmp_path):
    refined.save(tmp_path / "concepts.safetensors")
    again = PACE.load(tmp_path / "concepts.safetensors", device="cpu")
    np.testing.assert_array_equal(again.refinement_, refined.refinement_)
    np.testing.assert_array_equal(again.transform(TEST), refined.transform(TEST))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"covariance": "diag"}, "tied"), ({"updates": "paper"}, "exact"), ({"refine": -1}, "at least 0")],
)
def test_refining_says_what_it_needs(parameters, message):
    with pytest.raises(ValueError, match=message):
        fitted(**({"refine": 1} | parameters))


def test_refining_needs_something_to_refine_for():
    bare = Observations(TRAIN.embeddings, TRAIN.attention)
    with pytest.raises(ValueError, match="predictions or perturbed"):
        PACE(3, covariance="tied", refine=1, device="cpu").fit(bare)


@pytest.mark.parametrize(
    ("images", "options", "pairs", "steps"),
    [
        (1000, {}, True, 1000),
        (999, {}, True, 0),
        (1000, {}, False, 0),
        (1000, {"covariance": "diag"}, True, 0),
        (1000, {"updates": "paper"}, True, 0),
        (1000, {"minibatch": 100}, True, 0),
        (20, {"refine": 7}, True, 7),
        (1000, {"refine": 0}, True, 0),
    ],
)
def test_by_default_concepts_are_refined_where_there_is_enough_to_go_by(images, options, pairs, steps):
    view = Observations(np.ones((images, 2, 3), np.float32), np.ones((images, 2)), np.full((images, 2), 0.5))
    found = refinement_of(PACE(4, **options), view, view if pairs else None)
    assert (0 if found is None else found.steps) == steps


@pytest.mark.parametrize(("loud", "steps"), [(0.0, 3), (9.0, 0)])
def test_by_default_concepts_that_say_the_prediction_already_are_left_as_they_are(loud, steps, monkeypatch):
    monkeypatch.setattr("pace.fitting.parameters._AUTO_IMAGES", 10)
    monkeypatch.setattr("pace.fitting.parameters._AUTO_STEPS", 3)
    label = np.arange(len(TRAIN)) % CLASSES

    def louder(view: Observations) -> Observations:
        patches = view.embeddings.copy()
        patches[:, :, 2] += loud * (label - 1)[:, None]
        return Observations(patches, view.attention, np.eye(CLASSES)[label], grid=(4, 4))

    model = PACE(6, prune=False, max_iter=5, device="cpu").fit(louder(TRAIN), perturbed=louder(TRAIN_PERTURBED))
    assert len(model.refinement_) == steps


@pytest.mark.parametrize("steps", ["some", -1, 1.5])
def test_other_words_and_numbers_of_steps_are_refused(steps):
    view = Observations(np.ones((4, 2, 3), np.float32), np.ones((4, 2)))
    with pytest.raises(ValueError, match="refine: expected a whole number of at least 0 or 'auto'"):
        PACE(2, refine=steps).fit(view)


def test_a_step_looks_at_a_share_of_the_images_within_limits():
    assert [images_in_step(n) for n in (10, 1000, 4800, 10**6)] == [64, 64, 150, 192]


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 11])
def test_any_number_of_steps_can_be_made(steps):
    assert len(fitted(refine=steps, max_iter=2).refinement_) == steps


def test_what_was_refined_is_not_lost_to_ctrl_c_in_the_last_pass(monkeypatch):
    import pace.fitting.loop

    kept, run = [], pace.fitting.loop.refine

    def refined_then_interrupted(*arguments):
        kept.append(run(*arguments))
        monkeypatch.setattr(pace.fitting.loop.Fitting, "_pass", interrupted)
        return kept[0]

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(pace.fitting.loop, "refine", refined_then_interrupted)
    with pytest.warns(ConvergenceWarning, match="interrupted"):
        model = fitted(refine=3, max_iter=2)
    np.testing.assert_allclose(
        model.means_, (kept[0][0].gaussians.means + kept[0][0].offset).numpy(), rtol=1e-5, atol=1e-6
    )
