"""What kernels reach on each generation of devices."""

from dataclasses import replace

import pytest

from megatron_terapipe.devices import DEVICES, GENERATION_NAMES
from megatron_terapipe.search.machine.library import device
from megatron_terapipe.search.machine.terapipe import TERAPIPE
from megatron_terapipe.search.price.efficiency import (
    AS_AN_A100,
    GAMING_BOARDS,
    GENERATIONS,
    HardwareEfficiency,
    is_guessed,
    reachable_bandwidth,
    relative_efficiency,
)
from megatron_terapipe.search.price.roofline import Roofline

A100 = device("A100-SXM4-80GB")


def reached(name: str, rows: float = 16384, precision: str = "bf16") -> float:
    """Share of the peak that a square product reaches."""
    one = device(name)
    seconds = float(Roofline(HardwareEfficiency(), TERAPIPE, precision).product_s(one, rows, rows, rows))
    return 2 * rows**3 / seconds / one.peak_flops(precision)


def test_every_generation_of_gpus_has_an_entry() -> None:
    assert set(GENERATIONS) == set(GENERATION_NAMES) - {"cpu"}
    assert set(DEVICES) >= GAMING_BOARDS


def test_nothing_is_above_the_data_sheet() -> None:
    for one in GENERATIONS.values():
        assert 0 < one.products <= 1
        assert 0 < one.memory <= 1
    for entry in DEVICES.values():
        relative = relative_efficiency(entry.device)
        assert relative.products * HardwareEfficiency().gemm_efficiency <= 1
        assert relative.memory * HardwareEfficiency().memory_efficiency <= 1


def test_constants_are_those_of_an_a100() -> None:
    assert relative_efficiency(A100) == AS_AN_A100
    # Nothing is known of these, so the constants are taken as they are.
    for other in (device("cpu-core"), replace(A100, generation="")):
        assert relative_efficiency(other) == AS_AN_A100
        assert reachable_bandwidth(other) == other.memory_bandwidth


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        # Measured alone: .84 to .94 of an A100's peak, .75 to .80 of an H100's, .69 to .78 (H200), .68 to .76 (B200).
        # In training, Hopper's reach .92 of that beside an A100's.
        ("A100-SXM4-80GB", 0.84, 0.94),
        ("H100-SXM5-80GB", 0.69, 0.74),
        ("H200-SXM5-141GB", 0.64, 0.74),
        ("B200-SXM-180GB", 0.66, 0.76),
        ("V100-SXM2-16GB", 0.74, 0.82),
        ("T4", 0.33, 0.40),
    ],
)
def test_large_products_reach_what_was_measured(name: str, least: float, most: float) -> None:
    assert least <= reached(name) <= most


def test_smaller_products_reach_less_on_every_device() -> None:
    for name, entry in DEVICES.items():
        if entry.device.is_gpu:
            assert reached(name, 256) < reached(name, 1024) < reached(name, 4096) < reached(name), name


def test_fp32_is_the_same_on_all() -> None:
    assert reached("H100-SXM5-80GB", precision="fp32") == pytest.approx(reached("A100-SXM4-80GB", precision="fp32"))


def test_boards_for_games_are_not_held_to_a_servers_power() -> None:
    assert reached("RTX-2080-Ti") > 2 * reached("T4")


def test_what_no_table_is_of_is_a_guess() -> None:
    assert [is_guessed(device(name)) for name in ("A100", "H100", "L40S", "cpu-core")] == [False] * 4
    assert [is_guessed(device(name)) for name in ("V100", "T4", "RTX-4090", "MI300X")] == [True] * 4
    assert is_guessed(replace(A100, generation=""))
