import subprocess
import sys

import pace

OPTIONAL = {"timm", "transformers", "torchvision", "open_clip", "captum", "matplotlib", "PIL"}
PROGRAM = """
import sys, pace
print(*sys.modules)
pace.PACE, pace.Observations, pace.Explanation, pace.Backbone
print(*sys.modules)
"""


def test_import_pace_brings_in_nothing_heavy_and_the_model_no_optional_library():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    imported, used = (set(line.split()) for line in done.stdout.splitlines())
    assert not imported & (OPTIONAL | {"torch", "sklearn"})
    assert "torch" in used
    assert not used & OPTIONAL


def test_unknown_names_are_attribute_errors():
    assert {"PACE", "explain_model", "load_run", "metrics"} <= set(dir(pace))
    assert not {"Any", "import_module", "TYPE_CHECKING"} & set(dir(pace))
    assert all(hasattr(pace, name) for name in dir(pace))
    assert not hasattr(pace, "no_such_name")
