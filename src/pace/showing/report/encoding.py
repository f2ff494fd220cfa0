"""Numbers as a page carries them: few bits each, base64, and JSON that cannot leave its element."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import numpy as np

from pace.explanation import Array

_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def shares(values: Array) -> dict[str, str]:
    """Numbers from 0 to 1 in steps of 1/65535."""
    return _packed(np.rint(np.clip(values, 0, 1) * 65535).astype("<u2"), "u16")


def rough_shares(values: Array) -> dict[str, str]:
    """Numbers from 0 to 1 in steps of 1/255."""
    return _packed(np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8), "u8")


def signed(values: Array) -> dict[str, str]:
    """Numbers from -2 to 2 in steps of 2/32767, the range of a centred η."""
    return _packed(np.rint(np.clip(values / 2, -1, 1) * 32767).astype("<i2"), "i16")


def indices(values: Array, count: int) -> dict[str, str]:
    """Whole numbers from 0 to `count` - 1."""
    return _packed(values.astype(np.uint8), "u8") if count <= 256 else _packed(values.astype("<u2"), "u16")


def base64(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def safe_json(value: Any) -> str:
    """JSON for a script element: plain ASCII, without a character that HTML gives a meaning to."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _packed(values: Array, kind: str) -> dict[str, str]:
    return {"kind": kind, "base64": base64(np.ascontiguousarray(values).tobytes())}
