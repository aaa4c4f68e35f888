import json
import subprocess
import sys

import pytest

from deepspeed_ext.plan import __main__ as cli
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import SCHEDULES, backward_order, one_f_one_b, stage_orders
from deepspeed_ext.plan.timeline import Timeline

PIPELINE = ["--schedule", "1f1b", "--stages", "4", "--micro-batches", "4", "--token-slices", "2"]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deepspeed_ext.plan", *words], capture_output=True, text=True, timeout=60, check=False
    )


def refused(capsys, *words: str) -> str:
    """Run a command that must fail on its input, and return its one line."""
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_the_command_prints_the_timeline_and_its_figures():
    done = command(*PIPELINE)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("stage 0 | F0.0 F0.1 F1.0 F1.1 F2.0  .    .    .   B0.1")
    assert lines[5:] == [
        "makespan                 22",
        "bubble ratio             27.27% (closed form (P-1)/(MS+P-1): 27.27%)",
        "peak live token slices   5 4 3 2  (by stage)",
        "deadlock free            yes",
    ]


def test_the_command_refuses_bad_input_in_one_line():
    done = command("--schedule", "2f2b", "--stages", "2", "--micro-batches", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: schedule '2f2b' is not known: choose one of gpipe, 1f1b\n"


def test_the_command_needs_only_the_standard_library():
    program = (
        "import sys; from deepspeed_ext.plan.__main__ import main; main(sys.argv[1:]);"
        "sys.exit(bool({'numpy', 'torch', 'deepspeed'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program, *PIPELINE], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0


def test_json(capsys):
    assert cli.main([*PIPELINE, "--json"]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(printed)
    assert figures["schedule"] == "1f1b"
    assert (figures["num_stages"], figures["num_micro_batches"], figures["num_token_slices"]) == (4, 4, 2)
    assert figures["makespan"] == 22
    assert figures["bubble_ratio"] == pytest.approx(3 / 11, abs=1e-9)
    assert figures["peak_live_token_slices"] == [5, 4, 3, 2]
    assert figures["deadlock_free"] is True
    orders = stage_orders(one_f_one_b, PipelineShape(4, 4, 2))
    assert figures["orders"] == [[str(op) for op in order] for order in orders]
    assert Timeline.from_json(printed).makespan == 22


def test_token_slices_default_to_one(capsys):
    assert cli.main(["--schedule", "gpipe", "--stages", "2", "--micro-batches", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_token_slices"] == 1


def test_costs_are_read_and_leave_no_closed_form_when_uneven(capsys, tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"forward": [[1, 2], [3, 1]], "backward": [[2, 1], [4, 2]], "transfer": 0.5}))
    words = [
        "--schedule",
        "gpipe",
        "--stages",
        "2",
        "--micro-batches",
        "1",
        "--token-slices",
        "2",
        "--costs",
        str(costs),
    ]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "makespan                 14\nbubble ratio             42.86%\n" in printed


def test_the_example_in_the_help_is_a_costs_file(capsys, tmp_path):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--schedule", "--stages", "--micro-batches", "--token-slices", "--costs", "--timeline", "--json"):
        assert flag in text
    lines = text[text.index("  {\n") : text.index("  }\n") + 4].splitlines()
    costs = tmp_path / "costs.json"
    costs.write_text("\n".join(line.split("    time ")[0].split("    optional: ")[0] for line in lines))
    words = [
        "--schedule",
        "gpipe",
        "--stages",
        "2",
        "--micro-batches",
        "1",
        "--token-slices",
        "2",
        "--costs",
        str(costs),
    ]
    assert cli.main([*words, "--json"]) == 0


def test_drawings_are_written(capsys, tmp_path):
    svg, trace = tmp_path / "t.svg", tmp_path / "t.json"
    assert cli.main([*PIPELINE, "--svg", str(svg), "--trace", str(trace)]) == 0
    assert svg.read_text().startswith("<svg ") and ">1f1b<" in svg.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_timeline_is_shown_instead(capsys, tmp_path):
    assert cli.main([*PIPELINE, "--json"]) == 0
    timeline, svg = tmp_path / "measured.json", tmp_path / "measured.svg"
    timeline.write_text(capsys.readouterr().out)
    assert cli.main(["--timeline", str(timeline), "--svg", str(svg)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("stage 0 | F0.0 F0.1") and "bubble ratio             27.27%\n" in printed
    assert ">measured<" in svg.read_text()
    assert cli.main(["--timeline", str(timeline), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["schedule"] is None and figures["makespan"] == 22


def test_a_timeline_contradicts_a_schedule(capsys, tmp_path):
    message = refused(capsys, "--timeline", "t.json", "--stages", "2")
    assert message == "error: --timeline already says what ran, so --stages has no use: drop one\n"


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "--schedule is missing"),
        (["--schedule", "1f1b"], "--stages is missing"),
        (["--schedule", "1f1b", "--stages", "2"], "--micro-batches is missing"),
        ([*PIPELINE, "--stages", "0"], "num_stages=0 is not a positive whole number"),
        ([*PIPELINE, "--micro-batches", "-1"], "num_micro_batches=-1 is not a positive whole number"),
        ([*PIPELINE, "--token-slices", "0"], "num_token_slices=0 is not a positive whole number"),
        ([*PIPELINE, "--stages", "two"], "argument --stages: invalid int value: 'two'"),
        ([*PIPELINE, "--speed", "9"], "unrecognized arguments: --speed 9"),
    ],
)
def test_bad_input_is_one_line(capsys, words, message):
    assert message in refused(capsys, *words)


def test_files_that_cannot_be_read_or_written_are_one_line(capsys, tmp_path):
    missing, binary, malformed = tmp_path / "no" / "file", tmp_path / "binary", tmp_path / "malformed"
    binary.write_bytes(b"\xff\xfe\x00")
    malformed.write_text('{"forward": []}')
    assert f"cannot read {missing}: No such file" in refused(capsys, *PIPELINE, "--costs", str(missing))
    assert f"cannot read {binary}: " in refused(capsys, *PIPELINE, "--costs", str(binary))
    assert "costs['backward'] is not a list of lists" in refused(capsys, *PIPELINE, "--costs", str(malformed))
    assert f"cannot read {missing}: No such file" in refused(capsys, "--timeline", str(missing))
    assert f"{malformed}: not a timeline" in refused(capsys, "--timeline", str(malformed))
    assert f"cannot write {missing}: No such file" in refused(capsys, *PIPELINE, "--svg", str(missing))
    assert f"cannot write {tmp_path}: Is a directory" in refused(capsys, *PIPELINE, "--trace", str(tmp_path))


def test_a_deadlock_is_reported_with_its_reason(capsys, monkeypatch):
    monkeypatch.setattr(cli, "schedule_named", lambda name: backward_order)
    words = ["--schedule", "1f1b", "--stages", "1", "--micro-batches", "1"]
    assert cli.main([*words, "--json"]) == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["deadlock_free"] is False
    assert figures["reason"].startswith("the schedule deadlocks: stage 0 at 0B0.0 waits for 0F0.0")
    assert figures["orders"] == [["0B0.0"]]
    assert cli.main(words) == 1
    assert "stage 0 at 0B0.0 waits for 0F0.0" in capsys.readouterr().out


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_asked_for(capsys, name):
    assert cli.main(["--schedule", name, "--stages", "3", "--micro-batches", "2", "--token-slices", "3"]) == 0
    assert "deadlock free            yes" in capsys.readouterr().out
