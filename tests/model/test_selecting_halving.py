"""Sums by group, and the ways to cut concepts in two, which are found for all concepts at once."""

import numpy as np
import torch

from pace.model.selecting.grouping import Grouping, halves


def test_sums_are_those_of_each_group_and_nothing_where_a_group_is_empty():
    rng = np.random.default_rng(0)
    group, x, weights = rng.integers(5, size=40), rng.normal(size=(40, 3)), rng.random(40)
    group[group == 3] = 1
    by = Grouping(torch.as_tensor(group), 6)
    member = np.eye(6)[group]
    np.testing.assert_allclose(by.sums(torch.as_tensor(x), torch.as_tensor(weights)), member.T @ (weights[:, None] * x))
    np.testing.assert_allclose(by.totals(torch.as_tensor(weights)), member.T @ weights)
    assert by.sizes.tolist() == member.sum(0).tolist()
    ranked = by.ranked(torch.as_tensor(weights)).numpy()
    np.testing.assert_array_equal(ranked, np.lexsort([weights, group]))


def clouds(sizes, dim=6, seed=0):
    """Concepts of two clouds each, far apart: patches, weights, concept and cloud of each."""
    rng = np.random.default_rng(seed)
    concept = np.repeat(np.arange(len(sizes)), [sum(pair) for pair in sizes])
    cloud = np.concatenate([np.repeat([0, 1], pair) for pair in sizes])
    x = 20 * rng.normal(size=(2 * len(sizes), dim))[2 * concept + cloud] + rng.normal(size=(len(concept), dim))
    return (torch.as_tensor(part) for part in (x.astype(np.float32), rng.random(len(x)) + 0.5, concept, cloud))


def test_two_clouds_are_told_apart_whatever_their_sizes():
    x, weights, concept, cloud = clouds([(30, 30), (100, 3), (5, 40), (2, 2)])
    for side in halves(x, weights.float(), Grouping(concept, 4)):
        for k in range(4):
            found, true = side[concept == k], cloud[concept == k].bool()
            assert torch.equal(found, true) or torch.equal(found, ~true)


def test_concepts_are_cut_alike_alone_and_together():
    x, weights, concept, _ = clouds([(9, 20), (50, 8), (12, 12), (40, 1), (7, 7)], seed=1)
    x = x + 15 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))  # hardly clouds any more
    together = halves(x, weights.float(), Grouping(concept, 5))
    for k in range(5):
        rows = concept == k
        alone = halves(x[rows], weights[rows].float(), Grouping(torch.zeros_like(concept[rows]), 1))
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[rows], other)


def test_patches_that_are_all_alike_stay_on_one_side():
    same = torch.ones(8, 3)
    for side in halves(same, torch.ones(8), Grouping(torch.arange(8) // 4, 2)):
        assert len(side[:4].unique()) == len(side[4:].unique()) == 1
