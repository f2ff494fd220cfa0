"""The procedure that PACE is timed against is the printed one."""

import numpy as np
import printed
import printed_equations as paper
import pytest
import torch

from pace import Observations

K, D, J, N = 3, 2, 5, 4


@pytest.fixture
def drawn(monkeypatch):
    """A batch of images in two views, and the procedure with concepts somewhere among them; float64."""
    monkeypatch.setattr(printed, "TOLERANCE", 1e-13)
    monkeypatch.setattr(printed, "MOST_SWEEPS", 500)
    rng = np.random.default_rng(0)
    attention, predictions = rng.dirichlet(np.ones(J), printed.BATCH), rng.dirichlet(np.ones(N), printed.BATCH)
    views = [Observations(rng.normal(size=(printed.BATCH, J, D)), attention, predictions) for _ in range(2)]
    roots = rng.normal(size=(K, D, D))
    covariances = roots @ roots.transpose(0, 2, 1) + np.eye(D)
    learner = printed.Printed(*(torch.from_numpy(a) for a in (rng.normal(size=(K, D)), covariances)), 0.3, N)
    with torch.no_grad():
        learner.head.copy_(torch.from_numpy(rng.uniform(-1, 1, (K, N))))
        learner.beta.copy_(torch.from_numpy(rng.uniform(0, 1, K)))
    return learner, *views, covariances


def test_phi_and_gamma_are_where_the_printed_updates_leave_them(drawn):
    learner, original, perturbed, covariances = drawn
    attention, predictions = torch.from_numpy(original.attention), torch.from_numpy(original.predictions)
    with torch.no_grad():
        evidence = [learner.evidence(torch.from_numpy(v.embeddings), attention) for v in (original, perturbed)]
        other = learner.infer(evidence[1], attention).mean(1)
        phi = learner.infer(evidence[0], attention, lambda phi_bar: learner.pull(phi_bar, other, predictions) / J)
    alpha = np.full(K, 0.3)
    gamma = alpha + np.einsum("mjk,mj->mk", phi.numpy(), original.attention)
    again, _, same_gamma, *_ = paper.sweep(
        original.embeddings, original.attention, original.predictions, perturbed.embeddings, perturbed.attention, alpha,
        learner.means.numpy(), covariances, learner.head.detach().numpy(), learner.beta.detach().numpy(),
        gamma, gamma, phi.mean(1).numpy(), other.numpy(),
    )  # fmt: skip
    np.testing.assert_allclose(phi.numpy(), again, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gamma, same_gamma, rtol=1e-9)


def test_an_epoch_ends_with_the_printed_means_and_covariances(drawn, monkeypatch):
    learner, original, perturbed, _ = drawn
    monkeypatch.setattr(printed, "RIDGE", 0.0)
    found = []
    infer = learner.infer
    monkeypatch.setattr(learner, "infer", lambda *a: found.append(infer(*a)) or found[-1])
    learner.learn(original, perturbed)
    learner.finish()
    means, covariances = paper.m_step([(found[1].numpy(), original.attention, original.embeddings)])
    np.testing.assert_allclose(learner.means, means, rtol=1e-9)
    np.testing.assert_allclose(torch.linalg.inv(learner.precisions), covariances, rtol=1e-6, atol=1e-9)


def test_adam_raises_faithfulness_and_stability(drawn):
    learner, original, perturbed, _ = drawn

    def objective():
        with torch.no_grad():
            attention = torch.from_numpy(original.attention)
            phi_bar, other = (
                learner.infer(learner.evidence(torch.from_numpy(v.embeddings), attention), attention).mean(1).numpy()
                for v in (original, perturbed)
            )
        head, beta = learner.head.detach().numpy(), learner.beta.detach().numpy()
        return (paper.bound_f(phi_bar, original.predictions, head) + paper.bound_s(phi_bar, other, beta)).sum()

    before = objective()
    for _ in range(8):
        learner.learn(original, perturbed)
    assert objective() > before + 0.01
