import torch
from torch.distributions import Dirichlet, kl_divergence

from pace.model.objective import (
    Groups,
    dirichlet_kl,
    expected_log_theta,
    faithfulness,
    faithfulness_gradients,
    stability,
    stability_gradients,
)

torch.manual_seed(0)
B, K, N = 7, 4, 5
GROUPS = Groups([3, 3, 1])  # the last image is alone: it has no negatives


def tensors():
    simplex = Dirichlet(torch.ones(K, dtype=torch.float64))
    phi_bar, other = simplex.sample((B,)).requires_grad_(), simplex.sample((B,)).requires_grad_()
    head = (2 * torch.rand(K, N, dtype=torch.float64) - 1).requires_grad_()
    beta = torch.rand(K, dtype=torch.float64).requires_grad_()
    labels = Dirichlet(torch.ones(N, dtype=torch.float64)).sample((B,))
    return phi_bar, other, head, beta, labels


def test_the_gradients_of_l_f_are_those_of_autograd():
    phi_bar, _, head, _, labels = tensors()
    expected = torch.autograd.grad(faithfulness(phi_bar, labels, head).sum(), (phi_bar, head))
    for ours, theirs in zip(faithfulness_gradients(phi_bar, labels, head), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_the_gradients_of_l_s_are_those_of_autograd_with_images_as_each_others_negatives():
    phi_bar, other, _, beta, _ = tensors()
    by_image = stability(phi_bar, other, beta, GROUPS)
    found = stability_gradients(phi_bar, other, beta, GROUPS, own_term_only=False)
    for ours, theirs in zip(found, torch.autograd.grad(by_image.sum(), (phi_bar, other, beta)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert by_image[-1] == 0  # nor is an image without negatives pulled
    assert not found[0][-1].any()
    assert not found[1][-1].any()


def test_the_printed_pull_of_l_s_holds_the_negatives_fixed():
    phi_bar, other, _, beta, _ = tensors()
    found, _, _ = stability_gradients(phi_bar, other, beta, GROUPS, own_term_only=True)
    for m in range(B):
        (gradient,) = torch.autograd.grad(stability(phi_bar, other, beta, GROUPS)[m], phi_bar)
        torch.testing.assert_close(found[m], gradient[m], rtol=1e-10, atol=1e-12)  # only m's own term


def test_the_dirichlet_terms_are_those_of_torch_distributions():
    gamma, alpha = torch.rand(B, K, dtype=torch.float64) * 5 + 0.1, torch.rand(K, dtype=torch.float64) + 0.1
    torch.testing.assert_close(dirichlet_kl(gamma, alpha), kl_divergence(Dirichlet(gamma), Dirichlet(alpha)))
    draws = Dirichlet(gamma[0]).sample((200_000,))
    torch.testing.assert_close(expected_log_theta(gamma)[0], draws.log().mean(0), atol=0.05, rtol=0.05)
