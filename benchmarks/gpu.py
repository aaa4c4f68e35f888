"""Speed on one CUDA device, as one table: `make gpu-bench`.

python -m benchmarks.gpu                  # llama3-1b in bf16, 8k and 32k tokens, and single operators
python -m benchmarks.gpu --cpu --tiny     # on a CPU over gloo, to try the program itself
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring.command import Parser
from benchmarks.measuring.plain_llama import PlainLlama, train_step
from benchmarks.measuring.report import (
    SHARINGS,
    Section,
    Sharing,
    has_gpu,
    join,
    possible_sharings,
    progress,
    publish,
    software,
)
from benchmarks.measuring.workload import batches, benchmark_model, our_engine
from benchmarks.measuring.worlds import RankFailed, World
from benchmarks.one_rank import adamw, seconds_of
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.cuda_environment import HARDWARE_QUEUES
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.pipeline import balanced_token_slices
from megatron_terapipe.config.presets import find_preset
from megatron_terapipe.training.instruments import peak_tflops_here, tflops_per_device

_LINKS_TIMEOUT_S = 300.0


def receives(sharing: Sharing, *, delay_s: float) -> Section:
    """Post two receives on a new communicator, each before its send; return a table with a row for each.

    Args:
        sharing: how ranks share a GPU.
        delay_s: seconds from the receive to the send.
    """
    progress("receives that wait")
    table = Section(
        f"irecv posted {delay_s:g} s before its isend: its cost on the receiving host",
        ("message of the communicator", "irecv returned after, s", "message was there after, s"),
    )
    try:
        with tempfile.TemporaryDirectory() as folder, _world(sharing, build_link, folder=folder, more={}) as world:
            rows = world.run(_receives, delay_s)[0]
    except RankFailed as failed:
        table.fail("both", failed)
        return table
    for name, (returned, there) in zip(("first", "second"), rows, strict=True):
        table.add(name, f"{returned:.3f}", f"{there:.3f}")
    return table


def build_link() -> dist.ProcessGroup:
    """A communicator of two ranks that has carried nothing yet."""
    join(_LINKS_TIMEOUT_S)
    group = dist.new_group([0, 1])
    dist.barrier()
    return group


def _receives(group: dist.ProcessGroup, delay_s: float) -> list[tuple[float, float]]:
    accelerator, rank = get_accelerator(), dist.get_rank()
    message = torch.ones(1024, device=accelerator.current_device_name())
    rows = []
    for _ in range(2):
        dist.barrier()
        accelerator.synchronize()
        start = time.perf_counter()
        if rank == 1:
            time.sleep(delay_s)
            work = dist.isend(message, 0, group=group)
        else:
            work = dist.irecv(message, 1, group=group)
        returned = time.perf_counter() - start
        work.wait()
        accelerator.synchronize()
        rows.append((returned, time.perf_counter() - start))
    return rows


def queues(sharing: Sharing, *, seq_length: int, rounds: int) -> Section:
    """Let worlds with different numbers of hardware queues take turns; return a table with a row for each.

    Args:
        sharing: how ranks share a GPU.
    """
    progress("steps by hardware queues")
    table = Section(
        "Steps of two ranks by hardware queues: interleaved, (P, V, M, S) = (2, 2, 4, 4)",
        (HARDWARE_QUEUES, "median s", "over 32"),
        notes=[f"Ranks share by {sharing.name}. Two ranks on one GPU show which is faster, not how fast."],
    )
    times: dict[int, list[float]] = {number: [] for number in (32, 8)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as worlds_end:
        try:
            worlds = {}
            for number in times:
                more = {HARDWARE_QUEUES: str(number)}
                world = _world(sharing, _build_steps, seq_length, folder=folder, more=more)
                worlds[number] = worlds_end.enter_context(world)
            for turn in range(rounds + 1):
                for number, world in worlds.items():
                    seconds = max(world.run(_step))
                    times[number] += [seconds] if turn else []  # the first one warms up
        except RankFailed as failed:
            table.fail("all", failed)
            return table
    base = median(times[32])
    for number, each in times.items():
        table.add(number, f"{median(each):.4f}", f"{median(each) / base - 1:+.1%}")
    return table


def _build_steps(seq_length: int) -> Callable[[], Any]:
    join(_LINKS_TIMEOUT_S)
    model = replace(benchmark_model(4), seq_length=seq_length, max_position_embeddings=seq_length)
    engine = our_engine(
        model,
        balanced_token_slices(model, 4),
        4,
        num_stages=2,
        schedule="interleaved",
        num_model_chunks=2,
        bf16=has_gpu(),
    )
    data = batches(model, for_deepspeed=False)
    return lambda: engine.train_batch(data)


def _step(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    get_accelerator().synchronize()
    return time.perf_counter() - start


def _world(sharing: Sharing, build: Callable[..., Any], *arguments: Any, folder: str, more: dict[str, str]) -> World:
    variables = [sharing.of_rank(rank, more) for rank in range(2)]
    return World(2, build, *arguments, variables=variables, timeout_s=_LINKS_TIMEOUT_S, log=Path(folder, "log.txt"))


_REPEATS = 20
"""Products in one measurement, so that launching the first does not count."""


def products(_: object, rounds: int, sizes: Sequence[tuple[int, int, int]]) -> Section:
    """Measure both ways to add a product to an fp32 gradient."""
    table = Section(
        "Gradient of a weight [out, in] in fp32 from bf16: cast and add, and in the product",
        ("tokens, out, in", "cast and add, us", "addmm.dtype_out, us", "ratio", "errors, relative"),
    )
    for tokens, out, into in sizes:
        table.guarded(f"{tokens}, {out}, {into}", lambda size=(tokens, out, into): _products(size, rounds))
    return table


def _products(size: tuple[int, int, int], rounds: int) -> tuple[str, ...]:
    tokens, out, into = size
    device = torch.device(get_accelerator().current_device_name())
    gradient, inputs = (torch.randn(tokens, width, device=device, dtype=torch.bfloat16) for width in (out, into))
    exact = gradient.float().t() @ inputs.float()

    def cast_and_add(total: Tensor) -> None:
        total.add_(gradient.t() @ inputs)

    def in_the_product(total: Tensor) -> None:
        torch.ops.aten.addmm.dtype_out(total, gradient.t(), inputs, torch.float32, out=total)

    times, errors = [], []
    for way in (cast_and_add, in_the_product):
        total = torch.zeros(out, into, device=device)
        way(total)
        errors.append(float((total - exact).norm() / exact.norm()))
        seconds = seconds_of(lambda way=way, total=total: [way(total) for _ in range(_REPEATS)], rounds)
        times.append(seconds / _REPEATS * 1e6)
    return f"{times[0]:.1f}", f"{times[1]:.1f}", f"{times[1] / times[0]:.3f}", f"{errors[0]:.1e}, {errors[1]:.1e}"


def kernels(_: object, num_token_slices: int, seq_length: int) -> Section:
    """Count the kernels of three models."""
    what = "Kernels" if has_gpu() else "Operators"
    table = Section(
        f"{what} of a block and token slice, by torch.profiler: 3 layers less 2, over {num_token_slices} token slices",
        ("model", "forward", "forward and backward", "most frequent"),
    )
    gpt = benchmark_model(2)
    models = {
        "GPT": gpt,
        "GPT with dropout": replace(gpt, hidden_dropout=0.1, attention_dropout=0.1),
        "Llama": benchmark_model(2, llama=True),
    }
    for name, model in models.items():
        model = replace(model, seq_length=seq_length, max_position_embeddings=seq_length)
        table.guarded(name, lambda model=model: _kernels(model, num_token_slices))
    return table


def _kernels(model: ModelConfig, num_token_slices: int) -> tuple[str, ...]:
    forward, whole = (
        [_counted(replace(model, num_layers=layers), num_token_slices, training=training) for layers in (2, 3)]
        for training in (False, True)
    )
    of_block = [(more.total() - less.total()) / num_token_slices for less, more in (forward, whole)]
    frequent = ", ".join(f"{name[:40]} {count}" for name, count in (whole[1] - whole[0]).most_common(3))
    return f"{of_block[0]:g}", f"{of_block[1]:g}", frequent


def _counted(model: ModelConfig, num_token_slices: int, *, training: bool) -> Counter[str]:
    """Kernels of one step by name, after one that warms up; on a CPU, operators that call no other."""
    cut = TokenSlices.uniform(model.seq_length, num_token_slices)
    engine, data = our_engine(model, cut, 1, num_stages=1, bf16=has_gpu()), batches(model, for_deepspeed=False)
    step = engine.train_batch if training else engine.eval_batch
    engine.module.eval = engine.module.train  # The forward of an evaluation, with dropout as in training.
    step(data)
    with profile(activities=[ProfilerActivity.CUDA if has_gpu() else ProfilerActivity.CPU]) as profiler:
        step(data)
        get_accelerator().synchronize()
    if not has_gpu():
        return Counter(event.name for event in profiler.events() if not event.cpu_children and "::" in event.name)
    kernels = (event.name for event in profiler.events() if event.device_type == DeviceType.CUDA)
    return Counter(name for name in kernels if not name.startswith(("Memcpy", "Memset")))


PLAIN = 0
"""Instead of a number of token slices: the plain loop."""

_TRAINING_TIMEOUT_S = 900.0
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
        tflops = tflops_per_device(model, 1, seconds, world_size=1)
        mfu = "" if peak is None else f"{tflops / peak:.1%}"
        ratios = [f"{seconds / base[other] - 1:+.1%}" if other in base else "" for other in (1, PLAIN)]
        table.add(
            contestant,
            f"{seconds:.4f}",
            f"{tflops:.1f}",
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
            with World(
                1, _build, model, count, recompute, variables=variables, timeout_s=_TRAINING_TIMEOUT_S, log=log
            ) as world:
                return world.run(_time, rounds)[0]
        except RankFailed as failed:
            return failed


def _build(model: ModelConfig, count: int, recompute: str) -> Callable[[], float]:
    """A step of a contestant; it returns the loss."""
    join(_TRAINING_TIMEOUT_S)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything and print the tables."""
    parser = Parser(description=__doc__)
    parser.add_argument("--model-preset", default="llama3-1b")
    parser.add_argument("--seq-length", type=int, nargs="+", default=[8192, 32768], metavar="N")
    parser.add_argument("--token-slices", type=int, nargs="+", default=[1, 4, 16], metavar="S")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="run on a CPU where there is no GPU, to try the program")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short sequences")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gpu-bench"), help="folder for report.md and report.json"
    )
    options = parser.parse_args(argv)
    if not (has_gpu() or options.cpu):
        print("no CUDA GPU here: nothing was run")
        return 0
    sections: list[Section] = []
    for section in _sections(options):
        sections.append(section)
        # After each, so that what was measured is not lost with what was not.
        text = publish("make gpu-bench", software(), sections, options.output)
    print(text)
    return 0


def _sections(options: argparse.Namespace) -> Iterator[Section]:
    """The tables, each when it is measured."""
    lengths, rounds = ([64], 1) if options.tiny else (options.seq_length, options.rounds)
    alone = possible_sharings(1)[0]
    for length in lengths:
        model = _model(options.model_preset, length, tiny=options.tiny)
        name = "tiny Llama" if options.tiny else options.model_preset
        yield training_speed(model, name, tuple(options.token_slices), rounds=rounds, sharing=alone)
    yield from _of_operators(alone, tiny=options.tiny, rounds=rounds)
    yield from _of_links(tiny=options.tiny, rounds=rounds)


def _model(preset: str, seq_length: int, *, tiny: bool) -> ModelConfig:
    if tiny:
        return replace(benchmark_model(1, llama=True), seq_length=seq_length, max_position_embeddings=seq_length)
    settings = find_preset(preset).settings
    return ModelConfig(**dict(settings) | {"seq_length": seq_length, "max_position_embeddings": seq_length})


def _of_operators(sharing: Sharing, *, tiny: bool, rounds: int) -> list[Section]:
    progress("products and kernels")
    sizes = ((64, 32, 32),) if tiny else tuple((tokens, 8192, 2048) for tokens in (512, 2048, 8192))
    with tempfile.TemporaryDirectory() as folder:
        log, variables = Path(folder, "log.txt"), [sharing.of_rank(0, {})]
        try:
            with World(1, join, 600.0, variables=variables, timeout_s=900.0, log=log) as world:
                found = world.run(products, rounds, sizes)
                return found + world.run(kernels, 4, 64 if tiny else 2048)
        except RankFailed as failed:
            failure = Section("Single operators", ("", "result"))
            failure.fail("all", failed)
            return [failure]


def _of_links(*, tiny: bool, rounds: int) -> list[Section]:
    sharing = _working_sharing()
    if sharing is None:
        tried = " nor by ".join(each.name for each in SHARINGS)
        return [
            Section("Two ranks", ("", "result"), [("all", f"failed: they cannot share this GPU, neither by {tried}")])
        ]
    return [
        receives(sharing, delay_s=0.5 if tiny else 5.0),
        queues(sharing, seq_length=64 if tiny else 2048, rounds=rounds),
    ]


def _working_sharing() -> Sharing | None:
    for sharing in possible_sharings(2):
        if not receives(sharing, delay_s=0.0).rows[0][1].startswith("failed"):
            return sharing
    return None


if __name__ == "__main__":
    sys.exit(main())
