"""Steps of Llama on one device, with token slices, without, or in plain torch: times, memory, MFU, and kernels."""

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring.plain_llama import PlainLlama, train_step
from benchmarks.measuring.report import Section, has_gpu, join, one_line, progress
from benchmarks.measuring.traces import Trace, trace_of
from benchmarks.measuring.workload import batches, benchmark_model, our_engine
from benchmarks.one_rank import adamw
from deepspeed_ext.runtime.attention.flash_kernels import activate_flash_attention
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.flops import balanced_token_slices, iteration_flops
from megatron_terapipe.config.presets import find_preset
from megatron_terapipe.launch.launcher import free_port
from megatron_terapipe.training.run import peak_tflops_here
from megatron_terapipe.training.trainer import sample_heads

TINY = "tiny"
"""Name of a model to try this program with."""

PLAIN = 0
"""Instead of a number of token slices: the plain loop."""

_WARM_UP, _TIMED = 2, 3
"""Steps; the first compiles and allocates the state of the optimizer, the second activations in addition to it."""
_LONGEST = 25
_TIMEOUT_S = 300.0
_GIB = 2**30

Step = Callable[[], float]
"""A step of training; it returns the loss."""


@dataclass(frozen=True)
class Measured:
    """Steps of a contestant."""

    step: Step
    seconds: list[float]
    loss: float
    recompute: str
    memory: tuple[int, int, int] | None
    """Most bytes of tensors, most bytes that torch's allocator had, bytes of the device in use; None on a CPU."""


def training(model: str, seq_length: int, token_slices: int) -> Iterator[Section]:
    """Train a few steps, without recomputation if they fit; then list the kernels of one more.

    Args:
        model: name of a preset, or `TINY`.
        token_slices: their number; `PLAIN` for the plain loop.
    """
    config, dtype = _config(model, seq_length), "bf16" if has_gpu() else "fp32"
    name = f"{seq_length}, {'plain torch' if token_slices == PLAIN else token_slices}"
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    join(_TIMEOUT_S)
    steps = Section(
        f"Steps of {model}, one sequence a step, {dtype}",
        (
            *("tokens, token slices", "recomputed", "s a step", "tokens/s", "TFLOP/s", "causal TFLOP/s", "MFU"),
            *("causal MFU", "peak GiB of tensors", "of the allocator", "of the device", "loss"),
        ),
        notes=[
            "The plain loop keeps weights and optimizer in one dtype, which favours it; its first weights are others."
        ],
    )
    samples = sample_heads(config, torch.device(get_accelerator().current_device_name()), dtype)
    steps.notes += [f"{name}: {line.strip()}" for line in activate_flash_attention(samples)]
    measured = _first_that_fits(config, token_slices, name, steps)
    if measured is not None:
        steps.add(name, *_cells(config, measured, peak_tflops_here(dtype)))
    yield steps
    if measured is not None:
        yield from profiled(_trace(measured.step), name, config.num_layers * max(1, token_slices))


def profiled(trace: Trace, name: str, num_parts: int) -> Iterator[Section]:
    """Tables of the kernels of a step.

    Args:
        num_parts: blocks x token slices of the step.
    """
    kind = "kernels" if trace.of_device else "operators"
    about = Section(
        f"The {kind} of one step",
        (
            *("tokens, token slices", "span ms", "busy ms", "idle", kind, "copies", "launches"),
            *(f"{kind} a block and slice", "host ms a block and slice"),
        ),
        notes=[
            "Host: from the first call of CUDA to the last, without waits: calls that synchronise, and the time of a "
            "launch above the median, as at a full queue of the device. The profiler makes the host slower."
        ],
    )
    about.add(
        name,
        f"{trace.span / 1e3:.2f}",
        f"{trace.busy / 1e3:.2f}",
        f"{trace.idle_share:.1%}",
        len(trace.kernels),
        len(trace.copies),
        trace.launches,
        f"{len(trace.kernels) / num_parts:.1f}",
        f"{trace.host_time / 1e3 / num_parts:.3f}" if trace.host else "",
    )
    yield about
    longest = Section(f"Longest {kind} of a step: {name}", ("name", "launches", "us each", "ms", "share of all"))
    every = sum(call.duration for call in trace.kernels)
    for each in trace.longest(_LONGEST):
        cells = (f"{each.duration / each.count:.1f}", f"{each.duration / 1e3:.2f}", f"{each.duration / every:.1%}")
        longest.add(each.name, each.count, *cells)
    yield longest


def _config(model: str, seq_length: int) -> ModelConfig:
    lengths = {"seq_length": seq_length, "max_position_embeddings": seq_length}
    if model == TINY:
        return replace(benchmark_model(1, llama=True), **lengths)
    return ModelConfig(**dict(find_preset(model).settings) | lengths)


def _first_that_fits(config: ModelConfig, token_slices: int, name: str, table: Section) -> Measured | None:
    """Steps without recomputation, or with it where they do not fit; None where they do not fit at all."""
    for recompute in ("none", "full"):
        progress(f"{name}, recompute {recompute}")
        try:
            return _measured(config, token_slices, recompute)
        except RuntimeError as error:
            # Libraries of CUDA have errors of their own for it.
            if not any(each in str(error) for each in ("out of memory", "ALLOC_FAILED")):
                raise
            message = one_line(str(error))
        # Here the error is gone, and with it the frames that hold tensors.
        gc.collect()
        get_accelerator().empty_cache()
        left = f"{torch.cuda.memory_allocated() / _GIB:.1f} GiB stay allocated" if has_gpu() else ""
        table.notes.append(f"{name}, recompute {recompute}: {message} {left}".rstrip())
    table.add(name, "full", "failed: does not fit, see the notes")
    return None


def _measured(config: ModelConfig, token_slices: int, recompute: str) -> Measured:
    """Warm up, then time steps one by one, each from an idle device to an idle device."""
    accelerator, build = get_accelerator(), _plain_step if token_slices == PLAIN else _sliced_step
    step, seconds, loss = build(config, token_slices, recompute), [], 0.0
    for number in range(_WARM_UP + _TIMED):
        if number == _WARM_UP and has_gpu():
            torch.cuda.reset_peak_memory_stats()
        accelerator.synchronize()
        start = perf_counter()
        loss = step()
        accelerator.synchronize()
        seconds.append(perf_counter() - start)
        progress(f"step {number + 1}: {seconds[-1]:.3f} s")
    memory = None
    if has_gpu():
        free, total = torch.cuda.mem_get_info()
        memory = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free)
    return Measured(step, seconds[_WARM_UP:], loss, recompute, memory)


def _sliced_step(config: ModelConfig, token_slices: int, recompute: str) -> Step:
    cut, on_gpu = balanced_token_slices(config, token_slices), has_gpu()
    # As the trainer sets them.
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = False
    engine = our_engine(config, cut, 1, num_stages=1, recompute=recompute, optimizer=adamw, clip=1.0, bf16=on_gpu)
    data = batches(config, for_deepspeed=False)
    return lambda: engine.train_batch(data).item()


def _plain_step(config: ModelConfig, _: int, recompute: str) -> Step:
    device, dtype = torch.device(get_accelerator().current_device_name()), torch.get_default_dtype()
    if has_gpu():
        dtype = torch.bfloat16
    with device:
        module = PlainLlama(config, recompute=recompute == "full").to(dtype)
    optimizer = adamw(module)

    def on_device() -> Iterator[tuple[Tensor, Tensor]]:
        for tokens, (labels, _) in batches(config, for_deepspeed=True):
            yield tokens.to(device), labels.to(device)

    data = on_device()
    return lambda: train_step(module, optimizer, data, 1)


def _cells(config: ModelConfig, measured: Measured, peak: float | None) -> Iterator[str]:
    seconds = median(measured.seconds)
    yield measured.recompute
    yield f"{seconds:.4f} ({min(measured.seconds):.4f} to {max(measured.seconds):.4f})"
    yield f"{config.seq_length / seconds:,.0f}"
    rates = [iteration_flops(config, 1, causal=causal) / seconds / 1e12 for causal in (False, True)]
    yield from (f"{rate:.3g}" if rate < 1 else f"{rate:.1f}" for rate in rates)
    yield from ("" if peak is None else f"{rate / peak:.1%}" for rate in rates)
    yield from ("",) * 3 if measured.memory is None else (f"{each / _GIB:.2f}" for each in measured.memory)
    yield f"{measured.loss:.4f}"


def _trace(step: Step) -> Trace:
    """One step, as the profiler records it."""
    kind = ProfilerActivity.CUDA if has_gpu() else ProfilerActivity.CPU
    progress("one step under the profiler")
    with profile(activities=[kind]) as profiler:
        step()
        get_accelerator().synchronize()
    return trace_of(profiler)
