"""How many concepts? A sketch from cells of patches, then moves judged by a bound (docs/number-of-concepts.md)."""

from pace.model.selecting.search import Selection, first_guess, select

__all__ = ["Selection", "first_guess", "select"]
