import inspect
import subprocess
import sys

import numpy as np
import pytest

import pace.metrics as metrics
from pace.metrics import Metric, Score, bootstrap, effective_concepts, sparsity, stability
from pace.metrics.declare import METRICS

THETA = np.random.default_rng(0).dirichlet(np.full(6, 0.3), 80)


def test_every_exported_metric_declares_direction_range_and_meaning():
    exported = {name: value for name in metrics.__all__ if isinstance(value := getattr(metrics, name), Metric)}
    assert exported == {
        name: found for name, found in METRICS.items() if str(found.__module__).startswith("pace.metrics")
    }
    for name, metric in exported.items():
        assert metric.name == name
        assert metric.better in ("higher", "lower", None)
        assert metric.range[0] < metric.range[1]
        assert metric.meaning.endswith(".")
        assert "\n" not in metric.meaning
        assert metric.__doc__
        assert inspect.signature(metric).return_annotation is float


def test_importing_the_metrics_needs_numpy_alone():
    code = "import sys, pace.metrics; print([m for m in ('torch', 'scipy', 'sklearn') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_metric_gives_a_plain_number_and_the_bootstrap_a_score_of_it():
    value = sparsity(THETA)
    assert type(value) is float
    score = bootstrap(sparsity, THETA)
    assert isinstance(score, Score)
    assert score.value == value
    assert score.low < value < score.high
    assert float(score) == value
    assert str(score) == f"Sparsity: {value:.2f} [{score.low:.2f}, {score.high:.2f}]"


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(1)
    truth = sparsity(rng.dirichlet(np.full(4, 0.5), 20000))
    scores = [bootstrap(sparsity, rng.dirichlet(np.full(4, 0.5), 60), seed=seed) for seed in range(100)]
    assert 0.86 < np.mean([score.low <= truth <= score.high for score in scores]) <= 1


def test_a_figure_that_resampling_biases_stays_inside_its_interval():
    """A draw with repetitions uses fewer concepts than the images themselves, nearly always."""
    theta = np.eye(60)[np.arange(60)]
    score = bootstrap(effective_concepts, theta)
    assert score.value == pytest.approx(60)
    assert score.low < 60
    assert score.high == pytest.approx(60)  # no more than there are


def test_draws_are_the_weights_of_images():
    """A replicate with integer weights is the metric of the images repeated so many times."""
    rng = np.random.default_rng(0)
    perturbed = rng.dirichlet(np.full(6, 0.3), 80)
    phi = rng.dirichlet(np.full(6, 0.3), (80, 9))
    colours, yhat = rng.integers(3, size=(80, 9)), rng.integers(4, size=80)
    weights = rng.multinomial(80, np.full(80, 1 / 80))
    drawn = np.repeat(np.arange(80), weights)
    for metric, arguments in (
        (stability, (THETA, perturbed)),
        (metrics.stability_when_prediction_holds, (THETA, perturbed, yhat, colours[:, 0])),
        (effective_concepts, (THETA,)),
        (metrics.hoyer_sparsity, (THETA,)),
        (metrics.colour_recovery, (phi, colours)),
        (metrics.colour_accuracy, (phi, colours)),
        (metrics.colour_purity, (phi, colours)),
        (metrics.concepts_per_image, (phi,)),
        (metrics.leading_area, (phi,)),
        (metrics.leading_share, (THETA,)),
    ):
        replicate = metric.measure(*arguments).values(weights[None].astype(float))[0]
        assert replicate == pytest.approx(metric(*(argument[drawn] for argument in arguments))), metric.name


def test_an_image_drawn_twice_is_no_pair_of_different_images():
    theta = np.eye(3)
    weights = np.array([[2.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
    values = metrics.between_images.measure(theta).values(weights)
    assert values[0] == pytest.approx(np.sqrt(2))
    assert np.isnan(values[1])


def test_there_is_no_interval_without_draws_or_with_one_image():
    for score in (bootstrap(sparsity, THETA, resamples=0), bootstrap(sparsity, THETA[:1])):
        assert (score.low, score.high) == (None, None)
        assert str(score) == f"Sparsity: {score.value:.2f}"


def test_a_negative_number_of_draws_is_refused():
    with pytest.raises(ValueError, match="resamples: expected 0 or more"):
        bootstrap(sparsity, THETA, resamples=-1)
