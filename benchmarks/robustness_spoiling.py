"""Damage of every sort, for robustness_files.py: to bytes, to values of JSON, to tensors, lines and archives."""

from __future__ import annotations

import io
import random
import zipfile
from typing import Any

import torch


def spoiled_bytes(content: bytes, draw: random.Random) -> bytes:
    at, size = draw.randrange(max(1, len(content))), draw.choice([1, 8, 100])
    noise = draw.randbytes(size)
    return draw.choice(
        [
            lambda: content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
            lambda: content[:at],
            lambda: content[:at] + content[at + size :],
            lambda: content[:at] + noise + content[at:],
            lambda: content[:at] + noise + content[at + size :],
            lambda: content[:at] + bytes(size) + content[at + size :],
            lambda: content[:at] + b"\xff" * size + content[at + size :],
            lambda: content + noise,
            lambda: content * 2,
            lambda: noise,
        ]
    )()


def spoiled_value(value: Any, draw: random.Random) -> Any:
    """The same JSON with something else in one place."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.85:
        changed = value.copy()
        key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        if draw.random() < 0.15:
            del changed[key]
        else:
            changed[key] = spoiled_value(value[key], draw)
        return changed
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    return draw.choice(
        [None, True, -1, 0, 7, 10**30, 0.5, -1e300, "", "x", "../../x", "\ud800", "\0", [], {}, [[]], {"x": 1}, deep]
    )


def spoiled_tensors(tensors: dict[str, torch.Tensor], draw: random.Random) -> dict[str, torch.Tensor]:
    name = draw.choice(sorted(tensors))
    tensor, rest = tensors[name], {key: value for key, value in tensors.items() if key != name}
    change = draw.randrange(8)
    if change == 0:
        return rest
    if change == 1:
        return rest | {name + "x": tensor}
    whole = tensor.double()
    values = [torch.full_like(whole, draw.choice([torch.nan, torch.inf, -1e30, 1e30, 0.0, -1.0])), whole[None]]
    values += [tensor[:-1] if tensor.ndim else tensor.reshape(1), torch.cat([whole.reshape(-1)] * 2), whole.long()]
    return rest | {name: [*values, tensor.to(torch.complex64)][change - 2]}


def spoiled_lines(text: str, draw: random.Random) -> str:
    lines = [line.split(" ") for line in text.splitlines()]
    line = draw.choice(lines)
    line[draw.randrange(len(line))] = draw.choice(
        ["", "x", "-1", "0", "9" * 5000, "nan", "1e400", "../../../etc/passwd", "\0"]
    )
    return "\n".join(map(" ".join, lines[: draw.choice([len(lines), len(lines) - 1])])) + "\n"


def spoiled_archive(content: bytes, draw: random.Random) -> bytes:
    """A file of PyTorch with another content in one of its members, or another name for it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        chosen = draw.choice(old.namelist())
        for name in old.namelist():
            inner = old.read(name)
            if name == chosen:
                name, inner = draw.choice(
                    [(name, spoiled_bytes(inner, draw)), (f"{name}x", inner), (f"../{name}", inner)]
                )
            new.writestr(name, inner)
    return out.getvalue()
