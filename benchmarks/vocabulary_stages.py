"""Simulated time that vocabulary stages save: `--vocabulary-stages` beside the best stages with a whole output layer.

python -m benchmarks.vocabulary_stages [--model-preset llama3-8b] [--pipeline-parallel-size 8]

For each length of sequence and number of micro-batches the whole output layer is tried with the schedules 1f1b,
zero-bubble and interleaved, and the optimised one, for 1, 2 and 4 model chunks and several numbers of token slices.
Its stages are found by moving one layer at a time from one stage to another, as long as the simulated step gets
shorter. Vocabulary stages (Yeung et al., arXiv 2411.05288) are tried with the optimised schedule and even stages.
Memory is left aside: `optimised` keeps as many activations as 1f1b.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, permutations

import numpy as np

from benchmarks.measuring.report import Section, progress
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import OPTIMISED, memory_of_1f1b, schedule_named
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.orders import optimise
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.presets import find_preset
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.stages import pipeline_shape
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.strategy import Strategy

MODEL_CHUNKS = (1, 2, 4)
TOKEN_SLICES = (8, 16, 32, 64)
LEAST_TOKENS = 1024
"""Tokens of the shortest token slice that is tried."""
EFFORT = 0.05
"""Effort of finding orders: about a second each."""

Found = tuple[float, str]
"""Seconds of the pipeline, and what they are of, in words."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the gain for several lengths of sequence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-preset", default="llama3-8b", help="a model with an output layer of its own")
    parser.add_argument("--pipeline-parallel-size", type=int, default=8)
    parser.add_argument("--device", default="H100-SXM5-80GB", help="name in the library of the search")
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[8192, 32768, 131072, 524288, 1048576])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 16])
    options = parser.parse_args(argv)
    section = Section(
        f"{options.model_preset} on {options.pipeline_parallel_size} {options.device}: simulated seconds of the ops",
        ("tokens", "micro-batches", "whole output layer", "s", "vocabulary stages", "s", "times as fast"),
    )
    for seq_length in options.seq_lengths:
        pricing = Pricing(options.model_preset, seq_length, options.pipeline_parallel_size, options.device)
        for num_micro_batches in options.micro_batches:
            progress(f"{seq_length} tokens, {num_micro_batches} micro-batches")
            whole = min(pricing.whole_output_layer(num_micro_batches))
            stages = min(pricing.vocabulary_stages(num_micro_batches))
            section.add(
                f"{seq_length:,}",
                num_micro_batches,
                whole[1],
                f"{whole[0]:.3f}",
                stages[1],
                f"{stages[0]:.3f}",
                f"{whole[0] / stages[0]:.2f}",
            )
    print(section.markdown())


class Pricing:
    """Simulated times of one model with sequences of one length."""

    def __init__(self, preset: str, seq_length: int, num_ranks: int, device: str) -> None:
        settings = dict(find_preset(preset).settings) | {"seq_length": seq_length, "max_position_embeddings": None}
        workload = gpt_workload(ModelConfig(**settings))
        cluster, _ = parse_cluster({"nodes": [{"device": device, "devices": num_ranks}]}, "cluster")
        self._costs = CostModel(workload, cluster)
        self._seq_length, self._num_ranks = seq_length, num_ranks
        self._num_layers = sum(layer.kind == "block" for layer in workload.layers)
        self._compiled: dict[tuple[str, PipelineShape], CompiledOrders] = {}

    def whole_output_layer(self, num_micro_batches: int) -> Iterator[Found]:
        """Yield the best stages for each schedule, number of model chunks and of token slices."""
        for strategy in self._strategies(num_micro_batches):
            schedules = ("1f1b", "zero-bubble") if strategy.num_model_chunks == 1 else ("interleaved",)
            tried = [replace(strategy, schedule=schedule) for schedule in schedules]
            (seconds, best), schedule = min((self._best_stages(each), each.schedule) for each in tried)
            yield seconds, self._in_words(replace(strategy, schedule=schedule), best)
            found = replace(strategy, schedule=OPTIMISED, stage_partition=best)
            yield self._optimised(found), self._in_words(found, best)

    def vocabulary_stages(self, num_micro_batches: int) -> Iterator[Found]:
        """Yield the times with vocabulary stages for each number of model chunks and of token slices."""
        for strategy in self._strategies(num_micro_batches):
            found = replace(strategy, schedule=OPTIMISED, vocabulary_stages=True)
            yield self._optimised(found), self._in_words(found, None)

    def _strategies(self, num_micro_batches: int) -> Iterator[Strategy]:
        for num_model_chunks in MODEL_CHUNKS:
            for num_token_slices in TOKEN_SLICES:
                enough_layers = self._num_layers >= num_model_chunks * self._num_ranks
                if enough_layers and self._seq_length // num_token_slices >= LEAST_TOKENS:
                    yield Strategy(
                        pipeline_parallel_size=self._num_ranks,
                        num_model_chunks=num_model_chunks,
                        num_token_slices=num_token_slices,
                        global_batch_size=num_micro_batches,
                    )

    def _best_stages(self, strategy: Strategy) -> tuple[float, tuple[int, ...]]:
        """Seconds, and the bounds of the stages, where no move of one layer makes the step shorter."""
        num_stages = self._num_ranks * strategy.num_model_chunks
        layers = [len(each) for each in np.array_split(np.arange(self._num_layers), num_stages)]
        seconds = self._simulated(strategy, layers)
        better = True
        while better:
            better = False
            for source, target in permutations(range(num_stages), 2):
                if layers[source] == 1:
                    continue
                moved = [*layers]
                moved[source] -= 1
                moved[target] += 1
                if (found := self._simulated(strategy, moved)) < seconds * (1 - 1e-6):
                    layers, seconds, better = moved, found, True
        return seconds, tuple(accumulate(layers, initial=0))

    def _simulated(self, strategy: Strategy, layers: Sequence[int]) -> float:
        strategy = replace(strategy, stage_partition=tuple(accumulate(layers, initial=0)))
        key = strategy.schedule, pipeline_shape(strategy)
        if key not in self._compiled:
            self._compiled[key] = CompiledOrders.of_schedule(schedule_named(strategy.schedule), key[1])
        return self._compiled[key].simulate(self._costs.pipeline_costs(strategy)).makespan

    def _optimised(self, strategy: Strategy) -> float:
        # Its costs have weight gradients apart, as the optimised schedule may put them off.
        shape, cut = pipeline_shape(strategy), TokenSlices.uniform(self._seq_length, strategy.num_token_slices)
        costs, limit = self._costs.pipeline_costs(strategy), memory_of_1f1b(shape, cut)
        return optimise(shape, costs, memory_limit=limit, lengths=cut.lengths, effort=EFFORT).makespan

    def _in_words(self, strategy: Strategy, bounds: tuple[int, ...] | None) -> str:
        layers = [] if bounds is None else [end - start for start, end in pairwise(bounds)]
        dealt = f", layers {' '.join(map(str, layers))}" if len(set(layers)) > 1 else ""
        several = f", {strategy.num_model_chunks} model chunks" if strategy.num_model_chunks > 1 else ""
        return f"{strategy.schedule}{several}, {strategy.num_token_slices} token slices{dealt}"


if __name__ == "__main__":
    main()
