import subprocess
import sys


def modules_after(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


def test_import_pace_brings_in_nothing_heavy():
    heavy = {"torch", "sklearn", "timm", "transformers", "torchvision", "kornia", "captum", "matplotlib", "PIL"}
    assert not heavy & modules_after("import pace")


def test_the_model_needs_no_optional_library():
    optional = {"timm", "transformers", "torchvision", "open_clip", "kornia", "captum", "matplotlib", "PIL"}
    assert not optional & modules_after("import pace; pace.PACE, pace.Observations, pace.Explanation, pace.Backbone")


def test_unknown_names_are_attribute_errors():
    import pace

    assert "PACE" in dir(pace)
    assert not hasattr(pace, "no_such_name")
