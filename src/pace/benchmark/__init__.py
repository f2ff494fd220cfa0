"""The benchmark: the paper's Tables 1 and 2 in one call, and the scores that show where these mislead.

backbone → observations → for every method: fit → explain → score; tables
"""

from pace.benchmark.methods import PAPER_METHODS, REFERENCES, Method
from pace.benchmark.published import published
from pace.benchmark.results import Results, Row, Stage
from pace.benchmark.running import run
from pace.benchmark.scoring import Scoring
from pace.benchmark.subject import Recipe
from pace.benchmark.tables import Table, exposed, table_1, table_2
from pace.benchmark.writing import all_tables, as_csv, as_markdown, as_page, as_rich, write_results

__all__ = [
    "PAPER_METHODS",
    "REFERENCES",
    "Method",
    "Recipe",
    "Results",
    "Row",
    "Scoring",
    "Stage",
    "Table",
    "all_tables",
    "as_csv",
    "as_markdown",
    "as_page",
    "as_rich",
    "exposed",
    "published",
    "run",
    "table_1",
    "table_2",
    "write_results",
]
