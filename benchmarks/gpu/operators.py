"""Single operators on one device: the product that adds to an fp32 gradient, and kernels of a block and token slice."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.machine import has_gpu
from benchmarks.measuring.report import Section
from benchmarks.measuring.workload import batches, benchmark_model, our_engine
from benchmarks.utilization import seconds_of
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config import ModelConfig

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
