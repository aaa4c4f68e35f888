"""Mixtures of experts: the cost over a dense model of the same active FLOPs, and the gain of token slices.

Cost on one rank: steps of both models take turns, with one token slice and with several. An expert has N K / E tokens
of a token slice of N tokens: with few, its products are slow.

    python -m benchmarks.experts overhead [--token-slices 1 8] [--experts 8] [--top-k 2]

Gain of token slices on two ranks, one micro-batch on two stages, for both models; all four process groups take turns.

    python -m benchmarks.experts token_slices [--token-slices 8]

Time of each part of the layer on one rank, by torch's profiler.

    python -m benchmarks.experts parts [--token-slices 8]

The dense model has the width of all experts that a token chooses. Medians; fp32, one core a rank.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring.command import Parser, run_named
from benchmarks.measuring.workload import (
    SEQ_LENGTH,
    batches,
    benchmark_model,
    join,
    join_alone,
    our_engine,
    seconds_in_turns,
)
from benchmarks.measuring.worlds import World
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.flops import balanced_token_slices, iteration_flops

MICRO_BATCHES = 4
"""Micro-batches of a step on one rank: the optimizer updates the weights of all experts once in so many."""


def models(options: argparse.Namespace) -> dict[str, ModelConfig]:
    """The dense model and the mixture of experts, by name; every layer of the mixture has experts."""
    dense = replace(
        benchmark_model(options.layers, llama=True),
        ffn_hidden_size=options.ffn_hidden_size,
        seq_length=options.seq_length,
        max_position_embeddings=options.seq_length,
    )
    width = options.ffn_hidden_size // options.top_k
    experts = replace(
        dense,
        num_experts=options.experts,
        moe_router_topk=options.top_k,
        moe_ffn_hidden_size=width,
        moe_aux_loss_coeff=0.01,
    )
    return {"dense": dense, "experts": experts}


def parsed(
    argv: Sequence[str] | None, token_slices: Sequence[int], layers: int, seq_length: int = SEQ_LENGTH
) -> argparse.Namespace:
    """Print the sizes, and return the options."""
    parser = Parser(description=__doc__)
    parser.add_argument("--token-slices", type=int, nargs="+", default=list(token_slices), metavar="S")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--ffn-hidden-size", type=int, default=2048, help="of the dense model")
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--seq-length", type=int, default=seq_length)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(argv)
    flops = {name: iteration_flops(model, 1) for name, model in models(options).items()}
    print(
        f"{options.layers} layers, {options.seq_length} tokens, {options.experts} experts, {options.top_k} for a token"
    )
    print(f"active FLOPs over the dense model's: {flops['experts'] / flops['dense']:.4f}")
    return options


def overhead(argv: Sequence[str] | None = None) -> None:
    """Measure and print the cost over the dense model."""
    options = parsed(argv, (1, 8), 4)
    join_alone()
    steps = {}
    for name, model in models(options).items():
        data = batches(model, for_deepspeed=False)
        for count in options.token_slices:
            engine = our_engine(model, balanced_token_slices(model, count), MICRO_BATCHES, num_stages=1)
            steps[count, name] = partial(engine.train_batch, data)
    times = {name: median(seconds) for name, seconds in seconds_in_turns(steps, options.rounds).items()}
    print(f"{'token slices':>12} {'dense s':>9} {'experts s':>10} {'over dense':>11}")
    for count in options.token_slices:
        dense, experts = times[count, "dense"], times[count, "experts"]
        print(f"{count:>12} {dense:>9.3f} {experts:>10.3f} {experts / dense - 1:>11.1%}")
    dist.destroy_process_group()


def build(model: ModelConfig, num_token_slices: int) -> tuple[Any, Iterator[Any]]:
    """Return the engine of one of two stages, and its data."""
    join()
    engine = our_engine(model, balanced_token_slices(model, num_token_slices), 1, num_stages=2)
    return engine, batches(model, for_deepspeed=False)


def step(built: tuple[Any, Iterator[Any]]) -> None:
    """Train one step."""
    engine, data = built
    engine.train_batch(data)


def token_slices(argv: Sequence[str] | None = None) -> None:
    """Measure and print the gain of token slices."""
    options = parsed(argv, (8,), 8, 4096)
    worlds = {
        (name, count): World(2, build, model, count)
        for name, model in models(options).items()
        for count in (1, *options.token_slices)
    }
    steps = {name: partial(world.run, step) for name, world in worlds.items()}
    times = {name: median(seconds) for name, seconds in seconds_in_turns(steps, options.rounds).items()}
    for world in worlds.values():
        world.end()
    print(f"{'model':>8} {'token slices':>13} {'median s':>9} {'speed-up':>9}")
    for (name, count), seconds in times.items():
        print(f"{name:>8} {count:>13} {seconds:>9.3f} {times[name, 1] / seconds:>9.2f}")


def parts(argv: Sequence[str] | None = None) -> None:
    """Print the operators with the most time in a step."""
    options = parsed(argv, (8,), 4)
    join_alone()
    for name, model in models(options).items():
        engine = our_engine(model, balanced_token_slices(model, options.token_slices[0]), 1, num_stages=1)
        data = batches(model, for_deepspeed=False)
        engine.train_batch(data)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            engine.train_batch(data)
        print(name)
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=24, max_name_column_width=44))
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> object:
    """Run the named measurement, by default the first."""
    return run_named({"overhead": overhead, "token_slices": token_slices, "parts": parts}, argv)


if __name__ == "__main__":
    main()
