"""Measurements on one rank: token slices, sums of bf16 gradients, a plain torch loop, utilization, and latents.

Cost of token slices on one rank: a step with token slices over a step without, in one run.

python -m benchmarks.one_rank overhead [--token-slices 2 4 8 16]

Cost of summing bf16 gradients in fp32, token slice by token slice, on one rank.

    python -m benchmarks.one_rank bf16 [--token-slices 8] [--hidden-size 512]

Two ways take turns in one run, each with one token slice and with several:

    by DeepSpeed    after each backward, a pass over all weights: zero, cast, add (`BF16_Optimizer.update_hp_grads`)
    in products     products add to the fp32 sums; one pass over norms and biases

and each is compared with itself on one token slice, and with the other. Medians.

Time of the trainer on one rank, beside a plain torch loop over the same model and batch.

    python -m benchmarks.one_rank plain [--token-slices 1 4]

The engines take turns; every one starts from the same weights, and the losses are compared.

Model FLOPs utilization of one device by token slices, and of attention compared with torch's over whole sequences.

    python -m benchmarks.one_rank utilization --model-preset llama3-1b --seq-length 8192 # one GPU, bf16
    DS_ACCELERATOR=cpu python -m benchmarks.one_rank utilization --layers 2 --seq-length 2048    # to try it

Prints seconds of an iteration, TFLOP/s (model FLOPs, attention counted over whole sequences, as most published figures
are) and, where the device's peak is known or given, the utilization, so counted and with causal attention; then forward
and backward of one layer's attention.

Token slices of a layer with latent attention that keeps latents, beside one that keeps keys and values.

    python -m benchmarks.one_rank latents [--tokens 512] [--token-slices 8]

CPU seconds of each token slice, forward and backward, and their ratio; beside it the ratio of the formula: four
products of the expansion for each token before the token slice, at the rate of that product by itself.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measuring.command import Parser, run_named
from benchmarks.measuring.plain_llama import PlainLlama, train_step
from benchmarks.measuring.workload import batches, benchmark_model, join_alone, our_engine, seconds_in_turns
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.gradients.weight_gradients import set_sum
from deepspeed_ext.runtime.initialize import init_distributed
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.flops import balanced_token_slices, iteration_flops, latent_expansion
from megatron_terapipe.config.presets import find_preset
from megatron_terapipe.inference import WholeModel
from megatron_terapipe.model.attention import LatentAttention
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from megatron_terapipe.training.run import peak_tflops_here


def overhead(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = Parser(description=__doc__)
    parser.add_argument("--token-slices", type=int, nargs="+", default=[2, 4, 8, 16], metavar="S")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4, help="as many as a stage of a model of 8 has")
    options = parser.parse_args(argv)
    join_alone()
    model = benchmark_model(options.layers)
    cuts = {"1": TokenSlices.uniform(model.seq_length, 1)}
    for count in options.token_slices:
        cuts[f"{count} uniform"] = TokenSlices.uniform(model.seq_length, count)
        cuts[f"{count} balanced"] = balanced_token_slices(model, count)
    engines = {name: our_engine(model, cut, 1, num_stages=1) for name, cut in cuts.items()}
    data = batches(model, for_deepspeed=False)
    steps = {name: partial(engine.train_batch, data) for name, engine in engines.items()}
    times = seconds_in_turns(steps, options.rounds)
    base = median(times["1"])
    print(f"{'token slices':>14} {'median s':>9} {'over 1':>7}")
    for name, seconds in times.items():
        print(f"{name:>14} {median(seconds):>9.3f} {median(seconds) / base - 1:>7.1%}")
    dist.destroy_process_group()


def as_deepspeed_does(engine: Any) -> None:
    """Let an engine with a `BF16_Optimizer` add gradients up as DeepSpeed's own pipeline engine does."""
    for weight in engine.module.parameters():
        set_sum(weight, None)

    def pass_over_all() -> None:
        engine.optimizer.update_hp_grads(clear_lp_grads=False)
        engine.optimizer.clear_lp_grads()

    engine._executor._accumulated = SimpleNamespace(collect=pass_over_all)


def bf16(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = Parser(description=__doc__)
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


def plain_loop(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = Parser(description=__doc__)
    parser.add_argument("--token-slices", type=int, nargs="+", default=[1, 4], metavar="S")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args(argv)
    join_alone()
    model = benchmark_model(options.layers, llama=True)
    steps = {"plain torch": plain(model)}
    steps |= {f"{count} token slices": ours(model, count) for count in options.token_slices}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    times = seconds_in_turns(
        {name: lambda name=name, step=step: losses[name].append(step()) for name, step in steps.items()}, options.rounds
    )
    base = median(times["plain torch"])
    print(f"{'':>16} {'median s':>9} {'over plain':>10} {'last loss':>10}")
    for name, seconds in times.items():
        over = median(seconds) / base - 1
        print(f"{name:>16} {median(seconds):>9.3f} {over:>10.1%} {losses[name][-1]:>10.5f}")
    dist.destroy_process_group()


def seconds_of(run: Callable[[], Any], rounds: int) -> float:
    """Median seconds of a call after a warm-up, with an empty queue of the device before and after."""
    times = []
    for turn in range(rounds + 1):
        get_accelerator().synchronize()
        start = time.perf_counter()
        run()
        get_accelerator().synchronize()
        times += [time.perf_counter() - start] if turn else []
    return median(times)


def attention_inputs(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values [1, N, heads, D] of a whole sequence."""
    heads = (model.num_attention_heads, model.num_key_value_heads, model.num_key_value_heads)
    shapes = [(1, model.seq_length, count, model.kv_channels) for count in heads]
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def sdpa(inputs: list[Tensor]) -> None:
    """Run torch's own attention over whole sequences, forward and backward; inputs are [1, N, heads, D]."""
    heads_first = (each.transpose(1, 2) for each in inputs)
    F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).sum().backward()


def in_token_slices(inputs: list[Tensor], cut: TokenSlices) -> None:
    """Run our attention, token slice by token slice, forward and backward.

    Args:
        inputs: queries, keys and values, each [1, N, heads, D].
    """
    state = SequenceState(cut)
    outputs = [
        state.past(0, index).attend(*(each[:, start:end] for each in inputs))
        for index, (start, end) in enumerate(cut.bounds())
    ]
    for output in reversed(outputs):
        output.sum().backward()


def model_of(options: argparse.Namespace) -> ModelConfig:
    """The preset at the sequence length asked for, or the model of the other benchmarks."""
    if options.model_preset is None:
        model = benchmark_model(options.layers or 8, llama=True)
        return replace(model, seq_length=options.seq_length, max_position_embeddings=options.seq_length)
    fields = dict(find_preset(options.model_preset).settings)
    fields |= {"seq_length": options.seq_length, "max_position_embeddings": options.seq_length}
    return ModelConfig(**(fields | ({"num_layers": options.layers} if options.layers else {})))


def utilization(argv: Sequence[str] | None = None) -> None:
    """Measure and print two tables."""
    parser = Parser(description=__doc__)
    parser.add_argument("--model-preset", help="default: the model of the other benchmarks, with Llama's parts")
    parser.add_argument("--layers", type=int, help="layers instead of the preset's")
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--token-slices", type=int, nargs="+", default=[1, 4, 16], metavar="S")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak-tflops", type=float, help="of the device; left out, by its name")
    options = parser.parse_args(argv)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29515"}
    os.environ.update(alone)
    on_cpu = get_accelerator().device_name() == "cpu"
    init_distributed(dist_backend="gloo" if on_cpu else "nccl", verbose=False)
    model, dtype = model_of(options), "fp32" if on_cpu else "bf16"
    peak = options.peak_tflops or peak_tflops_here(dtype)
    print(f"{model.num_layers} layers, hidden size {model.hidden_size}, {model.seq_length} tokens, {dtype}")
    print(f"{'token slices':>12} {'s':>8} {'TFLOP/s':>9} {'MFU':>7} {'causal':>7} {'over first':>10}")
    first = 0.0
    for count in options.token_slices:
        engine = our_engine(
            model, balanced_token_slices(model, count), 1, num_stages=1, recompute=options.recompute, bf16=not on_cpu
        )
        data = batches(model, for_deepspeed=False)
        seconds = seconds_of(lambda engine=engine, data=data: engine.train_batch(data), options.rounds)
        first = first or seconds
        tflops, causal = (iteration_flops(model, 1, causal=each) / seconds / 1e12 for each in (False, True))
        mfu, causal_mfu = ("" if peak is None else f"{each / peak:.1%}" for each in (tflops, causal))
        numbers = f"{seconds:>8.3f} {tflops:>9.2f} {mfu:>7} {causal_mfu:>7} {seconds / first - 1:>10.1%}"
        print(f"{count:>12} {numbers}", flush=True)
        del engine
    device = torch.device(get_accelerator().current_device_name())
    inputs = attention_inputs(model, device, torch.float32 if on_cpu else torch.bfloat16)
    whole = seconds_of(lambda: sdpa(inputs), options.rounds)
    print(f"attention of one layer, forward and backward\n{'torch SDPA':>12} {whole:>8.4f}")
    for count in options.token_slices:
        cut = balanced_token_slices(model, count)
        seconds = seconds_of(lambda cut=cut: in_token_slices(inputs, cut), options.rounds)
        print(f"{count:>12} {seconds:>8.4f} {'':>9} {'':>7} {'':>7} {seconds / whole - 1:>10.1%}")
    dist.destroy_process_group()


def latents(argv: Sequence[str] | None = None) -> None:
    """Measure both layers in turns and print a table."""
    parser = Parser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="of a token slice")
    parser.add_argument("--token-slices", type=int, default=8, metavar="S")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    count, tokens = options.token_slices, options.tokens
    model = ModelConfig(
        num_layers=1,
        hidden_size=512,
        num_attention_heads=8,
        multi_latent_attention=True,
        kv_lora_rank=256,
        qk_head_dim=64,
        qk_pos_emb_head_dim=32,
        v_head_dim=64,
        seq_length=count * tokens,
        vocab_size=256,
        position_embedding_type="rope",
        disable_bias_linear=True,
    )
    weights = latent_expansion(model, model.blocks[0].latent).weights
    layers = [
        LatentAttention(model, model.blocks[0], TensorParallelRanks(), latents_kept=latents_kept)
        for latents_kept in (False, True)
    ]
    hidden = torch.randn(1, count * tokens, model.hidden_size)
    # The first round warms up.
    turns = [[_seconds_by_token_slice(layer, hidden, count) for layer in layers] for _ in range(options.rounds + 1)]
    expanded, latent = ([median(each) for each in zip(*way, strict=True)] for way in zip(*turns[1:], strict=True))
    matrix, several = torch.randn(weights // 256, 256), hidden.view(-1, 256)
    start = time.process_time()
    for _ in range(10 * options.rounds):
        several @ matrix.t()
    of_token = 4 * (time.process_time() - start) / (10 * options.rounds * len(several))
    print(f"{'token slice':>12} {'expanded s':>11} {'latent s':>9} {'ratio':>6} {'formula':>8}")
    for index, (one, other) in enumerate(zip(expanded, latent, strict=True)):
        print(f"{index:>12} {one:>11.3f} {other:>9.3f} {other / one:>6.2f} {1 + index * tokens * of_token / one:>8.2f}")


def _seconds_by_token_slice(layer: LatentAttention, hidden: Tensor, count: int) -> list[float]:
    """CPU seconds of the forward and backward of each token slice."""
    parts = hidden.chunk(count, dim=1)
    state = SequenceState(TokenSlices.uniform(hidden.shape[1], count), sequences=(0,))
    outputs, seconds = [], [0.0] * count
    for index, part in enumerate(parts):
        start = time.process_time()
        outputs.append(layer(part.clone().requires_grad_(), state.past(0, index)))
        seconds[index] += time.process_time() - start
    for index in reversed(range(count)):
        output = outputs.pop()
        start = time.process_time()
        output.backward(torch.ones_like(output))
        seconds[index] += time.process_time() - start
    return seconds


def main(argv: Sequence[str] | None = None) -> object:
    """Run the named measurement, by default the first."""
    ways = {"overhead": overhead, "bf16": bf16, "plain": plain_loop, "utilization": utilization, "latents": latents}
    return run_named(ways, argv)


if __name__ == "__main__":
    main()
