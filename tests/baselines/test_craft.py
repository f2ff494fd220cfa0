import numpy as np
import pytest
import torch
from test_factorization import matched
from toys import GRID, Toy

from pace import Observations
from pace.baselines import CRAFT
from pace.baselines.craft import total_indices

D, TOKENS = 12, 7
CPU = torch.device("cpu")


def planted(seed: int = 0, images: int = 40) -> tuple[Toy, Observations, torch.Tensor, torch.Tensor]:
    """Images whose tokens each hold two of four concepts, a model that asks for the first one's amount only, and the truth.

    Concepts use channels of their own; the last four channels are negative and say nothing.
    """
    rng = np.random.default_rng(seed)
    rows = torch.zeros(4, D)
    for concept in range(4):
        rows[concept, 2 * concept : 2 * concept + 2] = torch.tensor([0.8, 0.6])
    amounts = torch.from_numpy(
        rng.exponential(size=(images, TOKENS, 4)) * (rng.random((images, TOKENS, 4)) < 0.5)
    ).float()
    tokens = amounts @ rows
    tokens[:, :, 8:] = -torch.from_numpy(rng.random((images, TOKENS, 4))).float()
    weights = torch.stack([rows[0], -rows[0]], 1)
    toy = Toy(lambda e: 3 * e.mean(1) @ weights - torch.tensor([2.0, 0.0]), D)
    predictions = toy.h(tokens).softmax(1)
    return toy, Observations(tokens, torch.ones(images, TOKENS), predictions, grid=GRID, prefix_tokens=1), rows, amounts


def test_planted_concepts_are_found_with_their_amounts():
    toy, train, rows, amounts = planted()
    method = CRAFT(4, split=0).fit(toy, train)
    assert matched(torch.from_numpy(method.concepts_), rows).min() > 0.98
    order = (method.concepts_ @ rows.numpy().T).argmax(0)  # ours for each of theirs
    found = method.explain(train)
    np.testing.assert_allclose(found.phi[:, :, order], amounts, atol=0.15)
    np.testing.assert_allclose(found.theta[:, order], amounts.mean(1), atol=0.1)


def test_the_concept_that_the_model_asks_for_is_the_important_one():
    toy, train, rows, amounts = planted()
    method = CRAFT(4, split=0, designs=64, explains="importance").fit(toy, train)
    first = (method.concepts_ @ rows[0].numpy()).argmax()
    found = method.explain(train)
    holds = (amounts[:, :, 0].mean(1) > 0.05).numpy()
    assert (found.theta[holds].argmax(1) == first).all()
    assert (np.delete(found.theta.mean(0), first) < 0.1).all()
    assert found.phi.shape == (40, TOKENS, 4)


def test_the_recursive_step_splits_the_important_concept():
    toy, train, rows, _ = planted()
    method = CRAFT(5, split=0.2, designs=64).fit(toy, train)
    near = method.concepts_ @ rows.numpy().T
    # Four are found, and the important one has become two: they share what its channels hold.
    owners = near.argmax(1)
    assert np.bincount(owners, minlength=4).tolist() == [2, 1, 1, 1]
    parts = method.concepts_[owners == 0]
    assert np.linalg.norm(parts[0] - parts[1]) > 1e-3


def test_a_dictionary_per_class_is_learned_from_that_class_alone():
    toy, train, _, _ = planted()
    labels = train.predictions.argmax(1).numpy()
    assert set(labels) == {0, 1}
    method = CRAFT(4, per_class=True, split=0).fit(toy, train)
    assert method.concepts_ is None
    zero = CRAFT(4, split=0).fit(toy, train[np.flatnonzero(labels == 0)])
    assert matched(method.dictionaries_[0], torch.from_numpy(zero.concepts_)).min() > 0.95
    found = method.explain(train)
    some = int(np.flatnonzero(labels == 1)[0])
    alone = method.explain(train[some])
    np.testing.assert_allclose(alone.phi[0], found.phi[some], atol=1e-4)
    # The same tokens under the other prediction are read with the other dictionary.
    other = Observations(train.embeddings, train.attention, train.predictions.flip(1), grid=GRID, prefix_tokens=1)
    assert not np.allclose(method.explain(other).theta[some], found.theta[some], atol=1e-3)


def test_a_class_without_training_images_is_explained_with_the_dictionary_of_all():
    toy, train, _, _ = planted()
    ones = train[np.flatnonzero(train.predictions.argmax(1).numpy() == 1)]
    method, shared = CRAFT(4, per_class=True).fit(toy, ones), CRAFT(4).fit(toy, ones)
    zeros = train[np.flatnonzero(train.predictions.argmax(1).numpy() == 0)]
    np.testing.assert_allclose(method.explain(zeros).theta, shared.explain(zeros).theta, rtol=1e-3, atol=1e-4)


def test_more_concepts_than_patches_are_refused():
    toy, train, _, _ = planted(images=2)
    with pytest.raises(ValueError, match="n_concepts=20 is more than the 14 patches"):
        CRAFT(20).fit(toy, train)


@pytest.mark.parametrize("options", [{"explains": "everything"}, {"split": 0.9}, {"sample": 0}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match="expected"):
        CRAFT(4, **options)


def test_a_sum_splits_the_variance_by_the_squares_of_its_weights():
    weights = torch.tensor([[1.0, 2.0, 0.0, 3.0], [0.0, 1.0, 1.0, 0.0]])
    found = total_indices(lambda x: weights @ x.T, 4, 2048, 0, CPU)
    torch.testing.assert_close(found, weights.square() / weights.square().sum(1, keepdim=True), atol=0.01, rtol=0)


def test_both_parts_of_a_product_count_the_interaction():
    # y = x₁ x₂ on [0, 1]²: Var = 7/144, first order 3/144 each, so each total index is 4/7.
    found = total_indices(lambda x: (x[:, 0] * x[:, 1])[None], 3, 4096, 1, CPU)
    torch.testing.assert_close(found, torch.tensor([[4 / 7, 4 / 7, 0.0]]), atol=0.01, rtol=0)


def test_an_output_that_does_not_vary_has_no_important_variable():
    assert not total_indices(lambda x: torch.full((2, len(x)), 5.0), 3, 8, 0, CPU).any()
