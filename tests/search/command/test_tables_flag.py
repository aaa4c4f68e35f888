import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.command import costs as tables
from megatron_terapipe.search.command.costs import TablesByDevice, tables_of
from megatron_terapipe.search.inputs import library
from megatron_terapipe.search.inputs.cluster_files import parse_cluster
from megatron_terapipe.search.inputs.workload_files import read_workload
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.layer_times import LayerQuery
from megatron_terapipe.search.op_times.roofline import Roofline
from megatron_terapipe.search.op_times.software import TERAPIPE

TWO_KINDS, _ = parse_cluster({"nodes": [{"device": "A100"}, {"device": "V100"}]}, "c.json")


def test_each_device_has_its_own_times() -> None:
    slow, fast = (Roofline(HardwareEfficiency(gemm_efficiency=share), TERAPIPE) for share in (0.1, 0.9))
    times = TablesByDevice({"A100-SXM4-80GB": fast, "V100-SXM2-16GB": slow})
    layer = read_workload("gpt2").layers[1]
    sizes = {"tensor_parallel_size": 1.0, "micro_batch_size": 1.0, "start": 0.0, "end": 1024.0}
    for name, alone in (("A100", fast), ("V100", slow)):
        query = LayerQuery(layer, library.device(name), **sizes)
        assert times(query) == alone(query)


def test_devices_without_tables_keep_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Roofline(HardwareEfficiency(gemm_efficiency=0.5), TERAPIPE)
    monkeypatch.setattr(tables, "measured_tables", lambda name, **_: measured if name.startswith("A100") else None)
    monkeypatch.setattr(tables, "why_no_tables", lambda name: f"none of {name}")
    found, notes = tables_of(TWO_KINDS, "fp16", None)
    assert found.by_name["A100-SXM4-80GB"] is measured
    assert isinstance(found.by_name["V100-SXM2-16GB"], Roofline)
    assert notes == ("none of V100-SXM2-16GB",)


def test_without_any_tables_the_flag_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "measured_tables", lambda name, **_: None)
    monkeypatch.setattr(tables, "why_no_tables", lambda name: "nothing is installed")
    with pytest.raises(ConfigError, match="--tables: nothing is installed"):
        tables_of(TWO_KINDS, "bf16", None)
    with pytest.raises(ConfigError, match="half precision alone: drop it"):
        tables_of(TWO_KINDS, "fp32", None)
