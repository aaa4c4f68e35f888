"""Measurements of *speed* on a device: traces are read, runs that do not fit are recomputed, a step runs on a CPU."""

import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.distributed  # noqa: F401  # names what the server of forked ranks has imported already
from benchmarks.gpu import STEPS
from benchmarks.measuring import llama_steps
from benchmarks.measuring.llama_steps import TINY, Measured, profiled
from benchmarks.measuring.report import LOOPBACK, SHARINGS, Section, one_line
from benchmarks.measuring.steps import LIMIT_S, run_here
from benchmarks.measuring.traces import Call, covered, read_trace
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


def test_ranks_that_share_a_device_have_it_as_their_first_and_another_host_each() -> None:
    by_host, by_leave = SHARINGS
    ranks = [by_host.of_rank(rank, {HARDWARE_QUEUES: "8"}) for rank in range(2)]
    assert [each["NCCL_HOSTID"] for each in ranks] == ["rank0", "rank1"]
    assert all(each.items() >= {**LOOPBACK, "LOCAL_RANK": "0", HARDWARE_QUEUES: "8"}.items() for each in ranks)
    assert by_leave.of_rank(1, {}).items() >= {**LOOPBACK, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "LOCAL_RANK": "0"}.items()


def event(kind: str, name: str, start: float, duration: float, thread: int = 7) -> dict[str, Any]:
    """An event of a trace, as `export_chrome_trace` writes it; microseconds."""
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration, "pid": 0, "tid": thread}


# Launches take 2 us; the fourth waits 30 us at a full queue, and the host then waits for the end.
STEP = [
    event("cuda_runtime", "cudaLaunchKernel", 0, 2, 1),
    event("cuda_driver", "cuLaunchKernelEx", 4, 2, 1),
    event("cuda_runtime", "cudaLaunchKernelExC", 8, 2, 1),
    event("cuda_runtime", "cudaLaunchKernel", 12, 32, 1),
    event("cuda_runtime", "cudaMemcpyAsync", 45, 1, 1),
    event("cuda_runtime", "cudaDeviceSynchronize", 50, 50, 1),
    event("kernel", "product", 10, 20),
    event("kernel", "sum", 30, 5),
    # On another stream, while the one before runs.
    event("kernel", "product", 32, 10, 8),
    event("kernel", "sum", 60, 15),
    event("gpu_memcpy", "Memcpy DtoH", 80, 10),
    event("cpu_op", "aten::mm", 0, 5, 1),
    event("gpu_user_annotation", "step", 10, 80),
    {"ph": "M", "name": "process_name", "pid": 0},
    {"ph": "i", "name": "no duration", "ts": 5, "cat": "kernel"},
]


def test_a_trace_of_a_device_is_read() -> None:
    trace = read_trace({"traceEvents": STEP[::-1]})
    assert (len(trace.kernels), len(trace.copies), trace.launches) == (4, 1, 4)
    assert (trace.span, trace.busy) == (100, 32 + 15 + 10)
    assert trace.idle_share == pytest.approx(0.43)
    # All but 30 us at the full queue and 50 us in the last wait.
    assert trace.host_time == 20
    assert trace.longest(1) == [("product", 2, 30)] and [each.name for each in trace.longest(9)] == ["product", "sum"]


def test_without_a_device_operators_that_call_no_other_are_read() -> None:
    nested = [event("cpu_op", *each) for each in (("linear", 0, 10), ("mm", 1, 4), ("add", 5, 5), ("mul", 12, 1))]
    trace = read_trace({"traceEvents": [*nested, event("cpu_op", "backward", 2, 3, 9)]})
    assert sorted(call.name for call in trace.kernels) == ["add", "backward", "mm", "mul"]
    assert not trace.of_device and trace.host_time == 0
    empty = read_trace({"traceEvents": []})
    assert (empty.span, empty.idle_share, empty.host_time, empty.longest(3)) == (0, 0, 0, [])


@pytest.mark.parametrize(
    ("spans", "microseconds"),
    [([], 0), ([(5, 2)], 2), ([(0, 10), (2, 3)], 10), ([(4, 2), (0, 5)], 6), ([(-3, 1), (0, 1), (1, 1)], 3)],
)
def test_time_covered_by_calls(spans: Sequence[tuple[float, float]], microseconds: float) -> None:
    assert covered(Call("any", *span) for span in spans) == microseconds


def test_tables_of_a_profile() -> None:
    about, longest = profiled(read_trace({"traceEvents": STEP}), "32768, 16", num_parts=2)
    assert about.rows == [("32768, 16", "0.10", "0.06", "43.0%", "4", "1", "4", "2.0", "0.010")]
    assert longest.rows == [("product", "2", "15.0", "0.03", "60.0%"), ("sum", "2", "10.0", "0.02", "40.0%")]


def first_that_fits(monkeypatch: pytest.MonkeyPatch, failures: dict[str, RuntimeError]) -> tuple[Any, Section]:
    def measured(config: object, token_slices: int, recompute: str) -> Measured:
        if recompute in failures:
            raise failures[recompute]
        return Measured(lambda: 5.0, [2.0, 2.5, 3.0], 5.0, recompute, (3 << 30, 4 << 30, 5 << 30))

    monkeypatch.setattr(llama_steps, "_measured", measured)
    table = Section("steps", ())
    config = llama_steps._config("llama3-1b", 32768)
    found = llama_steps._first_that_fits(config, 16, "32768, 16", table)
    return found and tuple(llama_steps._cells(config, found, 989.0)), table


def test_steps_that_do_not_fit_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    no_room = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB.\nmore")
    cells, table = first_that_fits(monkeypatch, {})
    # 665.2 and 454.1 TFLOP in 2.5 s.
    speed = (
        "2.5000 (2.0000 to 3.0000)",
        "13,107",
        "266.1",
        "181.6",
        "26.9%",
        "18.4%",
        "3.00",
        "4.00",
        "5.00",
        "5.0000",
    )
    assert cells == ("none", *speed) and not table.notes
    cells, table = first_that_fits(monkeypatch, {"none": no_room})
    assert cells == ("full", *speed)
    assert table.notes == ["32768, 16, recompute none: CUDA out of memory. Tried to allocate 16.00 GiB."]
    library = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    cells, table = first_that_fits(monkeypatch, {"none": no_room, "full": library})
    assert cells is None and len(table.notes) == 2
    assert table.rows == [("32768, 16", "full", "failed: does not fit, see the notes")]
    with pytest.raises(RuntimeError, match="illegal"):
        first_that_fits(monkeypatch, {"none": RuntimeError("an illegal memory access was encountered")})


def test_steps_run_on_a_cpu(tmp_path: Path) -> None:
    forks, processes = multiprocessing.get_context("forkserver"), []
    for token_slices in (2, 0):
        arguments = {"model": TINY, "seq_length": 32, "token_slices": token_slices}
        call = (tmp_path / f"{token_slices}.json", STEPS[0].function, arguments)
        processes.append(forks.Process(target=run_here, args=call, kwargs={"cpu": True, "limit_s": 120.0}))
        processes[-1].start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    of_sliced, of_plain = (json.loads((tmp_path / f"{each}.json").read_text())["sections"] for each in (2, 0))
    for name, (steps, profile, longest) in {"32, 2": of_sliced, "32, plain torch": of_plain}.items():
        assert steps["title"] == f"Steps of {TINY}, one sequence a step, fp32"
        assert [row[:2] for row in steps["rows"]] == [[name, "none"]]
        assert len(steps["notes"]) == 1
        assert profile["title"] == "The operators of one step" and [row[0] for row in profile["rows"]] == [name]
        assert longest["title"] == f"Longest operators of a step: {name}"
    assert of_sliced[0]["columns"] == of_plain[0]["columns"] and of_sliced[1]["columns"] == of_plain[1]["columns"]
    assert len(of_sliced[2]["rows"]) == 25


def test_the_command_ends_within_its_limit_with_the_most_telling_first() -> None:
    # Most steps end long before their limits; those with most news have the time.
    assert sum(step.limit_s for step in STEPS[:4]) <= LIMIT_S
    assert [step.arguments["token_slices"] for step in STEPS] == [16, 1, 16, 1, 0, 0]
    assert all(step.on_cpu["model"] == TINY for step in STEPS)
