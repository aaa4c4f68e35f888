"""What is computed: a model as the search sees it, a row of layers with their shapes."""

from megatron_terapipe.search.workload.layer import Attention, Layer, Product
from megatron_terapipe.search.workload.workload import Workload

__all__ = ["Attention", "Layer", "Product", "Workload"]
