"""Cost of summing bf16 gradients in fp32, token slice by token slice, on one rank.

    python -m benchmarks.gradient_accumulation [--token-slices 8] [--hidden-size 512]

Two ways take turns in one run, each with one token slice and with several:

    by DeepSpeed    after each backward, a pass over all weights: zero, cast, add (`BF16_Optimizer.update_hp_grads`)
    in products     products add to the fp32 sums; one pass over norms and biases

and each is compared with itself on one token slice, and with the other. Medians.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.measuring.workload import batches, benchmark_model, join_alone, our_engine, seconds_in_turns
from deepspeed_ext.plan.slicing import TokenSlices


def as_deepspeed_does(engine: Any) -> None:
    """Let an engine with a `BF16_Optimizer` add gradients up as DeepSpeed's own pipeline engine does."""
    for weight in engine.module.parameters():
        del weight.accumulated_gradient

    @contextmanager
    def pass_over_all() -> Iterator[None]:
        engine.optimizer.clear_lp_grads()
        yield
        engine.optimizer.update_hp_grads(clear_lp_grads=False)

    engine._accumulation = pass_over_all


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--token-slices", type=int, default=8, metavar="S")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--seq-length", type=int, default=2048)
    options = parser.parse_args(argv)
    join_alone()
    model = replace(
        benchmark_model(options.layers),
        hidden_size=options.hidden_size,
        seq_length=options.seq_length,
        max_position_embeddings=options.seq_length,
    )
    engines = {}
    for count in (1, options.token_slices):
        cut = TokenSlices.uniform(model.seq_length, count)
        for way in ("by DeepSpeed", "in products"):
            engines[way, count] = engine = our_engine(model, cut, 1, num_stages=1, bf16=True)
            if way == "by DeepSpeed":
                as_deepspeed_does(engine)
    data = batches(model, for_deepspeed=False)
    steps = {name: partial(engine.train_batch, data) for name, engine in engines.items()}
    times = seconds_in_turns(steps, options.rounds)
    medians = {name: median(seconds) for name, seconds in times.items()}
    print(f"{'way':>14} {'token slices':>13} {'median s':>9} {'over 1':>7} {'over DeepSpeed':>15}")
    for (way, count), seconds in medians.items():
        over_one, over_theirs = seconds / medians[way, 1] - 1, seconds / medians["by DeepSpeed", count] - 1
        print(f"{way:>14} {count:>13} {seconds:>9.3f} {over_one:>7.1%} {over_theirs:>15.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
