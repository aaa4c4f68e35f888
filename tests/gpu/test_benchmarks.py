"""What `make gpu-bench` makes of its measurements: pure, without a device."""

import pytest

from benchmarks import gpu
from benchmarks.gpu import main
from benchmarks.measuring.report import LOOPBACK, SHARINGS, one_line
from benchmarks.measuring.workload import benchmark_model
from benchmarks.measuring.worlds import RankFailed
from deepspeed_ext.runtime.cuda_environment import HARDWARE_QUEUES

NO_ROOM = """Traceback (most recent call last):
  File "somewhere.py", line 1, in run
    compute()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB.
See the documentation.
"""


def test_an_error_is_told_by_the_first_line_after_its_last_frame() -> None:
    assert one_line(NO_ROOM) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB."
    assert one_line("local rank 3 has no device") == "local rank 3 has no device"


def test_where_one_has_no_room_all_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {gpu.PLAIN: 2.0, 1: 2.2, 4: 2.42}

    def measured(model: object, count: int, recompute: str, rounds: int, sharing: object) -> object:
        if (count, recompute) == (gpu.PLAIN, "none"):
            return RankFailed(NO_ROOM, rank=0)
        return (seconds[count], 1.5, 5.0) if recompute == "full" else (0.1, 1.5, 5.0)

    monkeypatch.setattr(gpu, "_measured", measured)
    table = gpu.training_speed(benchmark_model(1, llama=True), "tiny", (1, 4), rounds=1, sharing=SHARINGS[0])
    assert [(row[0], row[1], row[4], row[5]) for row in table.rows] == [
        ("plain torch", "2.0000", "-9.1%", "+0.0%"),
        ("unsliced", "2.2000", "+0.0%", "+10.0%"),
        ("4 token slices", "2.4200", "+10.0%", "+21.0%"),
    ]
    assert table.notes[0].startswith("Recomputation: full.")


def test_what_fails_is_a_row_and_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(size: tuple[int, int, int], rounds: int) -> tuple[str, ...]:
        if size[0] == 8:
            raise NotImplementedError("no kernel\nfor this device")
        return "1.0", "0.5", "0.500", ""

    monkeypatch.setattr(gpu, "_products", measured)
    table = gpu.products(None, 1, ((8, 4, 4), (16, 4, 4)))
    assert [row[:2] for row in table.rows] == [
        ("8, 4, 4", "failed: NotImplementedError: no kernel"),
        ("16, 4, 4", "1.0"),
    ]


def test_ranks_that_share_a_device_have_it_as_their_first_and_another_host_each() -> None:
    by_host, by_leave = SHARINGS
    ranks = [by_host.of_rank(rank, {HARDWARE_QUEUES: "8"}) for rank in range(2)]
    assert [each["NCCL_HOSTID"] for each in ranks] == ["rank0", "rank1"]
    assert all(each.items() >= {**LOOPBACK, "LOCAL_RANK": "0", HARDWARE_QUEUES: "8"}.items() for each in ranks)
    assert by_leave.of_rank(1, {}).items() >= {**LOOPBACK, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "LOCAL_RANK": "0"}.items()


def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.has_gpu", lambda: False)
    assert main([]) == 0
    assert capsys.readouterr().out == "no CUDA GPU here: nothing was run\n"
