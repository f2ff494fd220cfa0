"""No call that could run what a file holds, and no decoder but ours; ruff refuses pickle, eval and yaml.load."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [file for folder in ("src", "scripts", "benchmarks", "tests") for file in sorted((ROOT / folder).rglob("*.py"))]


def unsafe_calls(source: str) -> list[str]:
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name, options = ast.unparse(call.func), {one.arg: ast.unparse(one.value) for one in call.keywords}
        if (
            (name == "torch.load" and options.get("weights_only") != "True")
            or (name.endswith("Image.open") and "formats" not in options)
            or (name in ("np.load", "numpy.load") and options.get("allow_pickle", "False") != "False")
            or name.startswith(("joblib.load", "dill.", "cloudpickle.", "yaml.unsafe", "yaml.full"))
        ):
            found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "Image.open(path)",
        "PIL.Image.open(path)",
        "np.load(path, allow_pickle=True)",
        "joblib.load(path)",
    ],
)
def test_an_unsafe_call_is_found(source: str):
    assert unsafe_calls(source)


def test_there_are_no_unsafe_calls():
    safe = "torch.load(path, weights_only=True); Image.open(path, formats=['PNG']); np.load(path); model.eval()"
    assert not unsafe_calls(safe)
    assert {str(file): calls for file in FILES if (calls := unsafe_calls(file.read_text(encoding="utf-8")))} == {}
