"""Facts of a device that other results rest on: versions, context, loading of kernels, products, attention by shape."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import attention as torch_attention

from benchmarks.measuring.report import Section, has_gpu
from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.attention import flash_kernels
from deepspeed_ext.runtime.attention.kernels import PlainAttention
from deepspeed_ext.runtime.cuda_environment import VARIABLES
from deepspeed_ext.runtime.gradients import weight_gradients
from deepspeed_ext.runtime.supported_versions import check_versions

ROOT = Path(__file__).parents[2]
_NAMED = ("triton", "numpy", "pydantic", "flash_attn_3", "flash-attn-4", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_SWITCHES = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


def versions() -> Iterator[Section]:
    """Device, software, switches of torch, and whether products add to sums in fp32."""
    table = Section("Device and software", ("name", "value"))
    table.add("Python", f"{platform.python_version()}, {sys.executable}")
    table.add("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    if has_gpu():
        found = torch.cuda.get_device_properties(0)
        table.add("device", f"{found.name}, compute capability {found.major}.{found.minor}")
        table.add("multiprocessors", found.multi_processor_count)
        table.add("memory, GiB", f"{found.total_memory / 2**30:.1f}")
        table.guarded("of it free", lambda: (f"{torch.cuda.mem_get_info()[0] / 2**30:.1f}",))
        table.guarded("kernels are built for", lambda: (" ".join(torch.cuda.get_arch_list()),))
        table.guarded("NCCL of torch", lambda: (".".join(map(str, torch.cuda.nccl.version())),))
        table.guarded("cuDNN", lambda: (torch.backends.cudnn.version(),))
        yield table
    for name in _NAMED:
        try:
            table.add(name, version(name))
        except PackageNotFoundError:
            table.add(name, "none")
    for name in ("flash_attn_interface", "flash_attn.cute"):
        table.guarded(f"module {name}", lambda name=name: ("found" if _is_found(name) else "none",))
    for name in _SWITCHES:
        table.guarded(name, lambda name=name: (getattr(torch.backends.cuda.matmul, name),))
    for name in [each.name for each in VARIABLES] + [name for name in os.environ if name.startswith(("NCCL", "CUDA_"))]:
        table.add(name, os.environ.get(name, "unset"))
    table.guarded("versions are supported", lambda: (_supported(),))
    device = torch.device(get_accelerator().current_device_name())
    for dtype in (torch.bfloat16, torch.float16):
        table.guarded(
            f"{dtype} products add to fp32",
            lambda dtype=dtype: (weight_gradients._adds_products(device, dtype, torch.float32),),
        )
    yield table


def _is_found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _supported() -> str:
    try:
        check_versions()
    except UserError as error:
        return f"failed: {error}"
    return "yes"


_CONTEXT_TIMEOUT_S = 60.0


def context() -> Iterator[Section]:
    """Seconds and memory of the first uses of a device, and whether loading a kernel waits for the device."""
    modes = ("EAGER", "LAZY")
    firsts = Section("First uses in a process of its own", ("CUDA_MODULE_LOADING", "use", "s", "device memory, MiB"))
    waits = Section(
        "First use of a kernel while the device computes for 1 s: what waits on the host",
        ("CUDA_MODULE_LOADING", "kernel", "device busy, s", "the use, s", "longest Event.query, s", "longest pause, s"),
        notes=[
            "A use of 1 s waits for the device. A pause as long is that of another Python thread: the GIL was held."
        ],
    )
    for mode in modes:
        # Before this process has a context of its own: that of the other is what is then missing.
        free = torch.cuda.mem_get_info()[0] if has_gpu() else 0
        try:
            found = _first_uses(mode, free)
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            firsts.add(mode, f"failed: {error}")
            yield firsts
            continue
        for use, seconds, used in found["firsts"]:
            firsts.add(mode, use, f"{seconds:.2f}", f"{used / 2**20:.0f}" if used else "")
        yield firsts
        for row in found["waits"]:
            waits.add(mode, *(f"{each:.3f}" if isinstance(each, float) else each for each in row))
        yield waits


def _first_uses(mode: str, free: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.first_uses", str(free)],
        cwd=ROOT,
        env={**os.environ, "CUDA_MODULE_LOADING": mode},
        stdout=subprocess.PIPE,
        text=True,
        timeout=_CONTEXT_TIMEOUT_S,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def products(tokens: int, sizes: Sequence[tuple[int, int]], repeats: int) -> Iterator[Section]:
    """Rates of the products of a linear layer in bf16, and both ways to add that of its weight to a sum in fp32."""
    table = Section(
        f"Products of a linear layer in bf16, {tokens} tokens: us and TFLOP/s",
        (
            "in, out",
            "forward",
            "input gradient",
            "weight gradient",
            "cast and added",
            "added in fp32",
            "errors of sums",
        ),
    )
    for into, out in sizes:
        table.guarded(f"{into}, {out}", lambda into=into, out=out: _products(tokens, into, out, repeats))
        yield table


def _products(tokens: int, into: int, out: int, repeats: int) -> Iterator[str]:
    device = torch.device(get_accelerator().current_device_name())
    inputs, gradient = (torch.randn(tokens, width, device=device, dtype=torch.bfloat16) for width in (into, out))
    weight = torch.randn(out, into, device=device, dtype=torch.bfloat16)
    exact = gradient.double().t() @ inputs.double()
    flops = 2.0 * tokens * into * out

    def timed(call: Callable[[], object]) -> str:
        microseconds = microseconds_of(call, repeats)
        return f"{microseconds:.1f}, {flops / microseconds / 1e6:.0f}"

    yield timed(lambda: inputs @ weight.t())
    yield timed(lambda: gradient @ weight)
    yield timed(lambda: gradient.t() @ inputs)
    ways: dict[str, Callable[[Tensor], object]] = {
        "cast": lambda total: total.add_(gradient.t() @ inputs),
        "fp32": lambda total: torch.addmm(total, gradient.t(), inputs, torch.float32, out=total),
    }
    errors = []
    for name, way in ways.items():
        if name == "fp32" and not weight_gradients._adds_products(device, torch.bfloat16, torch.float32):
            yield "not in this torch"
            continue
        total = torch.zeros(out, into, device=device)
        way(total)
        errors.append(f"{relative(total, exact):.1e}")
        yield timed(lambda way=way, total=total: way(total))
    yield ", ".join(errors)


def attention(shapes: Sequence[tuple[int, int]], long: tuple[int, int], repeats: int) -> Iterator[Section]:
    """Errors of the kernels of a device beside attention written out, then rates of whole layers.

    Args:
        shapes: queries, and keys before them, of the errors.
        long: the same of the rates.
    """
    device = torch.device(get_accelerator().current_device_name())
    errors = Section(
        "Attention beside attention written out in fp32 (bf16) or fp64 (fp32): relative errors; 4 heads, 2 groups",
        ("queries, prefix", "dtype", "window", "head size", "kernel", "output", "gradients q, k, v", "result"),
    )
    rates = Section(
        f"Attention of a layer, {long[0]} queries after {long[1]} keys, bf16, 32 heads, 8 groups",
        ("implementation", "head size", "forward, us", "TFLOP/s", "backward, us", "TFLOP/s"),
    )
    for size in (64, 128):
        rates.guarded("torch", lambda size=size: _rate(device, *long, size, repeats))
        yield rates
    for dtype, (of_output, of_gradients) in TOLERANCES.items():
        for index, (queries, prefix) in enumerate(shapes):
            size, window = (64, 128)[index % 2], (None, 100)[index // 2 % 2]
            name = f"{queries}, {prefix}"
            cells = (str(dtype).removeprefix("torch."), window or "all", size)
            try:
                kernel, *found = _errors(device, dtype, queries, prefix, size, window)
                good = found[0] < of_output and max(found[1:]) < of_gradients
                text = ", ".join(f"{each:.1e}" for each in found[1:])
                errors.add(name, *cells, kernel, f"{found[0]:.1e}", text, "ok" if good else "failed: WRONG")
            except Exception as error:
                errors.fail(name, error)
            yield errors
    _, query, key, _ = _drawn(device, torch.bfloat16, 128, 128, 4, 4, 64)
    rates.notes += [line.strip() for line in flash_kernels.activate_flash_attention([(query, key, None)])]
    # Since torch 2.11.
    if newer := getattr(torch_attention, "current_flash_attention_impl", lambda: None)():
        for size in (64, 128):
            rates.guarded(newer, lambda size=size: _rate(device, *long, size, repeats))
            yield rates
    yield rates


TOLERANCES = {torch.bfloat16: (1e-2, 2e-2), torch.float32: (1e-5, 2e-5)}
"""Relative errors of outputs and of gradients."""


def _drawn(
    device: torch.device, dtype: torch.dtype, queries: int, prefix: int, heads: int, groups: int, size: int
) -> list[Tensor]:
    torch.manual_seed(queries + prefix)
    lengths = ((queries, heads), (queries, heads), (prefix + queries, groups), (prefix + queries, groups))
    return [torch.randn(1, tokens, width, size, device=device).to(dtype) for tokens, width in lengths]


def _errors(
    device: torch.device, dtype: torch.dtype, queries: int, prefix: int, size: int, window: int | None
) -> tuple[Any, ...]:
    """Name of the kernel, then the errors of its output and of its gradients of queries, keys and values."""
    drawn = _drawn(device, dtype, queries, prefix, 4, 2, size)
    exact = [each.to(torch.float64 if dtype is torch.float32 else torch.float32) for each in drawn]
    plain, kernel, scale = PlainAttention(window=window), flash_kernels.kernel_for(drawn[1], window), size**-0.5
    outputs, gradients = [], []
    for attention, (of_output, query, key, value) in ((kernel, drawn), (plain, exact)):
        attended = attention.forward(query, key, value, scale)
        found = attention.backward(of_output, query, key, value, attended, scale)
        outputs.append(attended.output)
        both = zip(found.prefix, found.own, strict=True)
        gradients.append([found.query, *(torch.cat([each.to(query.dtype) for each in pair], 1) for pair in both)])
    # One query on one key has weight 1 whatever the scores: its true gradients are 0.
    of_gradients = [relative(one, other, gradients[1][2] / 10) for one, other in zip(*gradients, strict=True)]
    return (type(kernel).__name__, relative(*outputs), *of_gradients)


def _rate(device: torch.device, queries: int, prefix: int, size: int, repeats: int) -> tuple[object, ...]:
    of_output, query, key, value = _drawn(device, torch.bfloat16, queries, prefix, 32, 8, size)
    kernel, scale = flash_kernels.kernel_for(query), size**-0.5
    attended = kernel.forward(query, key, value, scale)
    forward = microseconds_of(lambda: kernel.forward(query, key, value, scale), repeats)
    backward = microseconds_of(lambda: kernel.backward(of_output, query, key, value, attended, scale), repeats)
    flops = 4.0 * 32 * size * queries * (prefix + (queries + 1) / 2)
    parts = ((forward, flops), (backward, 2.5 * flops))
    return size, *(cell for us, needed in parts for cell in (f"{us:.0f}", f"{needed / us / 1e6:.0f}"))


def relative(found: Tensor, exact: Tensor, least: Tensor | None = None) -> float:
    """Norm of the difference over the norm of the exact tensor, or over that of `least` where it is larger."""
    norm = max(float(each.norm()) for each in (exact, least) if each is not None)
    difference = float((found.to(exact.dtype) - exact).norm())
    return difference / norm if norm else difference


def microseconds_of(call: Callable[[], object], repeats: int) -> float:
    """Microseconds of a call, as the device has them where there is one."""
    for _ in range(3):
        call()
    if not has_gpu():
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats * 1e3
