import numpy as np
import pytest
import torch
from sklearn.metrics import normalized_mutual_info_score

from pace import Observations
from pace.classifiers import ridge_regression
from pace.metrics import (
    bootstrap,
    class_echo,
    faithfulness,
    faithfulness_given_prediction,
    fidelity_over_random,
    logit_fidelity,
    majority_class,
    nonlinear_faithfulness,
)
from pace.metrics.by_lot import random_mixtures

RNG = np.random.default_rng(0)
THETA = RNG.dirichlet(np.full(8, 0.5), 300)
YHAT = (THETA @ RNG.normal(size=(8, 4)) * 6).argmax(1)
SHARES = np.exp(THETA @ RNG.normal(size=(8, 4)) * 6)
SHARES /= SHARES.sum(1, keepdims=True)
TRAIN, TEST = slice(0, 200), slice(200, 300)


def score(metric, theta, yhat, **options):
    return metric(theta[TRAIN], yhat[TRAIN], theta[TEST], yhat[TEST], **options)


def test_a_prediction_that_is_linear_in_theta_is_recovered():
    assert score(faithfulness, THETA, YHAT) > 0.9
    assert score(nonlinear_faithfulness, THETA, YHAT) > 0.85


def test_neither_the_scale_and_order_of_concepts_nor_the_form_of_predictions_matters():
    order, scale = RNG.permutation(8), RNG.uniform(0.1, 10, 8)
    value = score(faithfulness, THETA, YHAT)
    assert score(faithfulness, (THETA * scale)[:, order], np.eye(4)[YHAT]) == pytest.approx(value, abs=0.021)
    assert score(faithfulness_given_prediction, THETA, YHAT) == value


def test_a_class_that_training_never_saw_cannot_be_recovered():
    yhat = YHAT.copy()
    yhat[TEST] = 9
    assert score(faithfulness, THETA, yhat) == 0


def test_an_exclusive_or_needs_the_network():
    theta = np.random.default_rng(1).choice([-1.0, 1.0], (600, 2)) + 0.1 * RNG.normal(size=(600, 2))
    yhat = (theta[:, 0] * theta[:, 1] > 0).astype(int)
    arguments = theta[:400], yhat[:400], theta[400:], yhat[400:]
    assert faithfulness(*arguments) < 0.7
    assert nonlinear_faithfulness(*arguments) > 0.95


@pytest.mark.parametrize("metric", [faithfulness, nonlinear_faithfulness])
def test_constant_and_random_explanations_do_no_better_than_the_majority_class(metric):
    yhat = np.random.default_rng(2).choice(3, 300, p=[0.6, 0.25, 0.15])
    chance = majority_class(yhat[TRAIN], yhat[TEST])
    assert chance == (yhat[TEST] == 0).mean()
    assert score(metric, np.full((300, 5), 0.2), yhat) == chance
    assert score(metric, np.random.default_rng(3).dirichlet(np.ones(5), 300), yhat) < chance + 0.05


def test_rounding_in_a_constant_column_is_not_blown_up_into_a_feature():
    constant = np.full((300, 3), 0.2) + 1e-10 * (YHAT == 0)[:, None]
    assert score(faithfulness, constant, YHAT) == majority_class(YHAT[TRAIN], YHAT[TEST])


def test_tensors_are_taken_and_gradients_and_random_state_left_alone():
    theta = torch.tensor(THETA, dtype=torch.float32, requires_grad=True)
    state = torch.get_rng_state()
    with torch.no_grad():
        assert score(nonlinear_faithfulness, theta, torch.tensor(YHAT)) > 0.8
    assert theta.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_logits_that_are_linear_in_theta_are_recovered_for_all_classes():
    assert score(logit_fidelity, THETA, SHARES) > 0.999
    even = np.full((300, 5), 0.2)
    over = fidelity_over_random(THETA[TRAIN], even[TRAIN], SHARES[TRAIN], THETA[TEST], even[TEST], SHARES[TEST])
    assert over == pytest.approx(score(logit_fidelity, THETA, SHARES) - score(logit_fidelity, even, SHARES))
    assert score(logit_fidelity, np.full((300, 5), 0.2), SHARES) == pytest.approx(0, abs=0.05)
    assert score(logit_fidelity, np.random.default_rng(3).dirichlet(np.ones(50), 300), SHARES) < 0.05


def test_one_concept_per_class_names_the_class_and_not_the_rest_of_the_prediction():
    theta = np.eye(4)[SHARES.argmax(1)]
    assert score(faithfulness, theta, SHARES) == 1
    assert score(logit_fidelity, theta, SHARES) < 0.8


def test_the_share_of_the_logits_is_worked_out_from_errors_and_the_training_mean():
    logits = np.log(SHARES.clip(1e-6))
    logits -= logits.mean(1, keepdims=True)
    away = np.square(logits[TEST] - logits[TRAIN].mean(0)).sum()
    theta = THETA[:, :3]
    predicted = ridge_regression(theta[TRAIN], logits[TRAIN])(theta[TEST])
    expected = 1 - np.square(logits[TEST] - predicted).sum() / away
    assert score(logit_fidelity, theta, SHARES) == pytest.approx(expected)
    found = bootstrap(logit_fidelity, theta[TRAIN], SHARES[TRAIN], theta[TEST], SHARES[TEST])
    assert found.low < found.value < found.high


def test_labels_have_no_logits():
    assert np.isnan(score(logit_fidelity, THETA, YHAT))
    with pytest.raises(ValueError, match="yhat_test: expected 4 classes as yhat_train; found 3"):
        logit_fidelity(THETA[TRAIN], SHARES[TRAIN], THETA[TEST], SHARES[TEST, :3])


def test_random_concepts_are_tokens_and_their_shares_are_weighted_by_attention():
    places = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    concepts = np.random.default_rng(4).integers(3, size=(20, 5))
    attention = np.random.default_rng(5).dirichlet(np.ones(5), 20)
    observations = Observations(places[concepts], 7 * attention)
    train, test = random_mixtures(observations[:12], observations[12:], 60, device="cpu")
    assert train.shape == (12, 60)
    np.testing.assert_allclose(test.sum(1), 1, rtol=1e-5)
    # All tokens are drawn, and of equals one gets all: what is left are the shares of the three places.
    shares = np.stack([(attention * (concepts == k)).sum(1) for k in range(3)], 1)
    used = test[:, test.any(0)]
    np.testing.assert_allclose(np.sort(used, 1)[:, -3:], np.sort(shares[12:], 1), rtol=1e-5)
    again = random_mixtures(observations[:12], observations[12:], 4, seed=1, device="cpu")
    np.testing.assert_array_equal(
        again[1], random_mixtures(observations[:12], observations[12:], 4, seed=1, device="cpu")[1]
    )


def test_class_echo_is_not_raised_by_many_concepts_and_few_images():
    """Every image its own concept, and nearly every one its own class: plain mutual information would be near 1."""
    yhat = np.random.default_rng(0).permutation(80) % 70
    assert normalized_mutual_info_score(yhat, np.arange(80)) > 0.9
    assert class_echo(np.eye(80), yhat) < 0.1
    assert class_echo(RNG.dirichlet(np.full(100, 0.1), 80), yhat) < 0.3


def test_class_echo_is_one_when_concepts_are_classes_and_low_when_they_are_not():
    yhat = RNG.integers(4, size=200)
    assert class_echo(np.eye(6)[yhat], yhat) == pytest.approx(1)
    assert class_echo(-np.eye(6)[yhat], yhat) == pytest.approx(1)  # attributions may be negative
    assert class_echo(RNG.dirichlet(np.ones(6), 200), yhat) < 0.15
    assert class_echo(np.full((200, 6), 1 / 6), yhat) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same():
    theta = torch.tensor(THETA, device="cuda")
    assert score(faithfulness, theta, YHAT) == pytest.approx(score(faithfulness, THETA, YHAT), abs=0.02)
    assert score(logit_fidelity, theta, SHARES) == pytest.approx(score(logit_fidelity, THETA, SHARES), abs=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"theta_train": np.full((200, 8), np.nan)}, "theta_train of image 0 is NaN or infinite"),
        ({"theta_test": np.ones((100, 7))}, "theta_test: expected 8 concepts as theta_train has; found 7"),
        ({"yhat_train": np.zeros(200, int)}, "yhat_train: expected at least two predicted classes; found class 0"),
        ({"yhat_train": np.zeros(199, int)}, r"yhat_train: expected labels \(200,\) or distributions"),
        ({"yhat_test": np.full(100, 0.5)}, "yhat_test: expected whole class numbers; found 0.5"),
        ({"yhat_test": np.full(100, np.nan)}, "yhat_test has NaN or infinite values"),
        ({"yhat_test": np.full(100, "cat")}, r"yhat_test: expected labels \(100,\)"),
    ],
)
def test_bad_input_is_refused(change, words):
    given = {"theta_train": THETA[TRAIN], "yhat_train": YHAT[TRAIN], "theta_test": THETA[TEST], "yhat_test": YHAT[TEST]}
    with pytest.raises(ValueError, match=words):
        faithfulness(**given | change)
