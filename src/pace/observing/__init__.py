"""Images through a backbone: observations in memory or in a store on disk (`observe`), or on demand (`stream`)."""

from pace.observing.extract import observe, observe_pair
from pace.observing.store import ObservationStore
from pace.observing.streaming import stream, stream_pair

__all__ = ["ObservationStore", "observe", "observe_pair", "stream", "stream_pair"]
