"""Model FLOPs utilization of one device by token slices, and attention alone beside torch's own over whole sequences.

    python -m benchmarks.utilization --model-preset llama3-1b --seq-length 8192 --token-slices 1 4 16    # one GPU, bf16
    DS_ACCELERATOR=cpu python -m benchmarks.utilization --layers 2 --seq-length 2048                     # to try it

Prints seconds of an iteration, TFLOP/s (model FLOPs, attention counted over whole sequences, as published figures are)
and, where the device's peak is known or given, the utilization; then forward and backward of one layer's attention.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measuring.workload import batches, benchmark_model, our_engine
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.sequence_state import SequenceState
from deepspeed_ext.runtime.initialize import init_distributed
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.pipeline import balanced_token_slices
from megatron_terapipe.config.presets import find_preset
from megatron_terapipe.training.instruments import Throughput, peak_tflops_here


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
        cut: lengths of the token slices.
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


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    print(f"{'token slices':>12} {'s':>8} {'TFLOP/s':>9} {'MFU':>7} {'over first':>10}")
    first = 0.0
    for count in options.token_slices:
        engine = our_engine(
            model, balanced_token_slices(model, count), 1, num_stages=1, recompute=options.recompute, bf16=not on_cpu
        )
        data = batches(model, for_deepspeed=False)
        seconds = seconds_of(lambda engine=engine, data=data: engine.train_batch(data), options.rounds)
        first = first or seconds
        found = Throughput.of(model, num_sequences=1, seconds=seconds, world_size=1, peak_tflops=peak)
        mfu = "" if found.mfu is None else f"{found.mfu:.1%}"
        numbers = f"{seconds:>8.3f} {found.tflops_per_device:>9.2f} {mfu:>7} {seconds / first - 1:>10.1%}"
        print(f"{count:>12} {numbers}", flush=True)
        del engine
    device = torch.device(get_accelerator().current_device_name())
    inputs = attention_inputs(model, device, torch.float32 if on_cpu else torch.bfloat16)
    whole = seconds_of(lambda: sdpa(inputs), options.rounds)
    print(f"attention of one layer, forward and backward\n{'torch SDPA':>12} {whole:>8.4f}")
    for count in options.token_slices:
        cut = balanced_token_slices(model, count)
        seconds = seconds_of(lambda cut=cut: in_token_slices(inputs, cut), options.rounds)
        print(f"{count:>12} {seconds:>8.4f} {'':>9} {'':>7} {seconds / whole - 1:>10.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
