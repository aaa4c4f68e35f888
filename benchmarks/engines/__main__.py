"""Our engine beside DeepSpeed's and torch's pipelines and plain torch, in one run: the same model, weights and data.

    deepspeed --num_accelerators 2 --module benchmarks.engines [--rounds 5] [--minutes 12]

Each engine is held against plain torch first: loss, every gradient. Then they take turns, step by step. Every time is
written to a JSON file after each number of micro-batches; `benchmarks.engines.page` makes table and picture of it.
"""

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch.distributed as dist

from benchmarks.engines.page import table
from benchmarks.engines.pipelines import Job, catalogue
from benchmarks.engines.results import Document, Noise, Run
from benchmarks.engines.turns import Competition, Processors, gathered, machine, product_times, software
from benchmarks.measuring.command import Parser
from benchmarks.measuring.workload import join
from megatron_terapipe.config import ModelConfig

LEAST_ROUNDS = 3
"""Rounds that are run even where they take longer than allowed: a median needs three."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the times, and print the tables."""
    options = _options(argv)
    start, cpu_start, load = time.perf_counter(), time.process_time(), os.getloadavg()[0]
    cores = frozenset(os.sched_getaffinity(0))
    join()
    processors, products, product_s = Processors(), product_times(), list[float]()
    model = _model(options.layers, options.seq_length, options.hidden_size)
    entries = [
        each for each in catalogue(options.token_slices, options.op_profile) if re.search(options.only, str(each.name))
    ]
    # Whatever is chosen, there must be something to hold it against.
    entries = list({each.name: each for each in (catalogue(())[0], *entries)}.values())
    runs: list[Run] = []
    for count in options.micro_batches:
        competition = Competition(Job(model, count, options.micro_batch_size, cores), entries)
        began = time.perf_counter()
        for number in range(options.rounds):
            now = time.perf_counter()
            ends = now - start + (now - began) / max(1, number)
            if number >= LEAST_ROUNDS and any(gathered(ends > 60 * options.minutes)):
                break
            product_s.append(next(products))
            competition.round(number)
        runs.append(Run(num_micro_batches=count, engines=competition.measured()))
        others, stolen = processors.shares(sum(gathered(time.process_time() - cpu_start)))
        document = Document(
            command=_command(options),
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            machine=machine(),
            software=software(),
            model=_sizes(model),
            num_ranks=dist.get_world_size(),
            micro_batch_size=options.micro_batch_size,
            wall_s=time.perf_counter() - start,
            noise=Noise(load_at_start=load, others_share=others, steal_share=stolen, product_s=tuple(product_s)),
            runs=tuple(runs),
        )
        if dist.get_rank() == 0:
            document.write(options.json)
            print(table(document, runs[-1]), flush=True)
    dist.destroy_process_group()
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--local_rank", help="set by the launcher")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4], metavar="M")
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="steps of each engine that are timed")
    parser.add_argument(
        "--minutes",
        type=float,
        default=12,
        metavar="T",
        help=f"after {LEAST_ROUNDS} rounds, leave out those beyond this",
    )
    parser.add_argument("--token-slices", type=int, nargs="+", default=[2, 8], metavar="S")
    parser.add_argument(
        "--op-profile", metavar="FILE", help="of `terapipe search measure`: adds a row with --token-slices auto"
    )
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="B")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--seq-length", type=int, default=2048, metavar="N")
    parser.add_argument("--only", default="", metavar="REGEX", help="engines whose names match")
    parser.add_argument("--json", type=Path, default=Path("runs/engines.json"), metavar="FILE", help="all times")
    return parser.parse_args(argv)


def _command(options: argparse.Namespace) -> str:
    """Flags that repeat the measurement: those that are not at their defaults, but for the file."""
    words = ["deepspeed", "--num_accelerators", str(dist.get_world_size()), "--module", "benchmarks.engines"]
    for name, default in vars(_options([])).items():
        chosen = getattr(options, name)
        if chosen != default and name not in ("json", "local_rank"):
            words += [f"--{name.replace('_', '-')}", *map(str, chosen if isinstance(chosen, list) else [chosen])]
    return shlex.join(words)


def _model(num_layers: int, seq_length: int, hidden_size: int) -> ModelConfig:
    """A GPT with a byte-sized vocabulary, so that the output layer weighs little and stages are even."""
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=8,
        seq_length=seq_length,
        vocab_size=256,
        untie_embeddings_and_output_weights=True,
    )


def _sizes(model: ModelConfig) -> dict[str, int]:
    return {
        "layers": model.num_layers,
        "hidden size": model.hidden_size,
        "heads": model.num_attention_heads,
        "tokens": model.seq_length,
    }


if __name__ == "__main__":
    sys.exit(main())
