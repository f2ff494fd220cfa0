import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # `planted` and other helpers beside the tests

# The same examples every time, and as long as they take: a test fails because of the code, not by chance or on a slow
# machine. `pytest --hypothesis-profile default` looks at others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")
