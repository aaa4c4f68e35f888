"""Tokens per second, FLOP/s and utilization."""

import pytest

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.devices import DEVICES
from megatron_terapipe.search.machine.library import device
from megatron_terapipe.training.instruments import Throughput, peak_tflops, peak_tflops_here

GPT3_175B = ModelConfig(
    num_layers=96,
    hidden_size=12288,
    num_attention_heads=96,
    seq_length=2048,
    vocab_size=51200,
    max_position_embeddings=2048,
)


def test_a_published_utilization() -> None:
    """Narayanan et al. 2021, table 1 and section 5.1: 175B on 1024 A100s with batch 1536 at 140 TFLOP/s and 0.45.

    Their FLOPs are those of the hardware, whose backward recomputes the blocks: 4 passes where the model needs 3.
    """
    seconds = 32.0
    found = Throughput.of(GPT3_175B, num_sequences=1536, seconds=seconds, world_size=1024, peak_tflops=312.0)
    hardware_tflops = 96 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288))
    assert found.tflops_per_device == pytest.approx(hardware_tflops * 3 / 4 / seconds / 1024 / 1e12, rel=2e-3)
    assert found.mfu == pytest.approx(found.tflops_per_device / 312)
    assert found.tokens_per_second == 1536 * 2048 / 32


def test_without_a_peak_there_is_no_utilization() -> None:
    found = Throughput.of(GPT3_175B, num_sequences=1, seconds=1.0, world_size=1, peak_tflops=None)
    assert found.mfu is None
    assert found.tflops_per_device > 0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("Tesla V100-SXM2-32GB", 125),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 NVL", 836),
        ("Tesla V100-PCIE-32GB", 112),
        ("AMD Instinct MI250X", 192),  # one of its two dies, which torch sees as a device
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("GeForce GTX 970", None),
    ],
)
def test_peaks_of_data_sheets(name: str, peak: float | None) -> None:
    found = peak_tflops(name, "bf16")
    assert (found if peak is None else round(found)) == peak
    assert peak_tflops(name, "fp32") is None


@pytest.mark.parametrize("name", [name for name, entry in DEVICES.items() if entry.device.is_gpu])
def test_utilization_and_search_have_the_same_peak(name: str) -> None:
    assert peak_tflops(f"NVIDIA {name}", "bf16") == device(name).half_flops / 1e12


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_tflops_here("bf16") is None
