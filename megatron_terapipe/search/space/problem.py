"""What the search is asked: which model, on which cluster, with which batch."""

from dataclasses import dataclass

from megatron_terapipe.search.cluster import Cluster
from megatron_terapipe.search.software import TERAPIPE, Software
from megatron_terapipe.search.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question to the search.

    Attributes:
        workload: the model.
        cluster: the machines, in the order of their hostfile.
        global_batch_size: sequences of one optimizer step.
        precision: `fp16`, `bf16` or `fp32`.
        software: the trainer that will run the answer.
    """

    workload: Workload
    cluster: Cluster
    global_batch_size: int
    precision: str = "bf16"
    software: Software = TERAPIPE
