import numpy as np
import pytest
import torch
from sklearn.metrics import normalized_mutual_info_score

from pace.metrics import (
    class_echo,
    faithfulness,
    faithfulness_given_prediction,
    majority_class,
    nonlinear_faithfulness,
)

RNG = np.random.default_rng(0)
THETA = RNG.dirichlet(np.full(8, 0.5), 300)
YHAT = (THETA @ RNG.normal(size=(8, 4)) * 6).argmax(1)
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
