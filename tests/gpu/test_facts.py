"""Facts of a device without one: lines for CUDA run on a stub of the device, with tensors that have no numbers."""

import json
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.measuring import report
from deepspeed_ext.runtime.attention.flash_kernels import CudaFlash
from deepspeed_ext.runtime.attention.kernels import PlainAttention
from tests.gpu import facts, first_uses


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        assert self.timed and end.timed, "torch raises otherwise"
        return 2.0


PROPERTIES = SimpleNamespace(name="A GPU", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub of CUDA; each name must be one of torch's."""
    stubs: dict[str, Any] = {
        "Event": Event,
        "Stream": SimpleNamespace,
        "stream": lambda _: nullcontext(),
        "_sleep": lambda cycles: None,
        "synchronize": lambda: None,
        "mem_get_info": lambda: (60 << 30, 80 << 30),
        "memory_reserved": lambda: 2 << 20,
        "get_device_properties": lambda _: PROPERTIES,
        "get_device_name": lambda _: PROPERTIES.name,
        "get_arch_list": lambda: ["sm_90"],
        "device_count": lambda: 1,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    for module in (report, facts):
        monkeypatch.setattr(module, "has_gpu", lambda: True)
    monkeypatch.setattr(facts.get_accelerator(), "current_device_name", lambda: "meta")
    monkeypatch.setattr(facts, "relative", lambda *_: 0.0)
    monkeypatch.setattr(facts.weight_gradients, "_adds_products", lambda *_: True)


def last(tables: Any) -> dict[str, list[tuple[str, ...]]]:
    return {each.title.split(",")[0].split(" beside")[0]: each.rows for each in tables}


@pytest.mark.usefixtures("device")
def test_versions_and_software() -> None:
    rows = dict(last(facts.versions())["Device and software"])
    assert rows["device"] == "A GPU, compute capability 9.0" and rows["NCCL of torch"] == "2.28.9"
    assert rows["versions are supported"] == "yes" and not any(each.startswith("failed") for each in rows.values())
    named = report.software()
    assert named["GPU"] == "1 x A GPU, 80 GiB" and named["NCCL"] == "2.28.9"


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("adds", [True, False])
def test_products_fit_the_operations_of_this_torch(adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts.weight_gradients, "_adds_products", lambda *_: adds)
    ((_, *cells),) = last(facts.products(64, [(16, 32)], 1))["Products of a linear layer in bf16"]
    fp32 = "2000.0, 0" if adds else "not in this torch"
    assert cells == ["2000.0, 0"] * 4 + [fp32, "0.0e+00, 0.0e+00" if adds else "0.0e+00"]


@pytest.mark.usefixtures("device")
def test_attention_fits_the_kernels_of_this_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel_for(query: torch.Tensor, window: int | None = None) -> Any:
        # Without a device torch has no shapes of the backward of its memory-efficient kernel.
        return CudaFlash(window) if query.dtype is torch.bfloat16 else PlainAttention(window=window)

    monkeypatch.setattr(facts.flash_kernels, "kernel_for", kernel_for)
    monkeypatch.setattr(facts.flash_kernels, "activate_flash_attention", lambda samples: [" attention by FA3"])
    monkeypatch.setattr(facts.torch_attention, "current_flash_attention_impl", lambda: "FA3")
    tables = last(facts.attention([(1, 0), (7, 33), (8, 200)], (32, 64), 1))
    assert [row[4:] for row in tables["Attention"]] == [
        (kernel, "0.0e+00", "0.0e+00, 0.0e+00, 0.0e+00", "ok") for kernel in ["CudaFlash"] * 3 + ["PlainAttention"] * 3
    ]
    rates = tables["Attention of a layer"]
    assert rates == [(name, size, "2000", "0", "2000", "0") for name in ("torch", "FA3") for size in ("64", "128")]


@pytest.mark.usefixtures("device")
def test_first_uses_print_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launched: list[str] = []
    kernel = ModuleType("tests.gpu.triton_kernel")
    kernel.compiled = lambda _: lambda: launched.append("kernel")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests.gpu.triton_kernel", kernel)
    with FakeTensorMode():
        first_uses.main([str(61 << 30)])
    line = capsys.readouterr().out
    done = SimpleNamespace(stdout=f"a warning\n{line}")
    monkeypatch.setattr(facts.subprocess, "run", lambda *_, **__: done)
    tables = last(facts.context())
    uses = tables["First uses in a process of its own"]
    assert len(uses) == 2 * 5 and [row[3] for row in uses[:2]] == ["", str(1024 - 2)]
    waits = tables["First use of a kernel while the device computes for 1 s: what waits on the host"]
    assert [row[:2] for row in waits[:3]] == [
        ("EAGER", "lgamma"),
        ("EAGER", "lgamma again"),
        ("EAGER", "Triton, compiled before"),
    ]
    assert launched == ["kernel"] and len(json.loads(line)["firsts"]) == 5


def test_a_process_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise facts.subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr(facts.subprocess, "run", fails)
    (rows,) = last(facts.context()).values()
    assert [row[0] for row in rows] == ["EAGER", "LAZY"] and all(row[1].startswith("failed: ") for row in rows)


def test_a_test_that_hangs_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gpu.marked import _cells

    cases: list[tuple[list[str], int | None, str]] = [
        (["started test_a", "passed test_a"], 0, "ok"),
        (["started test_a"], None, "failed: no end of test_a"),
        (["started test_a", "passed test_a", "started test_b"], -11, "failed: pytest ended with -11 in test_b"),
        ([], 2, "failed: none ran, pytest ended with 2"),
    ]
    for lines, code, result in cases:
        events = [dict(zip(("outcome", "test"), line.split(), strict=True)) for line in lines]
        assert list(_cells(events, 1.0, code))[-1] == result
