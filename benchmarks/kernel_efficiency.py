"""Shares of the data sheet that kernels reach, from the tables of the package aiconfigurator-core.

    pip download --no-deps aiconfigurator-core==0.12.0 && unzip -q aiconfigurator_core-*.whl -d DIR
    pip install --target SITE pyarrow && PYTHONPATH=$PWD:SITE python -m benchmarks.kernel_efficiency DIR

The tables (Apache-2.0, NVIDIA; measured with TensorRT-LLM, vLLM and SGLang) are of inference. Taken are products in
bf16 without quantisation and in fp8, and attention of whole prompts: no window, nothing in the cache before it. Rows
above the peak of the data sheet are refused, and counted. Fitted are these forms, to the logarithm of the time:

    a product    2 (K + depth) (R N + area) / (peak x share)    and in fp8    + cast x R K / memory bandwidth
    attention    4 (pairs + fixed x rows) heads x head size / (peak x share) x (1 + waves x processors / tiles)

`depth` and `area` are fitted to products of 1e10 FLOPs and more; `share` to products of 1e11 and more, as in training,
where clocks are lower. Memory is the median of products of at most 16 rows, which read a weight of 400 MB and more
once. Each framework is fitted separately; figures of a generation are geometric means over its devices and frameworks.
In fp8 with one scale a tensor only TensorRT-LLM calls cuBLAS, as Transformer Engine does (`CUBLAS`); its times have the
cast of the input in them, which the form takes out: the mean error falls from 0.14 to 0.06 on H100.
Attention is the forward with heads of 128: inference has no backward. NCCL's collectives of 1 MiB and more in half
precision, inside a node, are compared with the formulas of the cost model.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.measuring.command import Parser
from megatron_terapipe.devices import Device
from megatron_terapipe.search.machine.library import device, usual_machine
from megatron_terapipe.search.price.efficiency import GENERATIONS, IN_EIGHT_BITS, HardwareEfficiency
from megatron_terapipe.search.price.links import GroupTopology, all_gather_s, all_reduce_s, reduce_scatter_s
from megatron_terapipe.search.price.roofline import TILE

Floats = NDArray[np.float64]

SYSTEMS = {
    "a100_sxm": "A100-SXM4-80GB",
    "l40s": "L40S",
    "h100_sxm": "H100-SXM5-80GB",
    "h200_sxm": "H200-SXM5-141GB",
    "b200_sxm": "B200-SXM-180GB",
    "gb200": "GB200-186GB",
    "b300_sxm": "B300-SXM-270GB",
    "gb300": "GB300-278GB",
}
"""Folders of the package, and the devices of our library that they are of."""

CUBLAS = "trtllm"
"""Folder of the framework whose products in fp8 are of cuBLAS."""

COLLECTIVES = {"all_reduce": all_reduce_s, "reduce_scatter": reduce_scatter_s, "all_gather": all_gather_s}

LEAST_FLOPS = 1e10
"""Smaller products wait for their launch."""

LARGE_FLOPS = 1e11
"""Products from which the share is taken."""

LEAST_ATTENTION_MS = 0.05
"""Likewise, for attention."""


class Fit(NamedTuple):
    """Constants of one table."""

    constants: Floats
    """In the order of the form."""
    error: float
    """Mean absolute error of the logarithm of the time."""
    rows: int
    refused: int


def main(argv: Sequence[str] | None = None) -> None:
    """Fit and print."""
    parser = Parser(description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the package is unpacked")
    systems = parser.parse_args(argv).directory / "aiconfigurator_core" / "systems" / "data"
    products: dict[tuple[str, str], list[Floats]] = defaultdict(list)
    of_cublas: dict[str, list[Floats]] = defaultdict(list)
    memory: dict[str, list[float]] = defaultdict(list)
    attention: dict[tuple[str, str], list[Floats]] = defaultdict(list)
    print("products       device           share  depth      area  error   rows refused   memory   table")
    for system, name in SYSTEMS.items():
        one = device(name)
        for path, rows in _tables(systems / system / "gemm", "gemm_perf.parquet"):
            for dtype, precision in (("bfloat16", "bf16"), ("fp8", "fp8")):
                table = _product_columns(rows, dtype)
                if not len(table[0]) or (precision == "fp8" and not path.startswith(CUBLAS)):
                    continue
                fit = _fit_products(replace(one, half_flops=one.peak_flops(precision)), *table, casts=dtype == "fp8")
                reading = _memory_share(one, *table) if precision == "bf16" else float("nan")
                share, depth, area, *_ = fit.constants
                found = np.array([share, depth, area])
                products[one.generation, precision].append(found)
                if precision == "bf16":
                    memory[one.generation].append(reading)
                    if path.startswith(CUBLAS):
                        of_cublas[one.generation].append(found)
                print(
                    f"{one.generation:<14} {name:<16} {share:.3f} {depth:6.0f} {area:9.2g}  {fit.error:.3f} "
                    f"{fit.rows:6} {fit.refused:7}   {reading:6.3f}   {path} {precision}"
                )
    print("\nattention      device           share  fixed  waves  error   rows refused   kernel and table")
    for system, name in SYSTEMS.items():
        one = device(name)
        for path, rows in _tables(systems / system / "attention", "context_attention_perf.parquet"):
            for kernel, columns in _attention_columns(rows).items():
                fit = _fit_attention(one, *columns)
                attention[one.generation, kernel].append(fit.constants)
                share, fixed, waves = fit.constants
                print(
                    f"{one.generation:<14} {name:<16} {share:.3f} {fixed:6.0f} {waves:6.2f}  {fit.error:.3f} "
                    f"{fit.rows:6} {fit.refused:7}   {kernel} {path}"
                )
    print("\ngeneration     share  depth      area  memory   as committed")
    for (generation, precision), fits in products.items():
        if precision == "fp8":
            share, depth, area = np.exp(np.log(np.array(fits) / of_cublas[generation]).mean(axis=0))
            print(
                f"{generation:<8} fp8/bf16 {share:.3f} {depth:6.1f} {area:9.2g}           {IN_EIGHT_BITS[generation]}"
            )
            continue
        share, depth, area = np.exp(np.log(fits).mean(axis=0))
        reading = float(np.exp(np.log(memory[generation]).mean()))
        print(f"{generation:<14} {share:.3f} {depth:6.0f} {area:9.2g}   {reading:.3f}   {GENERATIONS[generation]}")

    print("\ncollectives    device           error    bias   rows")
    for name, spelled in SYSTEMS.items():
        errors = _collective_errors(systems, name, device(spelled))
        if len(errors):
            print(f"{'':<14} {spelled:<16} {np.abs(errors).mean():.3f}  {errors.mean():+.3f}   {len(errors)}")


def _collective_errors(systems: Path, name: str, one: Device) -> Floats:
    """Predicted / measured - 1 of all-reduces, reduce-scatters and all-gathers on 2 to 8 devices of a node."""
    node, found = usual_machine(one.name), []
    for _, rows in _tables(systems / name / "comm", "nccl_perf.parquet"):
        for row in rows:
            formula, num_bytes = COLLECTIVES.get(row["op_name"]), 2 * int(row["message_size"])
            if formula and row["nccl_dtype"] == "half" and num_bytes >= 2**20 and int(row["num_gpus"]) <= 8:
                links = GroupTopology(int(row["num_gpus"]), 1, node.inside.bandwidth, node.inside.latency_s, 1.0, 0.0)
                seconds = float(formula(num_bytes, links, HardwareEfficiency()))
                found.append(seconds / (float(row["latency"]) * 1e-3) - 1)
    return np.array(found)


def _tables(folder: Path, name: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Tables of a folder, by framework and version."""
    from pyarrow import parquet

    for path in sorted(folder.glob(f"*/*/{name}")):
        yield str(path.parent.relative_to(folder)), parquet.read_table(path).to_pylist()


def _product_columns(rows: Sequence[Mapping[str, Any]], dtype: str) -> tuple[Floats, Floats, Floats, Floats]:
    """Rows, outputs, inputs and seconds of products; with `fp8`, those with one scale a tensor."""
    taken = [
        (row["m"], row["n"], row["k"], row["latency"] * 1e-3)
        for row in rows
        if row["gemm_dtype"] == dtype and "PLUGIN" not in row["kernel_source"]
    ]
    return tuple(np.array(taken, float).reshape(-1, 4).T)  # type: ignore[return-value]


def _fit_products(
    one: Device, rows: Floats, outputs: Floats, inputs: Floats, seconds: Floats, *, casts: bool = False
) -> Fit:
    flops = 2 * rows * outputs * inputs
    moving = 2 * (rows * inputs + inputs * outputs + rows * outputs) / one.memory_bandwidth
    above = flops > seconds * one.half_flops
    sides = np.minimum(np.minimum(rows, outputs), inputs) >= 512
    taken = sides & ~above & (flops / one.half_flops > 1.3 * moving)

    def fit(least: float) -> Fit:
        chosen = taken & (flops > least)

        def logarithm(constants: Floats) -> Floats:
            share, depth, area, cast = np.exp([*constants, *([] if casts else [-np.inf])])
            form = 2 * (inputs + depth) * (rows * outputs + area) / (one.half_flops * share)
            form = form + cast * rows * inputs / one.memory_bandwidth
            return np.log(form[chosen] / seconds[chosen])

        start = (0.8, 100.0, 1e6, 3.0) if casts else (0.8, 100.0, 1e6)
        return _fitted(logarithm, start, int(chosen.sum()), int(above.sum()))

    every, large = fit(LEAST_FLOPS), fit(LARGE_FLOPS)
    return every._replace(constants=np.array([large.constants[0], *every.constants[1:]]))


def _memory_share(one: Device, rows: Floats, outputs: Floats, inputs: Floats, seconds: Floats) -> float:
    num_bytes = 2 * (rows * inputs + inputs * outputs + rows * outputs)
    taken = (rows <= 16) & (num_bytes > 4e8)
    return float(np.median(num_bytes[taken] / seconds[taken])) / one.memory_bandwidth


def _attention_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Floats, Floats, Floats]]:
    """Sequences x heads, tokens and seconds of causal attention of whole prompts, by kernel."""
    found = defaultdict(list)
    for row in rows:
        whole = not row.get("window_size") and not int(row.get("step") or 0)
        half = row["attn_dtype"] == row["kv_cache_dtype"] == "bfloat16"
        if whole and half and row["head_dim"] == 128 and row["isl"] >= 256 and row["latency"] >= LEAST_ATTENTION_MS:
            found[row["kernel_source"]].append(
                (row["batch_size"] * row["num_heads"], row["isl"], row["latency"] * 1e-3)
            )
    return {kernel: tuple(np.array(each, float).T) for kernel, each in found.items() if len(each) > 1000}  # type: ignore[misc]


def _fit_attention(one: Device, heads: Floats, tokens: Floats, seconds: Floats) -> Fit:
    above = 2 * heads * tokens**2 * 128 > seconds * one.half_flops
    processors = GENERATIONS[one.generation].processors

    def logarithm(constants: Floats) -> Floats:
        share, fixed, waves = np.exp(constants)
        pairs = tokens * (tokens + 1) / 2 + fixed * tokens
        filling = 1 + waves * processors / (heads * tokens / TILE)
        return np.log(4 * heads * 128 * pairs * filling / (one.half_flops * share) / seconds)[~above]

    return _fitted(logarithm, (0.5, 200.0, 1.0), int((~above).sum()), int(above.sum()))


def _fitted(logarithm: Any, start: tuple[float, ...], rows: int, refused: int) -> Fit:
    found = least_squares(logarithm, np.log(start), loss="soft_l1", f_scale=0.1)
    return Fit(np.exp(found.x), float(np.abs(logarithm(found.x)).mean()), rows, refused)


if __name__ == "__main__":
    main()
