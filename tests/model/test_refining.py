"""Refining: faithfulness and stability reach the concepts themselves."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

import pace.fitting.loop
from pace import PACE, Observations
from pace.fitting.arguments import plan_of, settings_of
from pace.fitting.distributed import Team
from pace.fitting.loop import Plan, run
from pace.fitting.start import find_start
from pace.model.feeding import Share
from pace.model.learning import explain_batch
from pace.model.objective import expected_log_theta
from pace.model.refining import (
    Refinement,
    _climb,
    _images_at_once,
    _look,
    _unsteadiness,
    folded,
    images_in_step,
    refine,
)
from pace.model.settings import Settings

D, TOKENS, CLASSES = 12, 16, 3
CPU = Settings(torch.device("cpu"))


def images(n: int, seed: int, loud: float = 0.3) -> tuple[Observations, Observations]:
    """Two views of images: the loudest directions change with the view and say nothing, a quiet one holds the class."""
    label = np.arange(n) % CLASSES

    def view(number: int) -> Observations:
        rng = np.random.default_rng([seed, number])
        patches = 0.3 * rng.normal(size=(n, TOKENS, D))
        patches[:, :, :2] += rng.normal(size=(n, 1, 2))
        patches[:, :, 2] += loud * (label - 1)[:, None]
        patches[:, : TOKENS // 2, 3] += 2.0  # two kinds of patches, in every image
        return Observations(patches.astype(np.float32), np.ones((n, TOKENS)), np.eye(CLASSES)[label], grid=(4, 4))

    return view(0), view(1)


TRAIN, TEST = images(192, 0), images(60, 1)


def fitted(views=TRAIN, perturbed=True, **parameters) -> PACE:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = PACE(6, **({"n_init": 1, "max_iter": 2, "device": "cpu"} | parameters))
        return model.fit(views[0], perturbed=views[1] if perturbed else None)


@pytest.fixture(scope="module")
def plain():
    """As EM leaves them."""
    return fitted(n_init=4, max_iter=15, refine=0, perturbed=False)._concepts


def refined(concepts, steps, faithfulness=1.0, stability=1.0, views=TRAIN):
    return refine(*views, concepts, CPU, Refinement(steps, faithfulness, stability), seed=0)


def theta(concepts, view):
    gamma = explain_batch(view.batch(slice(None), dtype=torch.float32), concepts, CPU, patches=False).gamma.numpy()
    return gamma / gamma.sum(1, keepdims=True)


def faithful(concepts) -> float:
    """Share of test images whose prediction a nearest class mean in θ gives."""
    train, test = theta(concepts, TRAIN[0]), theta(concepts, TEST[0])
    centres = np.stack([train[TRAIN[0].predictions.argmax(1) == c].mean(0) for c in range(CLASSES)])
    found = ((test[:, None] - centres) ** 2).sum(2).argmin(1)
    return float((found == TEST[0].predictions.argmax(1)).mean())


def moved(concepts) -> float:
    return float(np.abs(theta(concepts, TEST[0]) - theta(concepts, TEST[1])).sum(1).mean())


def test_concepts_come_to_serve_the_prediction_and_to_keep_still_in_a_perturbed_view(plain):
    """They served the loudest directions before."""
    concepts, terms = refined(plain, 240)
    assert faithful(plain) < 0.75
    assert faithful(concepts) > 0.9
    assert moved(concepts) < 0.65 * moved(plain)
    assert (np.diff(terms.sum(1).reshape(4, 60).mean(1)) > 0).all()


def test_the_embeddings_alone_hold_the_concepts_where_em_left_them(plain):
    still, terms = refined(plain, 40, faithfulness=0.0, stability=0.0)
    assert terms[-10:, 0].mean() >= terms[:10, 0].mean() - 0.01
    assert abs(moved(still) - moved(plain)) < 0.2


def test_one_concept_for_all_images_is_not_steady():
    """Its distance to a perturbed view is least, but other images are no further."""
    apart, alike = torch.eye(4, dtype=torch.float64), torch.full((4, 4), 0.25, dtype=torch.float64)
    near = 0.9 * apart + 0.1 * alike
    assert float(_unsteadiness(apart, near)) == pytest.approx(0.15 / 1.95)
    nudge = 1e-3 * torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(_unsteadiness(alike, alike + nudge)) == pytest.approx(1, abs=1e-9)
    assert float(_unsteadiness(alike, alike)) == 0  # and not 0 / 0


class Step:
    """One step over some images in float64."""

    halves = torch.stack([torch.arange(0, TOKENS, 2), torch.arange(1, TOKENS, 2)])
    alpha = torch.full((6,), 0.1, dtype=torch.float64)

    def __init__(self, pairs: bool):
        rng = np.random.default_rng(0)
        self.at = [torch.from_numpy(rng.normal(size=shape)) / 3 for shape in ((6, D), (D, D), (6, CLASSES))]
        attention, chosen = rng.dirichlet(np.ones(TOKENS), 32), slice(0, 192, 6)
        views = [Observations(v.embeddings[chosen], attention, v.predictions[chosen]) for v in TRAIN]
        self.views, self.looked = views if pairs else views[:1], []

    def climb(self, at_once=64, share=Share()):  # noqa: B008
        learned = [parameter.clone().requires_grad_() for parameter in self.at]
        means, metric, head = learned

        def look(some):
            self.looked.append(len(some))
            batches = [view.batch(some, "cpu", torch.float64) for view in self.views]
            return _look(batches, [batch.embeddings for batch in batches], self.halves, metric, means, head, self.alpha)

        return _climb(look, np.arange(32), len(self.views), learned, Refinement(1, 0.7, 1.3), at_once, share)

    def sweep(self, evidence, attention, counts, times):
        weights = attention.shape[1] * attention / attention.sum(1, keepdim=True)
        for _ in range(times):
            phi = (evidence + expected_log_theta(self.alpha + counts)[:, None]).softmax(2)
            counts = torch.einsum("mj,mjk->mk", weights, phi)
        return counts

    def written_out(self, means, metric, head, fixed=None):
        """The sum as the module's docstring has it, and what its slope holds fixed: γ before the last sweep, and φ̄ in L_e."""
        total, phi_bars, found = 0.0, [], []
        for number, (view, half) in enumerate(zip(self.views, self.halves, strict=False)):
            patches, attention, predictions = view.batch(slice(None), "cpu", torch.float64)
            evidence = -torch.cdist(patches @ metric, means).square() / 2
            some, its_attention = evidence[:, half], attention[:, half]
            if fixed is None:
                counts = self.sweep(evidence, attention, torch.full((32, 6), TOKENS / 6, dtype=torch.float64), 4)
                fewer = self.sweep(some, its_attention, counts / 2, 2)
                found.append((counts, fewer, self.sweep(evidence, attention, counts, 1) / TOKENS))
            counts, fewer, shares = found[number] if fixed is None else fixed[number]
            mixture = (evidence + shares.log()[:, None]).logsumexp(2)
            scores = (20 / TOKENS * self.sweep(evidence, attention, counts, 1) @ head).log_softmax(1)
            faithfulness = (predictions * scores).sum(1).mean()
            total += ((attention * mixture).sum(1).mean() / D + 0.7 * faithfulness) / len(self.views)
            phi_bars.append(self.sweep(some, its_attention, fewer, 1) / len(half))
        if len(phi_bars) == 2:
            one, two = phi_bars
            total -= 1.3 * (one - two).abs().sum() / (one - two.roll(1, 0)).abs().sum()
        return float(total), found


@pytest.mark.parametrize("pairs", [True, False])
def test_a_step_is_the_sum_written_out_and_its_slope_that_of_differences(pairs):
    step = Step(pairs)
    terms, _, slopes = step.climb()
    value, fixed = step.written_out(*step.at)
    assert float(terms @ torch.tensor([1, 0.7, 1.3], dtype=torch.float64)) == pytest.approx(value, rel=1e-6)
    for number, slope in enumerate(slopes):
        way = torch.randn(slope.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        ends = []
        for there in (1e-5, -1e-5):
            moved = [at + there * way if other == number else at for other, at in enumerate(step.at)]
            ends.append(step.written_out(*moved, fixed)[0])
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(float((slope * way).sum()), rel=1e-5)


def close(found, expected):
    for one, two in zip([*found[:2], *found[2]], [*expected[:2], *expected[2]], strict=True):
        assert float((one - two).norm()) <= 1e-12 * float(two.norm())


@pytest.mark.parametrize("pairs", [True, False])
def test_chunks_of_a_step_come_to_the_same_as_the_whole(pairs):
    whole, step = Step(pairs), Step(pairs)
    expected = whole.climb()
    assert whole.looked == [32]  # what is seen whole is seen once
    close(step.climb(at_once=7), expected)
    assert step.looked == 2 * [7, 7, 7, 7, 4]


def test_processes_with_a_share_each_come_to_the_same_as_one():
    meet, parts, expected = threading.Barrier(3, timeout=60), [None] * 3, Step(pairs=True).climb()

    def work(rank):
        def added(*mine):
            parts[rank] = mine
            meet.wait()
            total = [sum(each) for each in zip(*parts, strict=True)]
            meet.wait()
            return total

        return Step(pairs=True).climb(at_once=5, share=Share(rank, 3, added))

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(work, range(3)):
            close(found, expected)


def test_a_step_keeps_to_the_budget_of_memory(plain):
    settings = Settings(CPU.device, memory=300_000)
    image = 2 * TOKENS * 4 * (4 * D + 8 * 6)  # two views, float32, copies of embeddings and of φ
    expected = settings.working_memory(plain.gaussians) // 2 // image
    assert _images_at_once(list(TRAIN), plain.gaussians, settings) == expected == 11
    assert _images_at_once(list(TRAIN), plain.gaussians, CPU) == 64
    assert [images_in_step(n) for n in (10, 1000, 4800, 10**6)] == [64, 64, 150, 192]


@pytest.mark.parametrize("steps", [1, 2, 3, 11])
def test_any_number_of_steps_can_be_made_and_the_same_seed_gives_the_same_concepts(plain, steps):
    (one, terms), (two, _) = (refined(plain, steps) for _ in range(2))
    assert terms.shape == (steps, 3)
    assert torch.equal(one.gaussians.means, two.gaussians.means)


def test_images_without_predictions_or_with_attention_on_one_patch_can_be_refined_for(plain):
    """Half of an image's patches may then have no attention."""
    attention = np.ones((192, TOKENS))
    attention[::7] = np.arange(TOKENS) == 3
    views = [Observations(view.embeddings, attention) for view in TRAIN]
    concepts, terms = refined(plain, 5, views=views)
    assert np.isfinite(terms).all()
    assert not terms[:, 1].any()
    assert concepts.gaussians.means.isfinite().all()


def test_the_refined_metric_folds_back_into_means_and_a_covariance():
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(5, 5, generator=generator, dtype=torch.float64) + 3 * torch.eye(5, dtype=torch.float64)
    means = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    patches = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    direct = torch.cdist(patches @ factor, means).square()
    torch.testing.assert_close(folded(factor, means).mahalanobis(patches), direct)


def test_em_learns_from_the_images_as_they_are_and_a_refined_model_survives_its_file(tmp_path):
    model, alone = fitted(refine=3), fitted(refine=0, perturbed=False)
    assert model.lower_bounds_ == alone.lower_bounds_
    assert (model.pair_weights_ != alone.pair_weights_).any()  # perturbed views come in after it, for the heads as well
    model.save(tmp_path / "concepts.safetensors")
    again = PACE.load(tmp_path / "concepts.safetensors", device="cpu")
    np.testing.assert_array_equal(again.refinement_, model.refinement_)
    np.testing.assert_array_equal(again.transform(TEST[0]), model.transform(TEST[0]))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"refine": 1, "updates": "paper"}, "refine: needs covariance='tied' and updates='exact'"),
        ({"refine": 1}, "refine: needs predictions or perturbed views"),
        ({"refine": -1}, "refine: expected a whole number of at least 0 and at most 1000000 or 'auto'"),
        ({"refine": "some"}, "refine: expected a whole number of at least 0 and at most 1000000 or 'auto'"),
    ],
)
def test_refining_says_what_it_needs(parameters, message):
    with pytest.raises(ValueError, match=message):
        PACE(3, device="cpu", **parameters).fit(Observations(TRAIN[0].embeddings, TRAIN[0].attention))


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
    model = PACE(4, device="cpu", **options)
    found = plan_of(model, view, view if pairs else None, settings_of(model, view))
    assert (0 if found.refinement is None else found.refinement.steps) == steps
    assert found.refine_anyway == ("refine" in options)


@pytest.mark.parametrize(("loud", "anyway", "steps"), [(0.3, False, 3), (9.0, False, 0), (9.0, True, 3)])
def test_concepts_that_predict_already_are_left_as_they_are_unless_asked(loud, anyway, steps):
    views, model = images(192, 0, loud), PACE(6, n_init=1, device="cpu")
    plan = Plan("tied", 5, 1e-3, None, 0, Refinement(3), refine_anyway=anyway)
    start = lambda: find_start(model, views[0], None, CPU)  # noqa: E731
    course = run(*views, CPU, plan, Team(), None, start, lambda *progress: None)
    assert len(course.refinement) == steps
    assert course.finished


def test_what_was_refined_is_not_lost_to_ctrl_c_in_the_last_pass(monkeypatch):
    kept, real = [], pace.fitting.loop.refine

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    def refined_then_interrupted(*arguments):
        kept.append(real(*arguments))
        monkeypatch.setattr(pace.fitting.loop, "expect", interrupted)
        return kept[0]

    monkeypatch.setattr(pace.fitting.loop, "refine", refined_then_interrupted)
    model = fitted(refine=3)
    assert model.interrupted_
    concepts = kept[0][0]
    np.testing.assert_allclose(model.means_, (concepts.gaussians.means + concepts.offset).numpy(), rtol=1e-5, atol=1e-6)
