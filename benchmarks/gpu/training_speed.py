"""Model FLOPs utilization of one device: token slices beside the unsliced run and a plain torch loop.

Each contestant runs in a process of its own, with the environment that the trainer sets. One that has no room computes
its layers again in the backward; then all are measured so, and the row says it.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from benchmarks.gpu.machine import Sharing, has_gpu, join
from benchmarks.measuring.plain_llama import PlainLlama, train_step
from benchmarks.measuring.report import Section, progress
from benchmarks.measuring.workload import batches, our_engine
from benchmarks.measuring.worlds import RankFailed, World
from benchmarks.plain_loop import adamw
from benchmarks.utilization import seconds_of
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.parallel.balance import balanced_token_slices
from megatron_terapipe.training.records.throughput import Throughput, peak_tflops_here

PLAIN = 0
"""Instead of a number of token slices: the plain loop."""

_TIMEOUT_S = 900.0
_COLUMNS = ("contestant", "s an iteration", "TFLOP/s", "MFU", "over unsliced", "over plain torch", "peak GiB", "loss")


def training_speed(model: ModelConfig, name: str, counts: tuple[int, ...], *, rounds: int, sharing: Sharing) -> Section:
    """Measure a plain loop, then runs in so many token slices each: a row for each."""
    dtype = "bf16" if has_gpu() else "fp32"
    table = Section(f"{name}, {model.seq_length} tokens, one sequence an iteration, {dtype}", _COLUMNS)
    contestants = (PLAIN, *counts)
    found: dict[int, tuple[float, float, float] | RankFailed] = {}
    for recompute in ("none", "full"):
        found = {count: _measured(model, count, recompute, rounds, sharing) for count in contestants}
        if not any("out of memory" in str(each) for each in found.values()):
            break
    table.notes.append(f"Recomputation: {recompute}. The plain loop keeps weights and optimizer in its one dtype.")
    peak = peak_tflops_here(dtype)
    base = {count: each[0] for count, each in found.items() if not isinstance(each, RankFailed)}
    for count, each in found.items():
        contestant = "plain torch" if count == PLAIN else f"{count} token slices" if count > 1 else "unsliced"
        if isinstance(each, RankFailed):
            table.fail(contestant, each)
            continue
        seconds, gibibytes, loss = each
        speed = Throughput.of(model, num_sequences=1, seconds=seconds, world_size=1, peak_tflops=peak)
        mfu = "" if speed.mfu is None else f"{speed.mfu:.1%}"
        ratios = [f"{seconds / base[other] - 1:+.1%}" if other in base else "" for other in (1, PLAIN)]
        table.add(
            contestant,
            f"{seconds:.4f}",
            f"{speed.tflops_per_device:.1f}",
            mfu,
            *ratios,
            f"{gibibytes:.1f}" if gibibytes else "",
            f"{loss:.4f}",
        )
    return table


def _measured(
    model: ModelConfig, count: int, recompute: str, rounds: int, sharing: Sharing
) -> tuple[float, float, float] | RankFailed:
    """Seconds of an iteration, most memory in GiB and last loss; or why there are none."""
    progress(f"{model.seq_length} tokens, {count or 'plain'}, recompute {recompute}")
    with tempfile.TemporaryDirectory() as folder:
        log, variables = Path(folder, "log.txt"), [sharing.of_rank(0, {})]
        try:
            with World(1, _build, model, count, recompute, variables=variables, timeout_s=_TIMEOUT_S, log=log) as world:
                return world.run(_time, rounds)[0]
        except RankFailed as failed:
            return failed


def _build(model: ModelConfig, count: int, recompute: str) -> Callable[[], float]:
    """A step of a contestant; it returns the loss."""
    join(_TIMEOUT_S)
    if count == PLAIN:
        return _plain_step(model, recompute)
    cut, on_gpu = balanced_token_slices(model, count), has_gpu()
    engine = our_engine(model, cut, 1, num_stages=1, recompute=recompute, optimizer=adamw, clip=1.0, bf16=on_gpu)
    data = batches(model, for_deepspeed=False)
    return lambda: engine.train_batch(data).item()


def _plain_step(model: ModelConfig, recompute: str) -> Callable[[], float]:
    device = torch.device(get_accelerator().current_device_name())
    module = PlainLlama(model, recompute=recompute == "full").to(device, torch.bfloat16 if has_gpu() else torch.float32)
    optimizer = adamw(module)

    def on_device() -> Iterator[tuple[Tensor, Tensor]]:
        for tokens, (labels, _) in batches(model, for_deepspeed=True):
            yield tokens.to(device), labels.to(device)

    data = on_device()
    return lambda: train_step(module, optimizer, data, 1)


def _time(step: Callable[[], float], rounds: int) -> tuple[float, float, float]:
    losses: list[Any] = []
    seconds = seconds_of(lambda: losses.append(step()), rounds)
    accelerator = get_accelerator()
    used = accelerator.max_memory_allocated() if has_gpu() else 0
    return seconds, used / 2**30, losses[-1]
