"""The plan command, as people and programs call it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_ext.plan.command import main
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.schedule_file import read_schedule
from deepspeed_ext.plan.schedules import SCHEDULES, one_f_one_b, rank_orders
from deepspeed_ext.plan.timeline import Timeline

PIPELINE = ["--schedule", "1f1b", "--stages", "4", "--micro-batches", "4", "--token-slices", "2"]
DEADLOCK = "0B0.0, 0F0.0\n"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deepspeed_ext.plan", *words], capture_output=True, text=True, timeout=60, check=False
    )


def figures_of(capsys, *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words: str) -> str:
    """Run a command that must fail on its input, and return its one line."""
    assert main(words) == 2
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
        "peak activation          2.5 2 1.5 1  (by stage), in micro-batches",
        "deadlock free            yes",
    ]


def test_the_command_refuses_bad_input_in_one_line():
    done = command("--schedule", "2f2b", "--stages", "2", "--micro-batches", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: schedule '2f2b' is not known: choose one of gpipe, 1f1b, interleaved, zero-bubble, breadth-first, "
        "optimised, or the path of a schedule file\n"
    )


def test_a_schedule_that_shared_hardware_queues_lock_is_not_free_of_deadlock(capsys):
    words = "--schedule interleaved --stages 2 --model-chunks 2 --micro-batches 2 --token-slices 4 --hardware-queues"
    assert main([*words.split(), "32"]) == 0
    assert capsys.readouterr().out.endswith("deadlock free            yes\n")
    assert main([*words.split(), "1"]) == 1
    assert capsys.readouterr().out.endswith("8 streams share 1 hardware queue: set CUDA_DEVICE_MAX_CONNECTIONS=32\n")
    assert "--hardware-queues 0 is not a positive whole number: give 1 or more" in refused(capsys, *words.split(), "0")


def test_the_command_needs_only_the_standard_library():
    program = (
        "import sys; from deepspeed_ext.plan.command import main; main(sys.argv[1:]);"
        "sys.exit(bool({'numpy', 'numba', 'torch', 'deepspeed'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program, *PIPELINE], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0


# Figures


def test_json(capsys):
    assert main([*PIPELINE, "--json"]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(printed)
    assert figures["schedule"] == "1f1b"
    assert (figures["num_stages"], figures["num_micro_batches"], figures["num_token_slices"]) == (4, 4, 2)
    assert figures["makespan"] == 22
    assert figures["bubble_ratio"] == pytest.approx(3 / 11, abs=1e-9)
    assert figures["peak_live_token_slices"] == [5, 4, 3, 2]
    assert figures["peak_activation"] == [2.5, 2, 1.5, 1]
    assert figures["token_slices"] == [0.5, 0.5]
    assert figures["deadlock_free"] is True
    assert figures["critical_path"][0] == "0F0.0" and figures["critical_path"][-1] == "0B3.0"
    orders = rank_orders(one_f_one_b, PipelineShape(4, 4, 2))
    assert figures["orders"] == [[str(op) for op in order] for order in orders]
    assert Timeline.from_json(printed).makespan == 22


def test_json_goes_into_a_file_beside_what_is_printed(capsys, tmp_path):
    alone = figures_of(capsys, *PIPELINE)
    file = tmp_path / "figures" / "plan.json"
    assert main([*PIPELINE, "--json", str(file)]) == 0
    assert "deadlock free            yes" in capsys.readouterr().out
    assert json.loads(file.read_text()) == alone
    # So does that of a timeline.
    assert main(["--timeline", str(file), "--json", str(tmp_path / "again.json")]) == 0
    assert "eta" in capsys.readouterr().out and "eta" in json.loads((tmp_path / "again.json").read_text())


def test_token_slices_default_to_one(capsys):
    figures = figures_of(capsys, "--schedule", "gpipe", "--stages", "2", "--micro-batches", "3")
    assert figures["num_token_slices"] == 1


def test_token_slices_can_be_lengths(capsys):
    figures = figures_of(capsys, *PIPELINE[:-1], "704,688,656")
    assert figures["num_token_slices"] == 3 and figures["token_slices"] == [704, 688, 656]
    # Two micro-batches are in flight, then the first token slice of a third where the last one of the first was.
    assert figures["peak_activation"][0] == (2 * 2048 - 656 + 704) / 2048
    assert figures["peak_activation"][-1] == (2048 - 656 + 704) / 2048


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_asked_for(capsys, name):
    assert main(["--schedule", name, "--stages", "3", "--micro-batches", "2", "--token-slices", "3"]) == 0
    assert "deadlock free            yes" in capsys.readouterr().out


@pytest.mark.parametrize("name", [*SCHEDULES])
@pytest.mark.parametrize(
    "num_ranks, micro_batches, token_slices, model_chunks", [(4, 8, 2, 1), (4, 2, 8, 2), (8, 8, 1, 3)]
)
def test_the_closed_form_is_what_is_simulated(capsys, name, num_ranks, micro_batches, token_slices, model_chunks):
    more = ["--model-chunks", str(model_chunks)] if name == "interleaved" else []
    words = ["--stages", num_ranks, "--micro-batches", micro_batches, "--token-slices", token_slices]
    assert main(["--schedule", name, *map(str, words), *more]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("bubble"))
    simulated, closed = line.removeprefix("bubble ratio").rstrip(")").split(" (closed form ")
    assert closed.split(": ")[1] == simulated.strip()


def test_model_chunks_are_stages_of_ranks(capsys):
    words = ["--schedule", "interleaved", "--stages", "2", "--micro-batches", "4", "--token-slices", "2"]
    assert main([*words, "--num-model-chunks", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].startswith("rank 0 | 0F0.0 0F0.1 2F0.0 2F0.1 ")
    assert "peak live token slices   6 4  (by rank)" in printed
    figures = figures_of(capsys, *words, "--model-chunks", "2")
    assert (figures["num_stages"], figures["num_model_chunks"], figures["placement"]) == (4, 2, "looped")
    assert len(figures["orders"]) == len(figures["peak_activation"]) == 2


# Costs


def uneven_costs(tmp_path: Path) -> Path:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"forward": [[1, 2], [3, 1]], "backward": [[2, 1], [4, 2]], "transfer": 0.5}))
    return costs


GPIPE_2_1_2 = ["--schedule", "gpipe", "--stages", "2", "--micro-batches", "1", "--token-slices", "2"]


def test_costs_are_read_and_leave_no_closed_form_when_uneven(capsys, tmp_path):
    assert main([*GPIPE_2_1_2, "--costs", str(uneven_costs(tmp_path))]) == 0
    printed = capsys.readouterr().out
    assert "makespan                 14\nbubble ratio             42.86%\n" in printed


def test_costs_follow_from_the_share_of_attention(capsys):
    figures = figures_of(capsys, *GPIPE_2_1_2, "--attention-share", "0.6")
    # F 0.2 + 0.15 and 0.2 + 0.45; B and W together 0.4 + 0.3 and 0.4 + 0.9, second token slice first.
    spans = {op: end - start for rank in figures["spans"] for op, start, end in rank}
    assert [spans[op] for op in ("0F0.0", "0F0.1", "1B0.1", "1B0.0")] == pytest.approx([0.35, 0.65, 1.3, 0.7])
    with_head = figures_of(capsys, *GPIPE_2_1_2, "--attention-share", "0.6", "--head-share", "0.5")
    spans = {op: end - start for rank in with_head["spans"] for op, start, end in rank}
    assert [spans[op] for op in ("0F0.0", "1F0.0", "1B0.0")] == pytest.approx([0.35, 0.6, 1.2])


def test_the_costs_of_attention_know_uneven_token_slices(capsys):
    figures = figures_of(capsys, *GPIPE_2_1_2[:-1], "3,1", "--attention-share", "1")
    spans = {op: end - start for rank in figures["spans"] for op, start, end in rank}
    assert [spans["0F0.0"], spans["0F0.1"]] == pytest.approx([9 / 16, 7 / 16])


def test_the_example_in_the_help_is_a_costs_file(capsys, tmp_path):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        *("--schedule", "--stages", "--model-chunks", "--placement", "--micro-batches", "--token-slices", "--timeline"),
        *("--costs", "--attention-share", "--head-share", "--solve-slices", "--seq-length", "--min-token-slice"),
        *("--memory-limit", "--effort", "--token-bytes", "--offload", "--host-bandwidth", "--host-bytes"),
        *("--json", "--svg", "--html", "--trace", "--write-schedule"),
    ):
        assert flag in text
    lines = text[text.index("  {\n") : text.index("  }\n") + 4].splitlines()
    costs = tmp_path / "costs.json"
    costs.write_text("\n".join(line.split("    time ")[0].split("    optional: ")[0] for line in lines))
    assert main([*GPIPE_2_1_2, "--costs", str(costs), "--json"]) == 0


# Schedules in files


def test_a_schedule_is_written_and_read_again(capsys, tmp_path):
    file = tmp_path / "orders.txt"
    words = ["--schedule", "zero-bubble", "--stages", "3", "--micro-batches", "2", "--token-slices", "2"]
    written = figures_of(capsys, *words, "--write-schedule", str(file))
    assert read_schedule(file)[0] == PipelineShape(3, 2, 2)
    read = figures_of(capsys, "--schedule", str(file))
    assert read["schedule"] == "orders"
    assert {name: value for name, value in read.items() if name != "schedule"} == {
        name: value for name, value in written.items() if name != "schedule"
    }


def test_what_is_said_beside_a_schedule_file_must_agree_with_it(capsys, tmp_path):
    file = tmp_path / "orders.csv"
    file.write_text("0F0.0, 3F0.0, 3B0.0, 0B0.0\n1F0.0, 2F0.0, 2B0.0, 1B0.0\n")
    assert read_schedule(file)[0] == PipelineShape(4, 1, 1, 2, Placement.V)
    agreeing = ["--stages", "2", "--model-chunks", "2", "--placement", "v", "--micro-batches", "1"]
    assert main(["--schedule", str(file), *agreeing]) == 0
    capsys.readouterr()
    for words, number in (
        (["--stages", "4"], 2),
        (["--model-chunks", "1"], 2),
        (["--placement", "looped"], "v"),
        (["--micro-batches", "2"], 1),
        (["--token-slices", "3,4"], 1),
    ):
        message = refused(capsys, "--schedule", str(file), *words)
        assert message.startswith(f"error: {words[0]} ") and f"whose ops say {number}: " in message


def test_a_deadlock_is_reported_with_its_reason(capsys, tmp_path):
    file = tmp_path / "deadlock.txt"
    file.write_text(DEADLOCK)
    words = ["--schedule", str(file)]
    assert main([*words, "--json"]) == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["deadlock_free"] is False
    assert "rank 0 at 0B0.0 waits for 0F0.0" in figures["reason"]
    assert main([*words, "--json", str(tmp_path / "why.json")]) == 1
    assert "deadlock free            no: " in capsys.readouterr().out
    assert json.loads((tmp_path / "why.json").read_text()) == figures


# Memory


def test_a_schedule_above_the_memory_limit_is_refused(capsys):
    assert main([*PIPELINE, "--memory-limit", "2.5"]) == 0
    capsys.readouterr()
    message = refused(capsys, *PIPELINE, "--memory-limit", "2.49")
    assert "schedule '1f1b' holds 2.5 activations of a micro-batch on rank 0, and --memory-limit is 2.49" in message


def test_memory_is_counted_in_bytes_if_sizes_are_given(capsys, tmp_path):
    sizes = tmp_path / "sizes.json"
    sizes.write_text(json.dumps({"activation": [2, 4], "key_value": 1, "key_value_gradient": 3, "logits": 10}))
    words = ["--schedule", "gpipe", "--stages", "2", "--micro-batches", "1", "--token-slices", "3,1"]
    html, trace = tmp_path / "t.html", tmp_path / "t.json"
    figures = figures_of(capsys, *words, "--token-bytes", str(sizes), "--html", str(html), "--trace", str(trace))
    # Once both are forward: activations, keys and values, gradients of the first three tokens' keys and values.
    first, last = 4 * 2 + 4 * 1 + 3 * 3, 4 * 4 + 4 * 10 + 4 * 1 + 3 * 3
    assert figures["peak_memory_bytes"] == [first, last]
    assert figures["memory_bytes"][0][:2] == [[0, 3 * 2 + 4], [1, 4 * 2 + 4]]
    assert '"memory_unit":"bytes"' in html.read_text()
    assert max(e["args"]["held"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "C") == last
    assert main([*words, "--token-bytes", str(sizes)]) == 0
    assert (
        f"peak memory              {first / 2**20:.4g} {last / 2**20:.4g}  (by stage), in MiB"
        in capsys.readouterr().out
    )


def test_what_waits_on_the_host_is_not_in_the_memory_of_the_device(capsys, tmp_path):
    sizes, trace = tmp_path / "sizes.json", tmp_path / "t.json"
    sizes.write_text(json.dumps({"activation": 1, "key_value": 2**20, "stage_input": 2**18}))
    words = ["--schedule", "breadth-first", "--stages", "2", "--model-chunks", "3", "--micro-batches", "1"]
    words += ["--token-slices", "4", "--seq-length", "64", "--token-bytes", str(sizes), "--trace", str(trace)]
    without = figures_of(capsys, *words)
    figures = figures_of(capsys, *words, "--offload", "--host-bandwidth", f"{2**25},{2**26}")
    assert figures["makespan"] == without["makespan"]
    assert max(figures["peak_memory_bytes"]) < 0.7 * max(without["peak_memory_bytes"])
    assert "host_copies" not in without and Timeline.from_json(json.dumps(figures)).host_copies
    assert '"host memory"' in trace.read_text()
    little = figures_of(capsys, *words, "--offload", "--host-bytes", str(2**26))
    assert max(little["peak_host_memory_bytes"]) <= 2**26 < max(figures["peak_host_memory_bytes"])
    assert main([*words, "--offload"]) == 0
    assert "without copies to hosts  " in (shown := capsys.readouterr().out) and "peak on the hosts        " in shown
    # The first stage reads tokens, and stays.
    inputs = {copy.stage for copy in Timeline.from_json(json.dumps(figures)).host_copies if copy.content == "input"}
    assert 0 not in inputs and inputs
    message = "--host-bytes 0 leaves no room for any copy: give more than 0"
    assert message in refused(capsys, *words, "--offload", "--host-bytes", "0")
    message = "--host-bandwidth 1,x is no speed: give bytes per time above 0"
    assert message in refused(capsys, *words, "--offload", "--host-bandwidth", "1,x")
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"forward": [[1, 1, 0, 1]] * 6, "backward": [[1] * 4] * 6}))
    message = "--offload plans copies by the times of ops, and 0F0.2 takes none: give times above 0"
    assert message in refused(capsys, *words, "--offload", "--costs", str(costs))


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "the file of sizes is not JSON"),
        ("[]", 'sizes have no "activation"'),
        ('{"activation": 1, "weights": 2}', "sizes have the unknown field 'weights'"),
        ('{"activation": [1, 2]}', "sizes['activation'] has 2 entries for 4 stages"),
        ('{"activation": -1}', "sizes['activation'] has the entry -1"),
        ('{"activation": 1, "freed_by_input_gradient": 2}', "sizes['freed_by_input_gradient'] is 2"),
    ],
)
def test_sizes_that_cannot_be_are_one_line(capsys, tmp_path, text, message):
    sizes = tmp_path / "sizes.json"
    sizes.write_text(text)
    assert f"{sizes}: {message}" in refused(capsys, *PIPELINE, "--seq-length", "64", "--token-bytes", str(sizes))


# Searches


def test_a_schedule_and_token_slices_are_found_within_a_memory_limit(capsys, tmp_path):
    file = tmp_path / "found.txt"
    pipeline = ["--stages", "2", "--micro-batches", "2", "--token-slices", "3"]
    costs, limit = ["--attention-share", "0.5"], ["--memory-limit", "1.5", "--effort", "0.02"]
    found = figures_of(
        capsys,
        *("--schedule", "optimised", *pipeline, *costs, *limit),
        *("--solve-slices", "--seq-length", "64", "--min-token-slice", "8", "--write-schedule", str(file)),
    )
    lengths = found["token_slices"]
    assert len(lengths) == 3 and sum(lengths) == 64 and min(lengths) >= 8
    assert max(found["peak_activation"]) <= 1.5 + 1e-9
    assert 0 < found["lower_bound"] <= found["makespan"] * (1 + 1e-9)
    # What was written is what was found, and what was found is better than what was known.
    cut = ["--token-slices", ",".join(map(str, lengths))]
    again = figures_of(capsys, "--schedule", str(file), *cut, *costs)
    assert again["makespan"] == pytest.approx(found["makespan"], rel=1e-12)
    assert again["orders"] == found["orders"]
    even = figures_of(capsys, "--schedule", "zero-bubble", *pipeline, *costs)
    assert found["makespan"] < even["makespan"]
    assert main(["--schedule", "optimised", *pipeline, *costs, *limit]) == 0
    assert "\nlower bound              " in capsys.readouterr().out


def test_token_slices_are_found_for_a_schedule_that_is_given(capsys):
    words = ["--schedule", "1f1b", "--stages", "4", "--micro-batches", "2", "--token-slices", "4"]
    even = figures_of(capsys, *words, "--attention-share", "0.6")
    solved = figures_of(capsys, *words, "--attention-share", "0.6", "--solve-slices")
    assert solved["makespan"] < even["makespan"]
    assert sum(solved["token_slices"]) == 4096
    assert solved["token_slices"][0] > solved["token_slices"][-1]  # later ones have more to attend to


# Drawings


def test_the_optimiser_places_stages_where_nobody_says(capsys):
    words = ["--schedule", "optimised", "--stages", "4", "--micro-batches", "2", "--token-slices", "4"]
    words += ["--attention-share", "0.6", "--effort", "0.05"]
    free = figures_of(capsys, *words)
    choices = [("1", "looped"), ("2", "looped"), ("2", "v")]
    said = [figures_of(capsys, *words, "--model-chunks", count, "--placement", where) for count, where in choices]
    assert free["makespan"] == min(figures["makespan"] for figures in said) < said[0]["makespan"]
    assert free["num_model_chunks"] == 2


def test_layers_are_dealt_so_that_a_head_does_not_hold_all_up(capsys):
    words = ["--schedule", "1f1b", "--stages", "4", "--micro-batches", "4", "--token-slices", "8"]
    words += ["--attention-share", "0.3", "--head-share", "0.5", "--solve-slices"]
    alike, dealt = figures_of(capsys, *words), figures_of(capsys, *words, "--solve-stages", "--layers", "32")
    assert dealt["stage_partition"] == [0, 9, 18, 27, 32]
    assert dealt["bubble_ratio"] < 0.12 < 0.25 < alike["bubble_ratio"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attention-share", ".3", "--solve-stages"], "--solve-stages finds layers and token slices together"),
        (["--attention-share", ".3", "--layers", "9"], "--layers 9 is for --solve-stages: add it"),
        (["--attention-share", ".3", "--solve-slices", "--solve-stages", "--layers", "3"], "3 layers on 4 stages"),
    ],
)
def test_layers_that_cannot_be_dealt(capsys, words, message):
    assert message in refused(capsys, *PIPELINE, *words)
