"""Observations with tokens beside them that do not count."""

import numpy as np

from pace import PACE, Observations
from pace.baselines import SplitObservations


def test_they_can_be_learned_from_like_any_within_a_budget_of_memory():
    rng = np.random.default_rng(0)
    whole = Observations(rng.normal(size=(12, 12, 4)), rng.random((12, 12)) + 0.1, grid=(3, 3), prefix_tokens=3)
    model = PACE(2, memory="1GB", max_iter=3, tol=1.0, device="cpu").fit(SplitObservations.of(whole, 1))
    assert model.means_.shape == (2, 4)
