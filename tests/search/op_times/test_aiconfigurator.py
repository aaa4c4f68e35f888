"""Measured kernels, between their sizes and where there are none."""

from pathlib import Path

import numpy as np
import pytest

from megatron_terapipe.search.op_times import aiconfigurator as reading
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.kernel_tables import KernelTables, product_table
from megatron_terapipe.search.op_times.layer_times import LayerQuery
from megatron_terapipe.search.op_times.roofline import Roofline
from megatron_terapipe.search.op_times.software import TERAPIPE
from tests.search.cost.machines import A100, GPT

SIZES = np.array([64.0, 256.0, 1024.0])


def tables(drop: int | None = None) -> KernelTables:
    """Products that take a microsecond and then run at 100 TFLOP/s; of all sizes but one."""
    rows, inputs, outputs = (each.ravel() for each in np.meshgrid(SIZES, SIZES, SIZES, indexing="ij"))
    kept = np.arange(len(rows)) != (-1 if drop is None else drop)
    seconds = 1e-6 + 2 * rows * inputs * outputs / 100e12
    axes = product_table(rows[kept], inputs[kept], outputs[kept], seconds[kept])
    return KernelTables(*axes, np.array([1e9, 1e12]), np.log([50e12, 150e12]), "a test")


def test_measured_sizes_are_met_and_others_lie_between() -> None:
    measured = 1e-6 + 2 * 256 * 64 * 1024 / 100e12
    assert tables().product_s(256, 64, 1024) == pytest.approx(measured)
    small, middle, large = (float(tables().product_s(rows, 256, 256)) for rows in (256, 512, 1024))
    assert small < middle < large


def test_beyond_the_table_speed_stays_and_below_it_time_stays() -> None:
    largest = tables().product_s(1024, 1024, 1024)
    assert tables().product_s(8192, 1024, 1024) == pytest.approx(8 * largest)
    assert tables().product_s(1, 64, 64) == pytest.approx(tables().product_s(64, 64, 64))


def test_a_size_that_is_missing_takes_the_speed_of_its_neighbour() -> None:
    whole, holed = tables(), tables(drop=13)
    assert not np.isnan(holed.products).any()
    assert holed.product_s(256, 256, 256) == pytest.approx(4 * whole.product_s(64, 256, 256))
    assert holed.product_s(64, 64, 64) == pytest.approx(whole.product_s(64, 64, 64))


def test_attention_of_grids() -> None:
    seconds = np.asarray(tables().attention_s(np.array([1e8, 1e9, 1e12, 1e13])))
    assert seconds == pytest.approx([1e9 / 50e12, 1e9 / 50e12, 1e12 / 150e12, 1e13 / 150e12])


def test_the_roofline_reads_them() -> None:
    grid = {"tensor_parallel_size": np.array([1.0, 2.0]), "micro_batch_size": 1.0, "start": 0.0, "end": 2048.0}
    fast = Roofline(HardwareEfficiency(), TERAPIPE)(LayerQuery(GPT.layers[1], A100, **grid))  # type: ignore[arg-type]
    slow = Roofline(HardwareEfficiency(), TERAPIPE, tables=tables())(LayerQuery(GPT.layers[1], A100, **grid))  # type: ignore[arg-type]
    assert np.all(np.asarray(slow.forward) > 1.5 * np.asarray(fast.forward))
    single = Roofline(HardwareEfficiency(), TERAPIPE, "fp32", tables())(LayerQuery(GPT.layers[1], A100, **grid))  # type: ignore[arg-type]
    assert np.all(np.asarray(single.forward) > np.asarray(slow.forward))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "find_spec", lambda name: None)
    assert "pip install" in reading.why_no_tables("A100-SXM4-80GB")
    assert reading.measured_tables("A100-SXM4-80GB") is None


def test_a_device_that_nobody_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reading, "find_spec", lambda name: object())
    for name in ("T4", "A100-SXM4-80GB"):
        assert reading.why_no_tables(name, tmp_path) == f"no op tables are known for {name}: the roofline is used"
    (tmp_path / "a100_sxm" / "gemm").mkdir(parents=True)
    assert not reading.why_no_tables("A100-SXM4-80GB", tmp_path)
