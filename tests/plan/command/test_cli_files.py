"""The plan command's files: drawings, measured timelines; and what it says of input that cannot be."""

import json

import pytest

from deepspeed_ext.plan.command import main
from deepspeed_ext.plan.command.request import Memory, Request
from deepspeed_ext.plan.command.simulated import summary
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import gpipe, rank_orders
from deepspeed_ext.plan.simulate import simulate
from tests.plan.command.test_cli import PIPELINE, figures_of, refused


def test_drawings_are_written(capsys, tmp_path):
    svg, trace, html = tmp_path / "t.svg", tmp_path / "t.json", tmp_path / "t.html"
    assert main([*PIPELINE, "--svg", str(svg), "--trace", str(trace), "--html", str(html)]) == 0
    assert svg.read_text().startswith("<svg ") and ">1f1b<" in svg.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert max(event["args"]["held"] for event in events if event["ph"] == "C") == pytest.approx(2.5)
    assert html.read_text().startswith("<!doctype html>")


# Measured timelines


@pytest.fixture
def timeline(capsys, tmp_path):
    assert main([*PIPELINE, "--json"]) == 0
    file = tmp_path / "measured.json"
    file.write_text(capsys.readouterr().out)
    return file


def test_a_timeline_is_shown_beside_its_simulation(capsys, tmp_path, timeline):
    svg, html, trace = tmp_path / "m.svg", tmp_path / "m.html", tmp_path / "m.trace"
    drawings = ["--svg", str(svg), "--html", str(html), "--trace", str(trace)]
    assert main(["--timeline", str(timeline), *drawings]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("measured\nstage 0 | F0.0 F0.1") and "\nsimulated\nstage 0 | F0.0 F0.1" in printed
    lines = printed.splitlines()
    assert "makespan                 22             22             +0.00%" in lines
    assert "bubble ratio             27.27%         27.27%         +0.00 points" in lines
    assert "eta                      1.0000 (simulated / measured makespan)" in lines
    assert lines[-1] == "largest differences      none"
    assert ">measured: measured<" in svg.read_text() and ">simulated<" in svg.read_text()
    assert len(json.loads(trace.read_text())["traceEvents"]) > 64
    figures = figures_of(capsys, "--timeline", str(timeline))
    assert (figures["schedule"], figures["makespan"], figures["eta"]) == ("1f1b", 22, 1.0)
    assert figures["simulated"]["makespan"] == 22
    assert figures["time_by_rank"][0] == {"busy": 16, "dependency": 6, "transfer": 0, "host_overhead": 0}


def test_its_op_costs_can_be_used_to_simulate_another_schedule(capsys, tmp_path, timeline):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(figures_of(capsys, "--timeline", str(timeline))["costs"]))
    words = ["--schedule", "gpipe", *PIPELINE[2:], "--costs", str(costs)]
    assert figures_of(capsys, *words)["makespan"] == 22


def test_a_timeline_contradicts_a_schedule(capsys):
    message = refused(capsys, "--timeline", "t.json", "--stages", "2")
    assert message == "error: --timeline already says what ran, so --stages has no use: drop one\n"
    message = refused(capsys, "--timeline", "t.json", "--solve-slices")
    assert message == "error: --timeline already says what ran, so --solve-slices has no use: drop one\n"


# Bad input


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "--schedule is missing"),
        (["--schedule", "1f1b"], "--stages is missing"),
        (["--schedule", "1f1b", "--stages", "2"], "--micro-batches is missing"),
        ([*PIPELINE, "--stages", "0"], "--stages 0 is not a positive whole number"),
        ([*PIPELINE, "--micro-batches", "-1"], "--micro-batches -1 is not a positive whole number"),
        ([*PIPELINE, "--token-slices", "0"], "--token-slices 0 is not a positive whole number"),
        ([*PIPELINE, "--token-slices", "many"], "--token-slices many is no number and no list of lengths"),
        ([*PIPELINE, "--token-slices", "4,x"], "token slices '4,x' are not whole numbers"),
        ([*PIPELINE, "--model-chunks", "0"], "--model-chunks 0 is not a positive whole number"),
        ([*PIPELINE, "--model-chunks", "2"], "schedule '1f1b' has one stage on each pipeline rank"),
        ([*PIPELINE, "--placement", "v"], "--placement v deals several stages to each rank: add --model-chunks 2"),
        ([*PIPELINE, "--placement", "w"], "invalid choice: 'w' (choose from 'looped', 'v')"),
        ([*PIPELINE, "--attention-share", "1.1"], "--attention-share 1.1 is not a share: give 0 to 1"),
        ([*PIPELINE, "--attention-share", "nan"], "--attention-share nan is not a share: give 0 to 1"),
        ([*PIPELINE, "--head-share", "0.5"], "--head-share needs costs that follow from token slices"),
        ([*PIPELINE, "--attention-share", "0", "--head-share", "-1"], "--head-share -1 is out of range"),
        ([*PIPELINE, "--solve-slices"], "--solve-slices needs costs that follow from token slices"),
        ([*PIPELINE, "--costs", "c.json", "--attention-share", "0.5"], "--costs and --attention-share both say"),
        ([*PIPELINE, "--memory-limit", "0"], "--memory-limit 0 is out of range: give more than 0"),
        ([*PIPELINE, "--memory-limit", "inf"], "--memory-limit inf is out of range: give more than 0"),
        ([*PIPELINE, "--min-token-slice", "9"], "--min-token-slice 9 is for --solve-slices: add it"),
        ([*PIPELINE, "--seq-length", "1"], "2 token slices of 1 tokens: give between 1 and 1 token slices"),
        ([*PIPELINE[:-1], "3,4", "--seq-length", "8"], "token slices 3,4 sum to 7, but the sequence has 8 tokens"),
        ([*PIPELINE, "--token-bytes", "b.json"], "--token-bytes needs the tokens of a sequence: add --seq-length"),
        (
            [*PIPELINE, "--offload"],
            "--offload needs the bytes of keys and values, or of stage inputs: add --token-bytes",
        ),
        ([*PIPELINE, "--host-bytes", "9"], "--host-bytes is for copies to the host: add --offload, or drop it"),
        ([*PIPELINE, "--effort", "2"], "--effort 2 is for what is searched: add --solve-slices, or drop it"),
        ([*PIPELINE, "--effort", "0"], "--effort 0 is out of range: give more than 0"),
        ([*PIPELINE, "--min-token-slice", "0"], "--min-token-slice 0 is not a positive whole number"),
        (
            [*PIPELINE[:-1], "3,4", "--solve-slices", "--attention-share", "0.5"],
            "--solve-slices looks for the lengths that --token-slices 3,4 gives: give their number",
        ),
        (["--schedule", "nowhere/orders.txt"], "nowhere/orders.txt cannot be read (No such file"),
        ([*PIPELINE, "--stages", "two"], "argument --stages: invalid int value: 'two'"),
        ([*PIPELINE, "--speed", "9"], "unrecognized arguments: --speed 9"),
    ],
)
def test_bad_input_is_one_line(capsys, words, message):
    assert message in refused(capsys, *words)


def test_times_that_no_number_can_hold_are_refused(capsys, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"forward": [[1e308, 1e308]], "backward": [[1e308, 1]]}))
    words = ["--schedule", "1f1b", "--stages", "1", "--micro-batches", "2", "--token-slices", "2", "--costs", str(file)]
    assert "add up to more than a number can hold" in refused(capsys, *words)


def test_costs_that_an_editor_saved_with_a_byte_order_mark(capsys, tmp_path):
    file = tmp_path / "costs.json"
    file.write_bytes(b'\xef\xbb\xbf{"forward": [[1]], "backward": [[2]]}')
    words = ["--schedule", "1f1b", "--stages", "1", "--micro-batches", "2", "--costs", str(file)]
    assert figures_of(capsys, *words)["makespan"] == 6


def test_a_makespan_is_never_below_its_bound():
    # Both are sums of the same times in another order, so the bound may come out a rounding higher.
    shape = PipelineShape(1, 2)
    costs = OpCosts.uniform(shape)
    orders = rank_orders(gpipe, shape)
    request = Request("optimised", shape, (1.0,), costs, orders, lower_bound=4 * (1 + 1e-15))
    assert "(the makespan is 0.00% above it)" in summary(simulate(orders, shape, costs), request, Memory((1.0,)))


def test_files_that_cannot_be_read_or_written_are_one_line(capsys, tmp_path):
    missing, binary, malformed = tmp_path / "no" / "file", tmp_path / "binary", tmp_path / "malformed"
    binary.write_bytes(b"\xff\xfe\x00")
    malformed.write_text('{"forward": []}')
    assert f"{missing} cannot be read (No such file" in refused(capsys, *PIPELINE, "--costs", str(missing))
    assert f"{binary} is not UTF-8 text" in refused(capsys, *PIPELINE, "--costs", str(binary))
    assert f"{malformed}: costs['forward'] has rows of []" in refused(capsys, *PIPELINE, "--costs", str(malformed))
    assert f"{missing} cannot be read (No such file" in refused(capsys, "--timeline", str(missing))
    assert f"{malformed}: not a timeline" in refused(capsys, "--timeline", str(malformed))
    assert f"{tmp_path} has no iteration_*.json" in refused(capsys, "--timeline", str(tmp_path))
    for flag in ("--svg", "--html", "--trace", "--write-schedule"):
        assert f"{missing} cannot be written (No such file" in refused(capsys, *PIPELINE, flag, str(missing))
    assert f"{tmp_path} cannot be written (Is a directory" in refused(capsys, *PIPELINE, "--trace", str(tmp_path))
