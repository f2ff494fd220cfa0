import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

for name in ("COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)  # what a terminal is like is each test's to say

sys.path.insert(0, str(Path(__file__).parent))  # `planted` and other helpers beside the tests

# The same examples every time (but for numbers that stand in the code), and as long as they take: a test fails because of
# the code, not by chance or on a slow machine. `pytest --hypothesis-profile default` looks at others.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")
