"""Trials that the models themselves make, so that the truth is known."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.search.learn.trials import Trial
from megatron_terapipe.search.machine import library
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.trainers import MEGATRON_LM
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.memory import MemoryModel, MemoryOverheads
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.strategy import Strategy
from tests.search.price.machines import NODE

MODEL = ModelConfig(num_layers=16, hidden_size=2048, num_attention_heads=16, seq_length=1024, vocab_size=51200)
WORKLOAD = gpt_workload(MODEL)


def a100s(num_nodes: int = 2) -> Cluster:
    """Nodes of eight A100s."""
    node = replace(NODE, device=library.device("A100-80GB"))
    return Cluster(nodes=tuple(replace(node, name=f"n{index}") for index in range(num_nodes)), name="a100s")


CLUSTER = a100s()

STRATEGIES = [
    Strategy(
        data_parallel_size=16 // (tensor * pipeline),
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        micro_batch_size=micro_batch,
        global_batch_size=64,
        recompute=recompute,
        zero_stage=zero,
    )
    for tensor, pipeline in ((1, 1), (2, 1), (4, 2), (8, 1), (8, 2), (1, 4), (2, 4))
    for micro_batch in (1, 4)
    for recompute, zero in (("none", 0), ("full", 1))
]


def trial(strategy: Strategy, seconds: float | None, **more: object) -> Trial:
    """A trial of this model on this cluster; None = it has no time."""
    values: dict[str, object] = {
        **{"source": "test", "id": "", "group": "one", "software": MEGATRON_LM, "precision": "fp16"},
        **{"workload": WORKLOAD, "cluster": CLUSTER, "peak_memory_bytes": None, "out_of_memory": None},
    }
    return Trial(strategy=strategy, iteration_time_s=seconds, **(values | more))  # type: ignore[arg-type]


def model_with(efficiency: HardwareEfficiency | None = None) -> CostModel:
    """The model that prices these trials; None = with the default constants."""
    return CostModel(WORKLOAD, CLUSTER, software=MEGATRON_LM, efficiency=efficiency, precision="fp16")


def measured(
    strategies: Sequence[Strategy] = tuple(STRATEGIES),
    *,
    efficiency: HardwareEfficiency | None = None,
    memory_overheads: MemoryOverheads | None = None,
    noise: float = 0.0,
    source: str = "synthetic",
    seed: int = 0,
) -> list[Trial]:
    """Trials whose times and peaks are predictions, with some noise; two neighbours make a group."""
    model = model_with(efficiency)
    memory = MemoryModel(
        workload=WORKLOAD,
        cluster=CLUSTER,
        software=MEGATRON_LM,
        precision="fp16",
        overheads=memory_overheads or MemoryOverheads(),
    )
    random = np.random.default_rng(seed)
    trials = []
    for index, strategy in enumerate(strategies):
        time_s = model.predict_time(strategy).iteration_time_s * float(np.exp(random.normal(0, noise)))
        peak = max(rank.total for rank in memory.predict(strategy))
        more = {"id": str(index), "group": f"group {index // 2}", "line": index + 1, "peak_memory_bytes": peak}
        trials.append(trial(strategy, time_s, source=source, **more))
    return trials


def failed(trial: Trial) -> Trial:
    """The same trial, out of memory."""
    return replace(trial, iteration_time_s=None, peak_memory_bytes=None, out_of_memory=True)
