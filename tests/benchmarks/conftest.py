import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [
    str(ROOT / "benchmarks"),
    str(ROOT / "tests" / "model"),
]  # the scripts, and the paper's equations in loops
