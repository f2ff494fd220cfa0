"""A merge gives the model with one concept less: the mixture stays the same, and inference does without the empty one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from planted import planted

from pace import PACE
from pace.model.concepts import Concepts
from pace.model.gaussians import FAMILIES
from pace.model.learning import explain_batch
from pace.model.merging import merged
from pace.model.settings import Settings

EXACT = Settings(torch.device("cpu"), torch.float64, max_sweeps=1000, sweep_tol=1e-9)
DATA = planted(k=5, d=6, images=40)


def fitted(family, **options):
    learner = PACE(
        5, covariance=family, parts=None, max_iter=6, n_init=1, dtype="float64", device="cpu", progress=False
    )
    with pytest.warns(UserWarning, match="bound still rises"):
        return learner.set_params(**options).fit(DATA.observations)


def dense(gaussians):
    covariances = gaussians.covariances()
    if gaussians.name == "diag":
        return torch.diag_embed(covariances)
    return covariances if covariances.dim() == 3 else covariances.expand(len(gaussians.means), -1, -1)


def moments(concepts, held, left):
    """Mean and covariance of the mixture of these concepts."""
    means, weights = concepts.gaussians.means[left], held[left] / held.sum()
    mean = weights @ means
    between = (means - mean).T @ ((means - mean) * weights[:, None])
    return mean, torch.tensordot(weights, dense(concepts.gaussians)[left], 1) + between


def without(concepts, kept):
    """Flat concepts, but for one."""
    shared = concepts.gaussians.name == "tied"
    found = {n: t if shared and n != "means" else t[kept] for n, t in concepts.gaussians.tensors().items()}
    rows = {name: getattr(concepts, name)[kept] for name in ("alpha", "label_head", "pair_weights")}
    return replace(concepts, gaussians=type(concepts.gaussians).from_tensors(found), **rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mixture_keeps_its_mean_and_covariance(family):
    model = fitted(family)
    held = torch.from_numpy(model.concept_weights_)
    after = merged(model._concepts, (3, 1, 4), held)
    total = held.clone()
    total[3], total[[1, 4]] = held[[1, 3, 4]].sum(), 0
    before, now = moments(model._concepts, held, [*range(5)]), moments(after, total, [0, 2, 3])
    torch.testing.assert_close(now[0], before[0])
    if family in ("full", "tied"):
        torch.testing.assert_close(now[1], before[1])
    else:  # of what they can say
        torch.testing.assert_close(now[1].diagonal(), before[1].diagonal())
    assert float(after.alpha[3]) == pytest.approx(float(model._concepts.alpha[[1, 3, 4]].sum()))


@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_explained_as_by_the_model_that_lacks_the_empty_concept(family):
    model, kept = fitted(family), [0, 2, 3, 4]
    after = merged(model._concepts, (3, 1), torch.from_numpy(model.concept_weights_))
    batch = DATA.observations.batch(np.arange(8), EXACT.device, EXACT.dtype)
    ours, plain = explain_batch(batch, after, EXACT), explain_batch(batch, without(after, kept), EXACT)
    assert float(ours.phi[..., 1].max()) < 1e-12
    torch.testing.assert_close(ours.phi[..., kept], plain.phi, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.gamma[:, kept], plain.gamma, atol=1e-2, rtol=0)


def test_to_merge_three_at_once_or_one_after_the_other_is_the_same():
    model = fitted("full")
    at_once, in_turn = model.merged(0, 2, 4), model.merged(0, 2).merged(0, 4)
    for name, tensor in at_once._concepts.tensors().items():
        rest = slice(None) if tensor.shape[0] != 5 else [0, 1, 3]
        torch.testing.assert_close(in_turn._concepts.tensors()[name][rest], tensor[rest], msg=name)
    np.testing.assert_allclose(in_turn.evidence_[0], at_once.evidence_[0])


def test_a_concept_that_was_split_in_two_is_whole_again():
    flat = planted(k=3, d=8, images=60, spread=0.3)
    three = PACE(3, parts=None, n_init=3, device="cpu", progress=False).fit(flat.observations)
    near = np.argmin(((flat.means[:, None] - three.means_) ** 2).sum(2), 1)
    assert sorted(near) == [0, 1, 2]
    c = three._concepts
    split = Concepts.from_tensors("tied", {n: twice(t) for n, t in c.tensors().items()})
    means = split.gaussians.means.clone()
    means[2:, 0] += torch.tensor([0.4, -0.4])
    held = np.append(three.concept_weights_, three.concept_weights_[2])[[0, 1, 2, 3]] * [1, 1, 0.5, 0.5]
    split = replace(split, gaussians=type(split.gaussians)(means, split.gaussians.precision_cholesky))
    back = merged(split, (2, 3), torch.from_numpy(held))
    batch = flat.observations.batch(np.arange(20), torch.device("cpu"), torch.float32)
    settings = replace(EXACT, dtype=torch.float32, sweep_tol=1e-6)
    ours, plain = explain_batch(batch, back, settings), explain_batch(batch, c, settings)
    torch.testing.assert_close(ours.phi[..., :3], plain.phi, atol=0.02, rtol=0)


def twice(tensor):
    """With the last of three concepts twice."""
    return torch.cat([tensor, tensor[-1:]]) if tensor.shape[0] == 3 else tensor
