"""Small fits of every kind, for the tests beside this file."""

import warnings
from functools import cache

import numpy as np
from planted import planted
from sklearn.exceptions import ConvergenceWarning

from pace import PACE

LEARNED = ("means_", "covariances_", "label_head_", "pair_weights_", "alpha_", "concept_weights_", "refinement_")
# 130 images are three groups of negatives; with so little memory a few are worked on at a time.
KINDS = {
    "full batch": {"covariance": "full", "n_init": 2},
    "low rank": {"covariance": "low_rank"},
    "one view": {"covariance": "diag", "paired": False, "memory": "30kB"},
    "paper": {"updates": "paper"},
    "online": {"minibatch": 70},
    "number found": {"n_concepts": "auto"},
    "few images": {"images": 23},
    "parts and kinds": {"n_concepts": 5, "parts": 2, "refine": 3, "memory": "30kB"},
    "parts and kinds online": {"n_concepts": 5, "parts": 2, "minibatch": 70, "refine": 0},
    "many images": {"images": 1000, "memory": "90kB"},
}


@cache
def drawn(images=130, classes=3, seed=0):
    return planted(seed, k=3, d=4, images=images, grid=(2, 3), spread=0.2, classes=classes)


def fit(kind="few images", data=None, checkpoint=None, every=0.0, keep=False, **more):
    chosen = {"n_concepts": 3, "max_iter": 2, "n_init": 1, "dtype": "float64", "device": "cpu"} | KINDS[kind] | more
    drawn_here = drawn(chosen.pop("images", 130), chosen.pop("classes", 3))
    data = data or drawn_here
    perturbed = data.perturbed if chosen.pop("paired", True) else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the bound still rises", ConvergenceWarning)
        return PACE(**chosen).fit(
            data.observations, perturbed=perturbed, checkpoint=checkpoint, checkpoint_every=every, keep_checkpoint=keep
        )


def same_bits(one, two):
    for name in LEARNED:
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)
    assert one.lower_bounds_ == two.lower_bounds_
    assert (one.n_steps_, one.converged_) == (two.n_steps_, two.converged_)
    for name, tensor in (one._statistics or two._statistics).tensors().items():
        assert tensor.equal(two._statistics.tensors()[name]), name
