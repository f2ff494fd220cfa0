"""Refining: faithfulness and stability reach the kinds of parts; flat concepts stay as EM leaves them."""

import numpy as np
import pytest
import torch
from fits import drawn, fit

import pace.fitting.loop
from pace import PACE, Observations
from pace.fitting.arguments import plan_of, settings_of
from pace.model.refining_kinds import folded

SMALL = drawn()


def test_the_refined_metric_folds_back_into_means_and_a_covariance():
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(5, 5, generator=generator, dtype=torch.float64) + 3 * torch.eye(5, dtype=torch.float64)
    means = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    patches = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    direct = torch.cdist(patches @ factor, means).square()
    torch.testing.assert_close(folded(factor, means).mahalanobis(patches), direct)


@pytest.mark.parametrize("kind", ["parts and kinds", "many images"])
def test_em_learns_from_the_images_as_they_are_and_the_heads_from_their_views_too(kind):
    paired, alone = fit(kind), fit(kind, paired=False)
    flat = kind == "many images"
    if flat:  # without views of the places parts would be others
        assert paired.lower_bounds_ == alone.lower_bounds_
        np.testing.assert_array_equal(paired.means_, alone.means_)
    assert not np.array(paired.lower_bounds_)[:, 2].any()
    views = [float(model._statistics.views / model._statistics.images) for model in (paired, alone)]
    assert views == [2, 1]
    assert len(paired.refinement_) == (0 if flat else 3)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"refine": 1, "parts": None}, "refine: only kinds of parts are refined; leave it out, or parts=None"),
        ({"refine": 1, "updates": "paper"}, "refine: needs covariance='tied' and updates='exact'"),
        ({"refine": 1}, "refine: needs predictions or perturbed views"),
    ],
)
def test_refining_says_what_it_needs(parameters, message):
    seen = SMALL.observations
    with pytest.raises(ValueError, match=message):
        PACE(3, device="cpu", **parameters).fit(Observations(seen.embeddings, seen.attention, prefix_tokens=1))


@pytest.mark.parametrize(
    ("images", "options", "pairs", "steps", "as_they_are"),
    [
        (1000, {}, True, 600, True),
        (999, {}, True, 600, False),
        (99, {}, True, 0, False),
        (1000, {}, False, 0, False),
        (1000, {"covariance": "diag"}, True, 0, False),
        (1000, {"updates": "paper"}, True, 0, False),
        (1000, {"minibatch": 100}, True, 600, False),
        (20, {"refine": 7}, True, 7, False),
        (1000, {"refine": 0}, True, 0, True),
    ],
)
def test_by_default_kinds_are_refined_where_there_is_enough_to_go_by(images, options, pairs, steps, as_they_are):
    view = Observations(np.ones((images, 2, 3), np.float32), np.ones((images, 2)), np.full((images, 2), 0.5))
    model = PACE(4, device="cpu", **options)
    found = plan_of(model, view, view if pairs else None, settings_of(model, view))
    assert (found.refining_steps, found.as_they_are) == (steps, as_they_are)


def test_what_was_refined_is_not_lost_to_ctrl_c_in_the_last_pass(monkeypatch):
    kept, real = [], pace.fitting.loop.refine_kinds

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    def refined_then_interrupted(*arguments):
        kept.append(real(*arguments))
        monkeypatch.setattr(pace.fitting.loop, "expect", interrupted)
        return kept[0]

    monkeypatch.setattr(pace.fitting.loop, "refine_kinds", refined_then_interrupted)
    with pytest.warns(match="interrupted after 2 epochs"):
        model = fit("parts and kinds")
    concepts, history = kept[0]
    assert model._concepts is concepts
    np.testing.assert_array_equal(model.refinement_, history)
