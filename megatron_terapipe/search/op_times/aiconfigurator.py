"""Measured kernels of the optional package `aiconfigurator-core`, read where it is installed (Apache-2.0, NVIDIA).

It holds times of matrix products, of flash attention and of NCCL's collectives on many devices, a Parquet file for each
device, operation, serving framework and version. Nothing of it is copied into this project: `pip install
aiconfigurator-core pyarrow` puts it beside.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.kernel_tables import KernelTables, product_table
from megatron_terapipe.search.op_times.layer_times import OpTimes
from megatron_terapipe.search.op_times.roofline import Roofline
from megatron_terapipe.search.op_times.software import TERAPIPE, Software

Floats = NDArray[np.float64]

PACKAGE = "aiconfigurator_core"

SYSTEMS = {
    "A100-SXM4": "a100_sxm",
    "A100-PCIe": "a100_pcie",
    "H100-SXM": "h100_sxm",
    "H100-PCIe": "h100_pcie",
    "H200": "h200_sxm",
    "GH200": "h200_sxm",
    "B200": "b200_sxm",
    "L40S": "l40s",
    "L4": "l4",
}
"""Its name of a device, by how ours begins. A GH200 computes as an H200 does."""

FRAMEWORKS = ("vllm", "trtllm", "sglang")
"""Whose kernels are taken, the first that measured any; all of them call cuBLAS for products in bf16."""

HEAD_SIZE = 128
"""Of the attention kernels that are taken: the size that most models have."""


def measured_tables(
    device_name: str,
    *,
    efficiency: HardwareEfficiency | None = None,
    software: Software = TERAPIPE,
    folder: Path | None = None,
) -> OpTimes | None:
    """Op times from measured kernels, for bf16 and fp16; None where there are none, see `why_no_tables`.

    Args:
        device_name: in the device library.
        efficiency: of all that is not in the tables.
        software: what the trainer computes beside the matrix products.
        folder: `systems/data` of the package; None = of the one that is installed.
    """
    if why_no_tables(device_name, folder):
        return None
    system = (folder or _installed()) / _system(device_name)
    products = _rows(system, "gemm", "gemm_perf.parquet")
    chosen = [row for row in products if row["gemm_dtype"] == "bfloat16"]
    if not chosen:
        return None
    rows, inputs, outputs, milliseconds = (
        np.array([row[name] for row in chosen], dtype=float) for name in ("m", "k", "n", "latency")
    )
    table = product_table(rows, inputs, outputs, milliseconds / 1e3)
    tables = KernelTables(*table, *_attention(system), f"{PACKAGE}, {_system(device_name)}")
    return Roofline(efficiency or HardwareEfficiency(), software, tables=tables)


def why_no_tables(device_name: str, folder: Path | None = None) -> str:
    """Return why there are no measured tables of a device, and what to do; empty if there are.

    Args:
        device_name: name of the device.
        folder: folder of the tables; None for that of the package.
    """
    if find_spec("pyarrow") is None or (folder is None and find_spec(PACKAGE) is None):
        return "op tables need the packages aiconfigurator-core and pyarrow: pip install them; the roofline is used"
    system = _system(device_name)
    if not system or not ((folder or _installed()) / system / "gemm").is_dir():
        return f"no op tables are known for {device_name}: the roofline is used"
    return ""


def _installed() -> Path:
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "systems" / "data"


def _system(device_name: str) -> str:
    matches = [ours for ours in SYSTEMS if device_name.startswith(ours)]
    return SYSTEMS[max(matches, key=len)] if matches else ""


def _rows(system: Path, operation: str, file: str) -> list[dict[str, Any]]:
    """Rows of the newest file of the first framework that has one."""
    import pyarrow.parquet as parquet

    for framework in FRAMEWORKS:
        files = sorted((system / operation / framework).glob(f"*/{file}"))
        if files:
            rows: list[dict[str, Any]] = parquet.read_table(files[-1]).to_pylist()
            return rows
    return []


def _attention(system: Path) -> tuple[Floats, Floats]:
    """FLOPs of causal attention kernels, and the logarithm of their FLOP/s: the median of those of about one size."""
    rows = [
        (row["batch_size"] * row["num_heads"] * row["isl"] ** 2, row["latency"] / 1e3)
        for row in _rows(system, "attention", "context_attention_perf.parquet")
        if row["head_dim"] == HEAD_SIZE
        and row["attn_dtype"] == "bfloat16"
        and row["num_heads"] == row["num_key_value_heads"]
    ]
    if not rows:
        return np.empty(0), np.empty(0)
    # Half of all pairs are computed: 4 FLOPs for each number of a head.
    flops, seconds = np.array([(2 * HEAD_SIZE * pairs, latency) for pairs, latency in rows]).T
    bins = np.round(np.log2(flops)).astype(int)
    sizes = np.unique(bins)
    return 2.0**sizes, np.array([np.median(np.log(flops[bins == size] / seconds[bins == size])) for size in sizes])
