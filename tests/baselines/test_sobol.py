import torch

from pace.baselines.sobol import total_indices

CPU = torch.device("cpu")


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
