"""What `make gpu` runs, over gloo on CPUs: cases end, one that hangs is told with its stall and the next goes on."""

import json
import socket
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

import tests.distributed  # noqa: F401  # names what the server of forked ranks has imported already
from benchmarks.measuring.report import Section, Sharing, publish
from deepspeed_ext.plan.ops import Op
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES
from tests.gpu import commands, engine, marked, numerics, runner
from tests.gpu.__main__ import run
from tests.gpu.cases import COLD, QUEUES, WARM, Case, Drain, DrainKind, Trial, cases
from tests.gpu.engine import add_result, pipelines_section
from tests.gpu.pipelines import Outcome
from tests.gpu.runner import Played, Result, Settings, play_case, steps_of_one_rank

ON_CPU = Sharing("CPU, gloo", {})


class Hanging(Case):
    """A case with trials that never end, between others that are not to suffer for it."""

    def phases(self, orders: Sequence[Sequence[Op]]) -> dict[str, list[Trial]]:
        good = super().phases(orders)
        hangs = Trial(False, Drain(DrainKind.NEVER, 1, 2))
        return {COLD: good.pop(COLD), DRAINS: good.pop(DRAINS), "hangs": [hangs, hangs]} | good


DRAINS = "synchronize at each op"


def test_drains_change_nothing_and_a_trial_that_hangs_is_told_and_the_rest_goes_on() -> None:
    case = Hanging("1f1b", 2, 1, 1, 4, drains=(DrainKind.SYNCHRONIZE,))
    settings = Settings(ON_CPU, transfer_timeout_s=8.0, most_hangs=1, start_method="forkserver")
    settings = replace(settings, of_one_rank=steps_of_one_rank([case], settings))
    result = play_case(case, settings)
    assert result.of_fp64 < 1e-6 and result.of_one_rank < 1e-6
    good = {name: str(played) for name, played in result.phases.items() if name != "hangs"}
    assert good == {COLD: "ok (1)", DRAINS: "ok (16)", WARM: "ok (2)"}
    hangs = result.phases["hangs"]
    assert (hangs.good, hangs.hung, len(hangs.problems)) == (0, 1, 1)
    behind = f"rank 1 (host {socket.gethostname()}) blocks the run: rank 1 is at 'forward 1F0"
    assert str(hangs).startswith(f"0 of 2 ok: before 1F0.2 on rank 1, HUNG: {behind}")
    assert not result.ok and not result.refused


def test_numbers_are_compared_with_plain_autograd_and_with_one_rank() -> None:
    ranks = numerics.Ranks(ON_CPU, start_method="forkserver")
    setup = numerics.Setup(2, f"{numerics.PP2} {numerics.UNIFORM}")
    (lengths,) = numerics.changed_lengths(ranks)
    (table,) = numerics.rows([setup], ranks)
    ranks.end()
    ((name, *numbers, _, result),) = table.rows
    of_fp64, allowed, of_one_rank, of_same = ([float(each) for each in pair.split(", ")] for pair in numbers)
    assert (name, allowed, of_same, result) == (str(setup), [1e-6] * 2, [1e-6] * 2, "ok")
    assert max(of_fp64 + of_one_rank) < 1e-6
    assert [row[-1] for row in lengths.rows] == ["ok"] * len(numerics.STARTS), lengths.rows


def test_on_cuda_fp32_is_allowed_what_its_kernels_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    fp32, bf16 = numerics.Setup(1, numerics.UNIFORM), numerics.Setup(1, f"{numerics.UNIFORM} {numerics.BF16}")
    assert (numerics.allowed(fp32), numerics.allowed(bf16)) == ((1e-6, 1e-6), (1e-2, 3e-2))
    monkeypatch.setattr(numerics, "has_gpu", lambda: True)
    assert (numerics.allowed(fp32), numerics.allowed(bf16)) == ((1e-5, 5e-5), (1e-2, 3e-2))


def test_every_setup_has_its_one_rank() -> None:
    for setup in (*numerics.ALL, *numerics.TWO_RANKS):
        one = numerics.on_one_rank(setup)
        assert (one is None) == (setup.data_parallel_size > 1)
        assert one is None or (one.world_size, one.dtype, "parallel-size" in one.flags) == (1, setup.dtype, False)


def test_a_wrong_gradient_is_seen() -> None:
    setup = numerics.Setup(1, numerics.UNIFORM)
    loss, expected = numerics.expected_gradients(setup)
    right = {(name, 0, None): gradient for name, gradient in expected.items()}
    assert numerics.errors_beside([(loss, 0.0, right)], loss, expected) == (0.0, 0.0)
    key = next(iter(right))
    wrong = right | {key: right[key] * 1.001}
    errors = numerics.errors_beside([(loss * 1.01, 0.0, wrong)], loss, expected)
    assert errors == (pytest.approx(0.01), pytest.approx(0.001))


def test_marked_tests_become_rows_and_failures_have_their_reason(tmp_path: Path) -> None:
    test, broken = tmp_path / "test_on_device.py", tmp_path / "test_broken.py"
    test.write_text(
        "import pytest\n"
        "@pytest.mark.gpu\ndef test_good(): pass\n"
        "@pytest.mark.gpu\ndef test_bad(): assert 1 == 2\n"
        "@pytest.mark.gpu\n@pytest.mark.skip\ndef test_left_out(): pass\n"
        "def test_of_cpus(): assert False\n"
    )
    broken.write_text("import a_package_that_is_not_here\n")
    *_, table = marked.rows([broken, test])
    (_, *_, reason), (file, *counts, _, result) = table.rows
    assert "ModuleNotFoundError: No module named 'a_package_that_is_not_here'" in reason
    assert file.endswith("test_on_device.py") and counts == ["1", "1", "1"]
    assert result.startswith("failed: test_bad: assert 1 == 2")


def test_the_marked_files_are_those_with_a_marked_test() -> None:
    files = marked.marked_files()
    assert {Path(each).name for each in files} >= {marked._NO_WAIT, marked._ATTENTION, "test_host_copies.py"}
    assert "tests/gpu/test_harness.py" not in files


def test_the_cases_are_those_that_lock_in_a_model_and_no_drain_is_left_out() -> None:
    every = list(cases())
    assert len(set(every)) == len(every)
    assert {case.hardware_queues for case in every} == set(QUEUES) == {1, 8, 32}
    assert {case.schedule for case in every} == {*SCHEDULES, OPTIMISED}
    case = Case("zero-bubble", 2, 1, 2, 2, drains=(DrainKind.FREE,), cold_drains=(DrainKind.FREE,))
    orders, phases = case.orders(), case.phases(case.orders())
    places = {(rank, op) for rank, order in enumerate(orders) for op in range(len(order))}
    warm, cold = phases["empty_cache at each op"], phases["cold, empty_cache at each op"]
    assert {(trial.drain.rank, trial.drain.op) for trial in warm} == places
    assert [trial.cold for trial in (*warm, *cold)] == [False] * len(warm) + [True] * len(cold)


def test_what_the_plan_refuses_is_not_run() -> None:
    result = play_case(Case("interleaved", 2, 2, 2, 4, hardware_queues=1), Settings(ON_CPU))
    assert result.ok and not result.phases
    assert result.refused.startswith("the programs deadlock") and "CUDA_DEVICE_MAX_CONNECTIONS=32" in result.refused


def test_the_report_is_markdown_for_an_issue_and_the_same_as_json(tmp_path: Path) -> None:
    table = pipelines_section()
    case = Case("gpipe", 2, 1, 1, 4)
    good = Played(2, good=2)
    add_result(table, Result(case, {COLD: Played(1, good=1), WARM: good, "drains": good}, seconds=3.2, of_fp64=2e-7))
    hung = Played(2, good=1, hung=1, problems=["before 1F0.2 on rank 1, HUNG: rank 1 | blocks the run"])
    add_result(table, Result(case, {COLD: Played(1, good=1), WARM: good, "drains": hung}))
    add_result(table, Result(case, refused="the programs deadlock"))
    failing = Section("Other", ("name", "s"))
    assert not failing.guarded("division", lambda: (1 / 0,))
    text = publish("make gpu", {"torch": "2.13"}, [table, failing], tmp_path)
    assert "| gpipe (2, 1, 1, 4) | 32 | ok (1) | ok (2) | drains: ok (2) | 2.0e-07 |  | ok | 3 |" in text
    assert "1 of 2 ok: before 1F0.2 on rank 1, HUNG: rank 1 \\| blocks the run |  |  | HUNG 1 times | 0 |" in text
    assert (
        "refused: the programs deadlock" in text
        and "| division | failed: ZeroDivisionError: division by zero |" in text
    )
    assert (tmp_path / "report.md").read_text() == text
    assert len(json.loads((tmp_path / "report.json").read_text())["sections"][0]["rows"]) == 3


@pytest.mark.parametrize(
    ("cuda", "found", "of_one", "wrong"),
    [
        (False, Outcome(2.0, 3.0), Outcome(2.0, 3.0), ""),
        (False, Outcome(2.00001, 3.0), None, "wrong loss 2.00001 on rank 1, not 2 as fp64"),
        (True, Outcome(2.00001, 3.0001), None, ""),
        (True, Outcome(2.0, 3.001), None, "wrong norm 3.001 on rank 1, not 3 as fp64"),
        (True, Outcome(2.00001, 3.0), Outcome(2.0, 3.0), "wrong loss 2.00001 on rank 1, not 2 as one rank"),
        (True, Outcome(float("nan"), 3.0), None, "wrong loss nan on rank 1, not 2 as fp64"),
    ],
)
def test_limits_of_a_step(
    cuda: bool, found: Outcome, of_one: Outcome | None, wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "has_gpu", lambda: cuda)
    monkeypatch.setattr(runner, "_expected", lambda _: Outcome(2.0, 3.0))
    settings = Settings(ON_CPU, of_one_rank={(1, 4): of_one} if of_one else {})
    assert runner._Table(Case("1f1b", 2, 1, 1, 4), [], settings, tmp_path)._wrong(1, found) == wrong


def test_steps_name_functions_and_their_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for steps in (commands.FACTS, commands.ENGINE, commands.CASES):
        for step in steps:
            module, _, name = step.function.partition(":")
            signature(getattr(import_module(module), name)).bind(**step.arguments)
            signature(getattr(import_module(module), name)).bind(**{**step.arguments, **(step.on_cpu or {})})
    assert {case.schedule for case in engine.FIRST} == {"1f1b", "zero-bubble", "interleaved"}
    assert run(["fact"]) == 2
    assert capsys.readouterr().err == "fact is no command of tests.gpu: give facts, engine, cases, speed, or none\n"
