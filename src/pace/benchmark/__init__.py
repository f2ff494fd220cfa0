"""The benchmark: the paper's Tables 1 and 2 in one call, and the scores that show where these mislead.

backbone → observations → for every method: fit → explain → score; tables
"""

from pace.benchmark.methods import Method
from pace.benchmark.results import Results, Row
from pace.benchmark.running import run
from pace.benchmark.scoring import Scoring
from pace.benchmark.subject import Recipe
from pace.benchmark.tables import Table, exposed, table_1, table_2
from pace.benchmark.writing import all_tables, as_markdown, as_rich

__all__ = [
    "Method",
    "Recipe",
    "Results",
    "Row",
    "Scoring",
    "Table",
    "all_tables",
    "as_markdown",
    "as_rich",
    "exposed",
    "run",
    "table_1",
    "table_2",
]
