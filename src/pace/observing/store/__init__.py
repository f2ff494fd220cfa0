"""Observations on disk, for sets that do not fit in memory.

A store is a folder: ``index.json``, and shards of consecutive images as safetensors files. Only what the index lists
exists: it is replaced atomically after each finished shard and holds every shard's size and checksum. So a reader sees
finished shards only, and a killed writer leaves at most a file that the next writer deletes.

Embeddings are float16; a batch with a value beyond float16's range (±65504) makes its whole shard float32. Attention and
predictions are float32: they are small next to the embeddings, and float16 would turn the small probabilities whose
logarithms are taken later into zeros.
"""

from pace.observing.store.format import Shard
from pace.observing.store.reading import ObservationStore, StoredArray
from pace.observing.store.writing import SHARD_BYTES, StoreWriter, check, extremes

__all__ = ["SHARD_BYTES", "ObservationStore", "Shard", "StoreWriter", "StoredArray", "check", "extremes"]
