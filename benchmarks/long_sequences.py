"""A small Llama trained on one long sequence: peak memory beside its closed form, and the time of two stages.

    python -m benchmarks.long_sequences memory --tokens 131072 --token-slices 64
    python -m benchmarks.long_sequences memory --tokens 1048576 --token-slices 256 --window 4096 --only stage
    python -m benchmarks.long_sequences speed --tokens 16384 --token-slices 16

`memory` trains one step on one rank, once in each way, each in a process of its own: token slices with stages computed
again; the same with gradients of keys and values in bf16; with what is not read waiting in a second buffer, which
stands for the host; and whole sequences with every layer computed again. It counts the bytes of all tensors that torch
makes in the step, less those of weight gradients; what kernels allocate for themselves is in the process alone. `speed`
trains on two ranks, with one token slice and with several, in turns.

Closed form of the peak, which the second backward reaches in the last layer: keys and values of all tokens; gradients
of keys and values of all but the last token slice; activations of one token slice on the stage; and gradients under
way, in attention those that its kernel finds for all keys and values that it is given.
"""

import argparse
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.measuring.counters import LiveBytes
from benchmarks.measuring.report import Section, progress
from benchmarks.measuring.workload import batches, join, our_engine
from benchmarks.measuring.worlds import World
from deepspeed_ext.plan.memory import TokenBytes, memory_over_time, peak
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.lowering import lowering_costs
from deepspeed_ext.plan.schedules import SCHEDULES, rank_orders
from deepspeed_ext.plan.simulate import simulate_with_host_copies
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config import ModelConfig, flops
from megatron_terapipe.config.pipeline import balanced_token_slices

FP32_BYTES = 4
BREADTH_FIRST = "breadth-first"
HIDDEN, HEADS, KEY_HEADS = 256, 8, 2


@dataclass(frozen=True)
class Way:
    """A way to train on the sequence."""

    name: str
    num_token_slices: int
    recompute: str
    key_value_gradients: str = "fp32"
    """`fp32` or `bf16`."""
    offloads: bool = False
    """Whether what is not read waits on the host; with two model chunks, breadth-first."""


def long_model(tokens: int, num_layers: int, window: int | None) -> ModelConfig:
    """A Llama with grouped keys and a byte-sized vocabulary.

    Args:
        window: tokens that a token attends to, itself included; None for all before it.
    """
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        seq_length=tokens,
        vocab_size=256,
        sliding_window=window,
        position_embedding_type="rope",
        normalization="rmsnorm",
        activation="swiglu",
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
    )


def step_flops(model: ModelConfig, *, recompute: bool) -> float:
    """FLOPs of a step on one sequence, causal attention and windows counted exactly, in flash kernels.

    Args:
        recompute: whether every layer is computed twice.
    """
    attention = linear = 0
    for block in model.blocks:
        of_block = model.seq_length * flops.linear_flops_per_token(model, block)
        linear += of_block
        attention += flops.block_forward_flops(model, block, model.seq_length) - of_block
    again = int(recompute)
    blocks = linear * (3 + again) + attention * (1 + flops.FLASH_BACKWARD_PER_FORWARD + again)
    return blocks + 3 * model.seq_length * flops.logits_flops_per_token(model)


def host_copies(model: ModelConfig, cut: TokenSlices) -> HostCopySettings:
    """What may wait on the host, of two stages with half of the layers each.

    Args:
        cut: lengths of the token slices.
    """
    key_value = flops.key_value_bytes_per_token(model, model.blocks[0], FP32_BYTES) * model.num_layers / 2
    inputs = (0.0, float(flops.stage_input_bytes_per_token(model, FP32_BYTES)))
    windows = (model.sliding_window,) * 2
    return HostCopySettings(cut.lengths, inputs, (key_value,) * 2, windows=windows)


def closed_form(model: ModelConfig, way: Way) -> float:
    """Bytes of the peak of a step on one sequence and one rank, weights and their gradients aside."""
    block, tokens, layers = model.blocks[0], model.seq_length, model.num_layers
    key_value, hidden = flops.key_value_bytes_per_token(model, block, FP32_BYTES), model.hidden_size * FP32_BYTES
    activations = flops.block_activation_bytes_per_token(model, block, FP32_BYTES) - key_value
    of_mlp = flops.block_activation_bytes_per_token(model, replace(block, num_key_value_heads=0), FP32_BYTES)
    # Gradients of two hidden states, of the input of the last product, of the gate, and of the first product, twice as
    # wide; or, once the MLP is done, of three hidden states.
    in_mlp = 2 * hidden + 4 * block.ffn_hidden_size * FP32_BYTES
    in_attention = 3 * hidden - of_mlp
    if way.recompute == "full":
        # Inputs of all other layers, keys and values, and one layer computed again.
        under_way = max(in_mlp, in_attention + key_value)
        return tokens * ((layers - 1) * hidden + layers * key_value + activations + under_way)
    length = -(-tokens // way.num_token_slices)
    in_reach = min(tokens - length, (model.sliding_window or tokens + 1) - 1)
    gradients = in_reach * key_value * (0.5 if way.key_value_gradients == "bf16" else 1.0)
    # A kernel finds gradients for all keys that it is given. Where token slices keep theirs apart, these were put
    # together for it, too.
    found = (min(tokens - length, in_reach + length)) * key_value
    put_together = found if way.offloads or in_reach < tokens - length else 0
    under_way = max(length * in_mlp, length * in_attention + found + put_together)
    if not way.offloads:
        return layers * (tokens * key_value + gradients + length * activations) + under_way
    cut = TokenSlices.uniform(tokens, way.num_token_slices)
    shape, copies = PipelineShape(2, 1, len(cut), 2), host_copies(model, cut)
    orders, costs = rank_orders(SCHEDULES[BREADTH_FIRST], shape), lowering_costs(shape)
    timeline = simulate_with_host_copies(orders, shape, costs, copies)
    of_a_stage = (
        tuple(each * layers / 2 for _ in range(2)) for each in (activations, key_value, gradients / (tokens - length))
    )
    token_bytes = TokenBytes(*of_a_stage, stage_input=copies.input_bytes)
    # Once the second stage is done, the first has the gradients of all its outputs before it.
    passed = (tokens - 2 * length) * hidden
    return peak(memory_over_time(timeline, cut.lengths, token_bytes)[0]) + passed + under_way


def build_way(model: ModelConfig, way: Way, threads: int) -> tuple[Any, Iterator[Any]]:
    """Return the engine of a way on this rank, and its batches."""
    import torch

    join(threads)
    cut = TokenSlices.uniform(model.seq_length, way.num_token_slices)
    more: dict[str, Any] = {"key_value_gradients": torch.bfloat16 if way.key_value_gradients == "bf16" else None}
    if way.offloads:
        more |= {"host_copies": host_copies(model, cut), "num_model_chunks": 2, "schedule": BREADTH_FIRST}
    engine = our_engine(
        model,
        cut,
        1,
        num_stages=1,
        recompute=way.recompute,
        **more,
    )
    return engine, batches(model, for_deepspeed=False)


def measured_peak(built: tuple[Any, Iterator[Any]]) -> tuple[int, int, int, float, float]:
    """Train one step: peak bytes of tensors, of a host's buffers, and of the process; seconds; and the loss."""
    engine, data = built
    batch = iter([next(data)])
    weights = sum(parameter.nbytes for parameter in engine.module.parameters())
    copies = engine._executor.copies
    start = time.perf_counter()
    with LiveBytes((lambda: copies._copies.buffers.held) if copies else lambda: 0) as live:
        loss = engine.train_batch(batch)
    seconds = time.perf_counter() - start
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return live.peak - weights, copies.most_host_bytes if copies else 0, resident, seconds, loss.item()


def memory(options: argparse.Namespace) -> Section:
    """Measure each way once."""
    model = long_model(options.tokens, options.layers, options.window)
    count = options.token_slices
    ways = [
        Way("stage", count, "stage"),
        Way("bf16", count, "stage", key_value_gradients="bf16"),
        Way("offload", count, "stage", offloads=True),
        Way("whole", 1, "full"),
    ]
    window = f", window {options.window}" if options.window else ""
    title = f"{model.seq_length:,} tokens{window}, {model.num_layers} layers of {HIDDEN}, {count} token slices, fp32"
    columns = ("way", "peak MB", "closed form MB", "error", "host MB", "process MB", "seconds", "loss")
    section = Section(title, columns)
    section.notes.append(
        f"A step has {step_flops(model, recompute=True):.2e} FLOPs, every layer computed twice. The process holds the "
        "libraries and what kernels allocate themselves, too."
    )
    for way in ways:
        if options.only and way.name not in options.only:
            continue

        def row(way: Way = way) -> Sequence[object]:
            with World(
                1, build_way, model, way, options.threads, variables=[{"OMP_NUM_THREADS": str(options.threads)}]
            ) as world:
                ((found, host, resident, seconds, loss),) = world.run(measured_peak)
            expected = closed_form(model, way)
            compared = f"{expected / 1e6:,.0f}", f"{expected / found - 1:+.1%}"
            others = (f"{host / 1e6:,.0f}", f"{resident / 1e6:,.0f}", f"{seconds:.1f}", f"{loss:.6f}")
            return (f"{found / 1e6:,.0f}", *compared, *others)

        section.guarded(way.name, row)
        progress(" | ".join(section.rows[-1]))
    return section


def build_both(model: ModelConfig, count: int, recompute: str) -> list[tuple[Any, Iterator[Any]]]:
    """Return engines of this rank with one token slice and with several, and their batches."""
    join()
    cuts = TokenSlices.uniform(model.seq_length, 1), balanced_token_slices(model, count)
    engines = [our_engine(model, cut, 1, num_stages=2, recompute=recompute) for cut in cuts]
    return [(engine, batches(model, for_deepspeed=False)) for engine in engines]


def timed_step(built: list[tuple[Any, Iterator[Any]]], which: int) -> tuple[float, float, float, float]:
    """Train one step: its seconds, those that the core of this rank computed, bubble ratio and loss."""
    engine, data = built[which]
    start, computed = time.perf_counter(), time.process_time()
    with engine.timeline() as timelines:
        loss = engine.train_batch(data)
    computed = time.process_time() - computed
    return time.perf_counter() - start, computed, timelines[0].bubble_ratio, loss.item()


def speed(options: argparse.Namespace) -> Section:
    """Time a step of two stages with one token slice and with several, in turns, after one that warms up."""
    model = long_model(options.tokens, options.layers, options.window)
    count = options.token_slices
    section = Section(
        f"{model.seq_length:,} tokens, one sequence, two stages, recompute {options.recompute}, fp32",
        ("token slices", "median s", "speed-up", "computed s, both ranks", "bubble", "loss"),
    )
    times: list[list[float]] = [[], []]
    last = [(0.0, 0.0, 0.0)] * 2
    with World(2, build_both, model, count, options.recompute, variables=[{"OMP_NUM_THREADS": "1"}] * 2) as world:
        for turn in range(options.rounds + options.warm_up):
            for which in range(2):
                found = world.run(timed_step, which)
                last[which] = sum(each[1] for each in found), *found[0][2:]
                if turn >= options.warm_up:
                    times[which].append(max(seconds for seconds, *_ in found))
    base = median(times[0])
    for which, name in enumerate(("1", f"{count} balanced")):
        middle = median(times[which])
        computed, bubble, loss = last[which]
        row = (f"{middle:.2f}", f"{base / middle:.2f}", f"{computed:.2f}", f"{bubble:.1%}", f"{loss:.6f}")
        section.add(name, *row)
    bound = 2 * count / (count + 1)
    section.notes.append(f"Equal token slices without any overhead would take 1 / {bound:.2f} of one: 2 S / (S + 1).")
    return section


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "speed"))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--token-slices", type=int, default=16, metavar="S")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--window", type=int, metavar="W", help="sliding window of all layers")
    parser.add_argument("--only", nargs="+", choices=("stage", "bf16", "offload", "whole"), help="ways of `memory`")
    parser.add_argument("--threads", type=int, default=1, help="of the rank of `memory`")
    parser.add_argument("--recompute", choices=("none", "stage", "full"), default="none", help="of `speed`")
    parser.add_argument("--rounds", type=int, default=3, help="of `speed`")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds of `speed` that are not counted")
    options = parser.parse_args(argv)
    print((memory if options.what == "memory" else speed)(options).markdown())


if __name__ == "__main__":
    main()
