"""Token slices cut by documents beside equal ones and `balanced` ones: simulated, and measured on two ranks.

    python -m benchmarks.document_cuts
    deepspeed --num_accelerators 2 --module benchmarks.document_cuts --measure

Lengths of documents are drawn from a log-normal distribution, given by its median and by the standard deviation of the
logarithm, and packed one after the other; a document that does not fit continues in the next sequence. The
simulation has the costs of FLOPs, and the costs of each micro-batch; the measurement has the engine. Ratios are within
one run. Beside seconds by the clock, the measurement prints the makespan of a simulation whose ops take the processor
time that they took in the engine, in the round in which they took least: so other work on the machine counts little.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from random import Random
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measuring.command import Parser
from benchmarks.measuring.workload import join, our_engine, seconds_in_turns
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.schedules import SCHEDULES, rank_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.cuts import QUANTA, DocumentCuts
from deepspeed_ext.runtime.attention.documents import Documents
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.flops import balanced_token_slices, document_cuts
from megatron_terapipe.data.loader import MicroBatch

Starts = tuple[int, ...]
"""Positions at which the documents of a sequence begin."""

DISTRIBUTIONS = {"web": (600, 1.2), "long": (2000, 2.0), "books": (30_000, 1.5)}
"""Median tokens, and standard deviation of the logarithm, by name: assumptions, not fits."""


def packed(seq_length: int, count: int, median_length: float, deviation: float, seed: int = 0) -> list[Starts]:
    """Starts of documents in sequences, by sequence."""
    random, stream = Random(seed), 0
    starts = [[0] for _ in range(count)]
    while (stream := stream + max(1, round(median_length * random.lognormvariate(0, deviation)))) < count * seq_length:
        sequence, start = divmod(stream, seq_length)
        if start:
            starts[sequence].append(start)
    return [tuple(each) for each in starts]


@dataclass(frozen=True)
class TimesOfOps(OpCosts):
    """Costs that differ from micro-batch to micro-batch."""

    time: Callable[[Op], float] = lambda op: 1.0

    def duration(self, op: Op) -> float:
        """Time of one op."""
        return self.time(op)


def makespan(shape: PipelineShape, time: Callable[[Op], float]) -> float:
    """Makespan of a step under 1f1b."""
    plain = OpCosts.uniform(shape)
    costs = TimesOfOps(plain.forward, plain.backward, time=time)
    return simulate(rank_orders(SCHEDULES["1f1b"], shape), shape, costs).makespan


class ProcessorClock:
    """Least processor time of this process in each op. An `Observer`."""

    def __init__(self) -> None:
        self.seconds: dict[Op, float] = {}

    def begin(self) -> None:
        """Go on; one clock may measure several batches."""

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        """Measure an op."""
        start = time.process_time()
        yield
        self.seconds[op] = min(time.process_time() - start, self.seconds.get(op, inf))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Let a phase be."""
        return nullcontext()


def simulated(
    shape: PipelineShape, cuts: DocumentCuts, starts: Sequence[Starts], chosen: Sequence[TokenSlices]
) -> float:
    """Makespan of a step under 1f1b, over the time that each rank computes."""
    forwards = []
    for row, cut in zip(starts, chosen, strict=True):
        before = cuts.cost_before([row])
        places = [0, *(len(before) - 1 if end == cuts.seq_length else end // cuts.quantum for _, end in cut.bounds())]
        forwards.append(tuple(float(before[end] - before[start]) for start, end in pairwise(places)))

    def time_of(op: Op) -> float:
        return forwards[op.micro_batch][op.token_slice] * (1 if op.kind is OpKind.FORWARD else 2)

    return makespan(shape, time_of) / (3 * sum(map(sum, forwards)))


def llama_8b(seq_length: int) -> ModelConfig:
    """Llama-3-8B's layers, for sequences of some tokens."""
    return ModelConfig(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        activation="swiglu",
        seq_length=seq_length,
    )


def print_simulated(stages: int, token_slices: int, steps: int) -> None:
    """Print how long steps take with each cut, over the time that ranks compute."""
    print(f"Llama-3-8B's layers on {stages} stages, {token_slices} token slices, 1f1b: makespan over computing time")
    quanta = (2, 4, QUANTA, 16, 32)
    by_quanta = " ".join(f"{each:>7}" for each in quanta)
    print(f"{'tokens':>8} {'documents':>10} {'m':>3} {'equal':>7} {'balanced':>9} | by documents, quanta{by_quanta}")
    for seq_length in (32_768, 131_072, 524_288):
        model = llama_8b(seq_length)
        base = document_cuts(model, token_slices)
        finest = _with_quanta(base, seq_length // token_slices // 16)  # whose quantum is a tile
        equal = TokenSlices.uniform(seq_length, token_slices)
        balanced = balanced_token_slices(model, token_slices)
        for name, distribution in DISTRIBUTIONS.items():
            for micro_batches in (1, 4):
                shape = PipelineShape(stages, micro_batches, token_slices)
                found: dict[str, list[float]] = {}
                for step in range(steps):
                    starts = packed(seq_length, micro_batches, *distribution, seed=step)
                    for each, cut in (("equal", equal), ("balanced", balanced)):
                        found.setdefault(each, []).append(simulated(shape, finest, starts, [cut] * micro_batches))
                    for number in quanta:
                        cuts = _with_quanta(base, number)
                        own = [cuts.cut([row]) for row in starts]
                        found.setdefault(str(number), []).append(simulated(shape, cuts, starts, own))
                means = {each: mean(values) for each, values in found.items()}
                own_means = " ".join(f"{means[str(each)]:>7.3f}" for each in quanta)
                print(
                    f"{seq_length:>8} {name:>10} {micro_batches:>3} {means['equal']:>7.3f} {means['balanced']:>9.3f} |"
                    f"{'':21}{own_means}",
                    flush=True,
                )
    shapes = " ".join(f"{len(_with_quanta(base, each).lengths):>7}" for each in quanta)
    print(f"{'lengths that a token slice may have':>62}{shapes}")


def _with_quanta(cuts: DocumentCuts, quanta: int) -> DocumentCuts:
    return DocumentCuts(
        seq_length=cuts.seq_length,
        num_token_slices=cuts.num_token_slices,
        linear_cost=cuts.linear_cost,
        attention_costs=cuts.attention_costs,
        granularity=cuts.granularity,
        quanta=quanta,
    )


def measure(options: argparse.Namespace) -> None:
    """Time steps of the engine on the ranks launched, the cuts in turn, and print medians."""
    join()
    model = ModelConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=4,
        seq_length=options.seq_length,
        vocab_size=256,
        position_embedding_type="rope",
    )
    count, micro_batches = options.token_slices, options.micro_batches
    equal, cuts = TokenSlices.uniform(model.seq_length, count), document_cuts(model, count)
    starts = packed(model.seq_length, micro_batches, options.median, options.deviation, seed=options.seed)
    engines = {
        name: our_engine(
            model,
            token_slices,
            micro_batches,
            num_stages=dist.get_world_size(),
            documents=lambda batch: Documents(batch.document_starts),
            cut_by_documents=by_documents,
        )
        for name, token_slices, by_documents in (
            ("equal", equal, None),
            ("balanced", balanced_token_slices(model, count), None),
            ("balanced-by-documents", equal, lambda documents: cuts.cut(documents.starts)),
        )
    }
    data, clocks = _batches(model, starts), {name: ProcessorClock() for name in engines}
    steps = {name: partial(_step, engine, data, clocks[name]) for name, engine in engines.items()}
    times = seconds_in_turns(steps, options.rounds)
    shape = PipelineShape(dist.get_world_size(), micro_batches, count)
    simulated_from = {name: makespan(shape, _of_all_ranks(clock).__getitem__) for name, clock in clocks.items()}
    if dist.get_rank() == 0:
        print(f"{model.num_layers} layers of {model.hidden_size}, {model.seq_length} tokens, {count} token slices")
        for row in starts:
            print(f"  documents from {row}, cut {cuts.cut([row])}")
        columns = {
            "median": {name: median(seconds) for name, seconds in times.items()},
            "fastest": {name: min(seconds) for name, seconds in times.items()},
            "makespan": simulated_from,
        }
        print(" " * 22, *(f"{name:>8} {'ratio':>6}" for name in columns), " rounds")
        for name, seconds in times.items():
            figures = (f"{column[name]:8.3f} {column['equal'] / column[name]:6.3f}" for column in columns.values())
            print(f"{name:>22}", *figures, "", *(f"{each:.2f}" for each in seconds))
    dist.destroy_process_group()


def _step(engine: Any, data: Iterator[MicroBatch], clock: ProcessorClock) -> None:
    dist.barrier()
    with engine.observers.joined_by(clock):
        engine.train_batch(data)
    dist.barrier()


def _of_all_ranks(clock: ProcessorClock) -> dict[Op, float]:
    seconds: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seconds, clock.seconds)
    return {op: each for of_rank in seconds for op, each in of_rank.items()}


def _batches(model: ModelConfig, starts: Sequence[Starts]) -> Iterator[MicroBatch]:
    """Micro-batches of random tokens with these documents, over and over."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(0, model.vocab_size, (len(starts), 1, model.seq_length + 1), generator=generator)
    while True:
        for sample, row in zip(samples, starts, strict=True):
            tokens, labels = sample[:, :-1], sample[:, 1:]
            mask = torch.ones(tokens.shape)
            yield MicroBatch(tokens=tokens, labels=labels, loss_mask=mask, document_starts=(row,))


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate or measure, and print a table."""
    parser = Parser(description=__doc__)
    parser.add_argument("--local_rank", help="set by the launcher")
    parser.add_argument("--measure", action="store_true", help="time the engine instead of simulating")
    parser.add_argument("--token-slices", type=int, default=8, metavar="S")
    parser.add_argument("--stages", type=int, default=8, help="of the simulation")
    parser.add_argument("--steps", type=int, default=8, help="of the simulation, whose mean is printed")
    parser.add_argument("--micro-batches", type=int, default=2, metavar="M", help="of the measurement")
    parser.add_argument("--median", type=float, default=600, help="tokens of a document, of the measurement")
    parser.add_argument("--deviation", type=float, default=1.8, help="of the logarithm, of the measurement")
    parser.add_argument("--seq-length", type=int, default=8192, help="of the measurement")
    parser.add_argument("--hidden", type=int, default=128, help="of the measurement")
    parser.add_argument("--layers", type=int, default=4, help="of the measurement")
    parser.add_argument("--rounds", type=int, default=5, help="of the measurement")
    parser.add_argument("--seed", type=int, default=0, help="of the measurement's documents")
    options = parser.parse_args(argv)
    if options.measure:
        measure(options)
    else:
        print_simulated(options.stages, options.token_slices, options.steps)


if __name__ == "__main__":
    main()
