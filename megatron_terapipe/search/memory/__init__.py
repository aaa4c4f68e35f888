"""What a strategy costs in memory, on each pipeline rank, by what it is."""

from megatron_terapipe.search.memory.model import MemoryModel, predict_memory
from megatron_terapipe.search.memory.physics import MemoryPhysics

__all__ = ["MemoryModel", "MemoryPhysics", "predict_memory"]
