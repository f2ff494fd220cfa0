"""The short address of `observe` and `observe_pair`."""

from pace.observing.extract import observe, observe_pair

__all__ = ["observe", "observe_pair"]
