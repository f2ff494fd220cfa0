import json
from base64 import b64decode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pace.showing.report import packing

KINDS = {"u8": np.uint8, "u16": "<u2", "i16": "<i2"}


def unpacked(packed):
    return np.frombuffer(b64decode(packed["base64"]), KINDS[packed["kind"]])


@pytest.mark.parametrize(
    ("pack", "scale", "low"),
    [(packing.shares, 65535, 0), (packing.rough_shares, 255, 0), (packing.signed, 32767 / 2, -2)],
)
def test_numbers_come_back_to_half_a_step(pack, scale, low):
    values = np.random.default_rng(0).uniform(low, -low or 1, (7, 3))
    assert np.abs(unpacked(pack(values)) / scale - values.ravel()).max() <= 0.5 / scale + 1e-12


@pytest.mark.parametrize(("count", "kind"), [(256, "u8"), (257, "u16")])
def test_indices_take_the_smallest_type_that_holds_them(count, kind):
    packed = packing.indices(np.array([0, count - 1]), count)
    assert packed["kind"] == kind
    assert unpacked(packed).tolist() == [0, count - 1]


@given(st.text(st.characters(codec=None)))
def test_any_text_survives_json_and_stays_inside_its_element(text):
    written = packing.safe_json({"name": text})
    assert json.loads(written) == {"name": text}
    assert written.isascii()
    assert not set("<>&") & set(written)


def test_json_has_no_nan():
    with pytest.raises(ValueError, match="not JSON compliant"):
        packing.safe_json([float("nan")])
