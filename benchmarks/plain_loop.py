"""Time of the trainer on one rank, beside a plain torch loop over the same model and batch.

    python -m benchmarks.plain_loop [--token-slices 1 4]

The engines take turns; every one starts from the same weights, and the losses are compared.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.measuring.plain_llama import PlainLlama, train_step
from benchmarks.measuring.workload import batches, benchmark_model, join_alone, our_engine
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.pipeline import balanced_token_slices
from megatron_terapipe.inference import WholeModel

NUM_MICRO_BATCHES = 2


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of both."""
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def plain(model: ModelConfig) -> Callable[[], float]:
    """A step of the plain loop."""
    module = PlainLlama(model).start_as(WholeModel(model), model)
    optimizer = adamw(module)

    def micro_batches() -> Iterator[tuple[Tensor, Tensor]]:
        for tokens, (labels, _) in batches(model, for_deepspeed=True):
            yield tokens, labels

    data = micro_batches()
    return lambda: train_step(module, optimizer, data, NUM_MICRO_BATCHES)


def ours(model: ModelConfig, num_token_slices: int) -> Callable[[], float]:
    """Return a function that runs a step of the trainer's engine and returns its loss."""
    cut = balanced_token_slices(model, num_token_slices)
    engine = our_engine(model, cut, NUM_MICRO_BATCHES, num_stages=1, optimizer=adamw, clip=1.0)
    data = batches(model, for_deepspeed=False)
    return lambda: engine.train_batch(data).item()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--token-slices", type=int, nargs="+", default=[1, 4], metavar="S")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args(argv)
    join_alone()
    model = benchmark_model(options.layers, llama=True)
    steps = {"plain torch": plain(model)}
    steps |= {f"{count} token slices": ours(model, count) for count in options.token_slices}
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name].append(step())
            if turn:  # the first one warms up
                times[name].append(time.perf_counter() - start)
    base = median(times["plain torch"])
    print(f"{'':>16} {'median s':>9} {'over plain':>10} {'last loss':>10}")
    for name, seconds in times.items():
        over = median(seconds) / base - 1
        print(f"{name:>16} {median(seconds):>9.3f} {over:>10.1%} {losses[name][-1]:>10.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
