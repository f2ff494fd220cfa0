import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [
    str(ROOT / "benchmarks"),
    str(ROOT / "tests" / "model"),
    str(ROOT / "tests" / "cli"),
]  # the scripts, the paper's equations in loops, and a tiny model for the commands
