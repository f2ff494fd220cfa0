"""Numbers as a page carries them: few bits each, in base64, and JSON that cannot leave its element."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import numpy as np

from pace.explanation import Array

_KINDS: dict[str, np.dtype[Any]] = {"u8": np.dtype("u1"), "u16": np.dtype("<u2"), "i16": np.dtype("<i2")}
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def packed(values: Array, kind: str, scale: float = 1) -> dict[str, str]:
    """Numbers as small integers in base64, after multiplying by `scale`; data.js divides by the same."""
    limits = np.iinfo(_KINDS[kind])
    steps = np.rint(np.clip(values * scale, limits.min, limits.max)).astype(_KINDS[kind])
    return {"kind": kind, "base64": base64(steps.tobytes())}


def base64(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def safe_json(value: Any) -> str:
    """JSON for a script element: plain ASCII, without a character that HTML gives a meaning to."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)
