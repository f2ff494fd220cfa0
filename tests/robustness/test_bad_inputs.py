"""What Python code may pass by mistake: refused in one line of ours, or of no consequence. The long run is in benchmarks/."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pace import PACE, Observations

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from robustness_inputs import ARRAYS, good, outcomes


def test_bad_inputs_by_lot_are_refused_in_one_line_or_give_finite_results():
    wrong = [one for one in outcomes(24, seed=1) if one.verdict not in ("refused", "finite")]
    assert not wrong


@pytest.mark.parametrize(
    "name", ["complex", "longdouble", "strings", "ragged", "half a list", "meta", "sparse tensor", "sparse", "masked"]
)
@pytest.mark.parametrize("field", ["embeddings", "attention", "predictions", "crops"])
def test_what_is_no_array_of_real_numbers_is_refused_by_name(field: str, name: str):
    rng = np.random.default_rng(0)
    data = good(rng)
    data[field] = ARRAYS[name](data[field], rng)
    with pytest.raises(ValueError, match=f"{field}: expected real numbers of at most 64 bits"):
        Observations(**data)


@pytest.mark.parametrize("value", [1e19, -1e30, 1e300])
def test_a_value_that_would_overflow_is_refused_by_name_and_index(value: float):
    data = good(np.random.default_rng(0))
    data["embeddings"][7, 2, 1] = value
    with pytest.raises(ValueError, match="embeddings of image 7 is beyond"):
        Observations(**data)


@pytest.mark.parametrize("alpha", [1e300, 1e-300, [1.0, 1e30, 1.0]])
def test_alpha_that_would_make_theta_nan_is_refused(alpha: object):
    with pytest.raises(ValueError, match="alpha: expected one positive number"):
        PACE(3, alpha=alpha).fit(Observations(torch.rand(4, 9, 2), torch.ones(4, 9)))


@pytest.mark.parametrize("dtype", [np.ones((2, 2)), "9" * 5000, torch.int64, None])
def test_a_dtype_that_is_none_is_refused_in_one_short_line(dtype: object):
    with pytest.raises(ValueError, match=r"^dtype: expected 'float32' or 'float64'; found .{1,700}$"):
        PACE(3, dtype=dtype).fit(Observations(torch.rand(4, 9, 2), torch.ones(4, 9)))


@pytest.mark.parametrize("covariance", ["tied", "diag", "full", "low_rank"])
def test_embeddings_too_close_to_each_other_for_their_precision_are_refused(covariance: str):
    data = good(np.random.default_rng(0))
    data["embeddings"] *= 1e-30
    with pytest.raises(ValueError, match="covariance is not positive definite; rescale the embeddings"):
        PACE(3, n_init=1, covariance=covariance, progress=False).fit(Observations(**data))
