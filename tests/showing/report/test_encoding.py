import json
from base64 import b64decode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pace.showing.report.encoding import packed, safe_json


@pytest.mark.parametrize(
    ("kind", "dtype", "scale", "low"),
    [("u16", "<u2", 65535, 0), ("u8", np.uint8, 255, 0), ("i16", "<i2", 32767 / 2, -2)],
)
def test_numbers_come_back_to_half_a_step(kind, dtype, scale, low):
    values = np.random.default_rng(0).uniform(low, -low or 1, (7, 3))
    found = np.frombuffer(b64decode(packed(values, kind, scale)["base64"]), dtype)
    assert np.abs(found / scale - values.ravel()).max() <= 0.5 / scale + 1e-12


@given(st.text(st.characters(codec=None)))
def test_any_text_survives_json_and_stays_inside_its_element(text):
    written = safe_json({"name": text})
    assert json.loads(written) == {"name": text}
    assert written.isascii()
    assert not set("<>&") & set(written)
