import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

for name in ("COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)  # what a terminal is like is each test's to say

sys.path.insert(0, str(Path(__file__).parent))  # `planted` and other helpers beside the tests

# The same examples every time (but for numbers that stand in the code), and as long as they take: a test fails because of
# the code, not by chance or on a slow machine. `pytest --hypothesis-profile default` looks at others.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")


@pytest.fixture(scope="session")
def browser():
    """One for all tests: Playwright runs once in a process."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on PATH")
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"] if root else [])
        yield browser
        browser.close()
