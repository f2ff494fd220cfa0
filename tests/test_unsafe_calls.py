"""No call that could run what a file holds, and no decoder but ours. What ruff finds is left to it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [file for folder in ("src", "scripts", "benchmarks", "tests") for file in sorted((ROOT / folder).rglob("*.py"))]
NEEDED = {"torch.load": "weights_only", "PIL.Image.open": "formats"}  # without it, the call is unsafe
NEVER = {
    "builtins.eval",
    "builtins.exec",
    "os.system",
    "os.popen",
    "pandas.read_pickle",
    "torch.jit.load",
}
NEVER_BEGIN = (
    *("pickle.load", "pickle.Unpickler", "marshal.load", "shelve.", "joblib.load", "dill.", "cloudpickle."),
    *("torch.hub.load", "yaml.load", "yaml.unsafe", "yaml.full"),
)
FORBIDDEN = {"allow_pickle": "True", "trust_remote_code": "True", "weights_only": "False", "formats": "None"}


def unsafe_calls(source: str) -> list[str]:
    tree, known = ast.parse(source), dict[str, str]()  # what names stand for, wherever they are imported
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {one.asname: one.name for one in node.names if one.asname}
        elif isinstance(node, ast.ImportFrom):
            known |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    found = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        first, dot, rest = ast.unparse(call.func).partition(".")
        name, options = f"{known.get(first, first)}{dot}{rest}", {o.arg: ast.unparse(o.value) for o in call.keywords}
        lacks = name in NEEDED and NEEDED[name] not in options
        if lacks or name in NEVER or name.startswith(NEVER_BEGIN) or FORBIDDEN.items() & options.items():
            found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, **how)",
        "import torch as t; t.load(path)",
        "from torch import load; load(path)",
        "from PIL import Image; Image.open(path)",
        "from PIL import Image as I; I.open(path)",
        "from PIL.Image import open as o; o(path)",
        "import PIL.Image; PIL.Image.open(path)",
        "np.load(path, allow_pickle=True)",
        "joblib.load(path)",
        "import yaml; yaml.load(text)",
        "from yaml import load; load(text, Loader=Loader)",
        "import pickle as p; p.loads(text)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_an_unsafe_call_is_found(source: str):
    assert unsafe_calls(source)


@pytest.mark.parametrize(
    "source", ["eval(text)", "exec(text)", "import pickle; pickle.loads(text)", "import yaml; yaml.load(text)"]
)
def test_ruff_finds_the_rest(source: str):
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--quiet",
        "--no-cache",
        "--output-format=concise",
        "--stdin-filename",
    ]
    done = subprocess.run(
        [*ruff, "src/pace/x.py", "-"], input=source, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ": S" in done.stdout


def test_there_are_no_unsafe_calls():
    safe = "from PIL import Image; import torch; torch.load(path, weights_only=True); Image.open(path, formats=['PNG'])"
    assert not unsafe_calls(f"{safe}; np.load(path); model.eval(); yaml.safe_load(text)")
    assert {str(file): calls for file in FILES if (calls := unsafe_calls(file.read_text(encoding="utf-8")))} == {}
