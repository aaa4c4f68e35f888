"""What `make gpu` runs, over gloo on CPUs: cases end, one that hangs is told with its stall and the next goes on."""

import json
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

import tests.distributed  # noqa: F401  # names what the server of forked ranks has imported already
from benchmarks.measuring.report import Section, Sharing, publish
from deepspeed_ext.plan.ops import Op
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES
from tests.gpu import marked, numerics
from tests.gpu.__main__ import add_result, main, pipelines_section
from tests.gpu.cases import COLD, QUEUES, WARM, Case, Drain, DrainKind, Trial, cases
from tests.gpu.runner import Played, Result, Settings, play_case

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
    result = play_case(case, settings)
    good = {name: str(played) for name, played in result.phases.items() if name != "hangs"}
    assert good == {COLD: "ok (1)", DRAINS: "ok (16)", WARM: "ok (2)"}
    hangs = result.phases["hangs"]
    assert (hangs.good, hangs.hung, len(hangs.problems)) == (0, 1, 1)
    behind = f"rank 1 (host {socket.gethostname()}) blocks the run: rank 1 is at 'forward 1F0"
    assert str(hangs).startswith(f"0 of 2 ok: before 1F0.2 on rank 1, HUNG: {behind}")
    assert not result.ok and not result.refused


def test_numbers_are_held_against_plain_autograd() -> None:
    table = numerics.section()
    setup = numerics.Setup(2, f"{numerics.PP2} {numerics.UNIFORM}")
    numerics.add_rows(table, (setup,), ON_CPU, start_method="forkserver")
    ((name, loss, gradient, allowed, result),) = table.rows
    assert (name, allowed, result) == (str(setup), "1e-06, 1e-06", "ok")
    assert max(float(loss), float(gradient)) < 1e-6


def test_a_wrong_gradient_is_seen() -> None:
    setup = numerics.Setup(1, numerics.UNIFORM)
    loss, expected = numerics.expected_gradients(setup)
    right = {(name, 0, None): gradient for name, gradient in expected.items()}
    assert numerics.errors(setup, [(loss, 0.0, right)]) == (0.0, 0.0)
    key = next(iter(right))
    wrong = right | {key: right[key] * 1.001}
    assert numerics.errors(setup, [(loss * 1.01, 0.0, wrong)]) == (pytest.approx(0.01), pytest.approx(0.001))


def test_marked_tests_become_rows_and_failures_say_which(tmp_path: Path) -> None:
    test = tmp_path / "test_on_device.py"
    test.write_text(
        "import pytest\n"
        "@pytest.mark.gpu\ndef test_good(): pass\n"
        "@pytest.mark.gpu\ndef test_bad(): assert 1 == 2\n"
        "@pytest.mark.gpu\n@pytest.mark.skip\ndef test_left_out(): pass\n"
        "def test_of_cpus(): assert False\n"
    )
    table = marked.section()
    marked.add_rows(table, [test])
    ((file, *counts, result),) = table.rows
    assert file.endswith("test_on_device.py") and counts == ["1", "1", "1"]
    assert result.startswith("failed: test_bad: assert 1 == 2")


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
    add_result(table, Result(case, {COLD: Played(1, good=1), WARM: good, "drains": good}, seconds=3.2))
    hung = Played(2, good=1, hung=1, problems=["before 1F0.2 on rank 1, HUNG: rank 1 | blocks the run"])
    add_result(table, Result(case, {COLD: Played(1, good=1), WARM: good, "drains": hung}))
    add_result(table, Result(case, refused="the programs deadlock"))
    failing = Section("Other", ("name", "s"))
    assert not failing.guarded("division", lambda: (1 / 0,))
    text = publish("make gpu", {"torch": "2.13"}, [table, failing], tmp_path)
    assert "| gpipe (2, 1, 1, 4) | 32 | ok (1) | ok (2) | drains: ok (2) | ok | 3 |" in text
    assert "1 of 2 ok: before 1F0.2 on rank 1, HUNG: rank 1 \\| blocks the run | HUNG 1 times | 0 |" in text
    assert (
        "refused: the programs deadlock" in text
        and "| division | failed: ZeroDivisionError: division by zero |" in text
    )
    assert (tmp_path / "report.md").read_text() == text
    assert len(json.loads((tmp_path / "report.json").read_text())["sections"][0]["rows"]) == 3


def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.__main__.has_gpu", lambda: False)
    assert main([]) == 0
    assert capsys.readouterr().out == "no CUDA GPU here: nothing was run\n"
