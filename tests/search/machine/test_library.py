import pytest

from megatron_terapipe.devices import DEVICES
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine import library
from megatron_terapipe.search.machine.library import MACHINES


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("A100-SXM4", "A100-SXM4-80GB"),
        ("a100_40gb", "A100-SXM4-40GB"),
        ("V100-16GB", "V100-SXM2-16GB"),
        ("T4", "T4"),
        ("GH200-96GB", "GH200-96GB"),
        # As `nvidia-smi` prints them.
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H200", "H200-SXM5-141GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("TITAN RTX", "Titan-RTX"),
        ("Tesla T4", "T4"),
    ],
)
def test_names(name: str, found: str) -> None:
    assert library.device(name).name == found


def test_names_are_unique() -> None:
    spellings = [spelling for entry in DEVICES.values() for spelling in (entry.device.name, *entry.aliases)]
    for name, entry in DEVICES.items():
        for spelling in (name, *entry.aliases):
            assert library.device(spelling).name == name
    assert len({spelling.lower() for spelling in spellings}) == len(spellings)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"c\.json: device 'A100-SXN4' is not .* did you mean A100-SXM4\?"):
        library.device("A100-SXN4", "c.json: device")
    with pytest.raises(ConfigError, match=r"choose among P100.*, or describe it by its fields"):
        library.device("abacus")
    with pytest.raises(ConfigError, match=r"did you mean p3\.16xlarge\?"):
        library.machine("p3.16xlage")


def test_every_device_has_a_machine_that_holds_it() -> None:
    for entry in DEVICES.values():
        holds = MACHINES[entry.machine].device == entry.device or entry.machine in library.FOR_ANY_DEVICE
        assert holds or entry.source in ("A100", "GH200")


@pytest.mark.parametrize("entry", DEVICES.values(), ids=lambda entry: entry.device.name)
def test_figures_are_dense_and_in_their_units(entry: library.LibraryDevice) -> None:
    device = entry.device
    if not device.is_gpu:
        return
    # Sparse figures would be twice as many FLOPs a byte; of these cards none does more than 420 dense,
    # nor more than 31.3 times its fp32 (GB200).
    assert 20 < device.half_flops / device.memory_bandwidth < 420
    assert 1 <= device.half_flops / device.single_flops <= 32
    assert 7e9 < device.memory_bytes < 310e9
    # The memory in the name is right within the share of error correction and the driver.
    sizes = [int(part[:-2]) for part in device.name.split("-") if part.endswith("GB")]
    assert all(0.95 < device.memory_bytes / 2**30 / size < 1.02 for size in sizes) or "H200" in device.name


def test_precisions() -> None:
    assert library.needs_fp16("V100")
    assert not library.needs_fp16("A100")
    assert not library.needs_fp16("something of mine")
