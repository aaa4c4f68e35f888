"""The plan command, called by users and by programs."""

import json
import shlex
import subprocess
import sys

import pytest

from deepspeed_ext.plan.command import main
from deepspeed_ext.plan.command.request import Memory, Request
from deepspeed_ext.plan.command.simulated import summary
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.schedule_file import read_schedule
from deepspeed_ext.plan.schedules import SCHEDULES, gpipe, one_f_one_b, rank_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Timeline

PIPELINE = "--schedule 1f1b --stages 4 --micro-batches 4 --token-slices 2"
GPIPE_2_1_2 = "--schedule gpipe --stages 2 --micro-batches 1 --token-slices 2"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def printed(capsys):
    """Run a command with exit code 0, and return its output."""

    def run(words: str) -> str:
        assert main(shlex.split(words)) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def figures_of(printed):
    return lambda words: json.loads(printed(f"{words} --json"))


def durations(figures: dict) -> dict[str, float]:
    return {op: end - start for rank in figures["spans"] for op, start, end in rank}


# Programs


def test_the_command_imports_only_the_standard_library_and_prints_the_timeline_and_its_figures():
    program = (
        "import sys; from deepspeed_ext.plan.command import main; code = main(sys.argv[1:]);"
        "sys.exit(code or bool({'numpy', 'numba', 'torch', 'deepspeed'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *PIPELINE.split()], capture_output=True, text=True, timeout=60
    )
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


# Figures


def test_json_goes_to_standard_output_or_into_a_file(printed, figures_of, folder):
    figures = figures_of(PIPELINE)
    assert figures["schedule"] == "1f1b"
    assert (figures["num_stages"], figures["num_micro_batches"], figures["num_token_slices"]) == (4, 4, 2)
    assert figures["makespan"] == 22 and figures["deadlock_free"] is True
    assert figures["bubble_ratio"] == pytest.approx(3 / 11, abs=1e-9)
    assert figures["peak_live_token_slices"] == [5, 4, 3, 2]
    assert figures["peak_activation"] == [2.5, 2, 1.5, 1]
    assert figures["token_slices"] == [0.5, 0.5]
    assert figures["critical_path"][0] == "0F0.0" and figures["critical_path"][-1] == "0B3.0"
    orders = rank_orders(one_f_one_b, PipelineShape(4, 4, 2))
    assert figures["orders"] == [[str(op) for op in order] for order in orders]
    assert Timeline.from_json(json.dumps(figures)).makespan == 22
    assert "deadlock free            yes" in printed(f"{PIPELINE} --json figures/plan.json")
    assert json.loads((folder / "figures/plan.json").read_text()) == figures
    assert "eta" in printed("--timeline figures/plan.json --json again.json")
    assert "eta" in json.loads((folder / "again.json").read_text())


def test_token_slices_may_be_lengths(figures_of):
    figures = figures_of(PIPELINE[:-1] + "704,688,656")
    assert figures["num_token_slices"] == 3 and figures["token_slices"] == [704, 688, 656]
    # Two micro-batches are in flight, then the first token slice of a third where the last one of the first was.
    assert figures["peak_activation"][0] == (2 * 2048 - 656 + 704) / 2048
    assert figures["peak_activation"][-1] == (2048 - 656 + 704) / 2048


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_closed_form_is_the_simulated_bubble(printed, name):
    chunks = 2 if name == "interleaved" else 1
    shown = printed(f"--schedule {name} --stages 4 --micro-batches 2 --token-slices 8 --model-chunks {chunks}")
    (line,) = (line for line in shown.splitlines() if line.startswith("bubble"))
    simulated, closed = line.removeprefix("bubble ratio").rstrip(")").split(" (closed form ")
    assert closed.split(": ")[1] == simulated.strip()


def test_model_chunks_are_stages_of_ranks(figures_of):
    figures = figures_of("--schedule interleaved --stages 2 --micro-batches 4 --token-slices 2 --model-chunks 2")
    assert (figures["num_stages"], figures["num_model_chunks"], figures["placement"]) == (4, 2, "looped")
    assert len(figures["orders"]) == len(figures["peak_activation"]) == 2


def test_a_makespan_is_never_below_its_bound():
    # Both are sums of the same times in another order, so the bound may come out a rounding higher.
    shape = PipelineShape(1, 2)
    costs, orders = OpCosts.uniform(shape), rank_orders(gpipe, shape)
    request = Request("optimised", shape, (1.0,), costs, orders, lower_bound=4 * (1 + 1e-15))
    assert "(the makespan is 0.00% above it)" in summary(simulate(orders, shape, costs), request, Memory((1.0,)))


# Costs


def test_costs_follow_from_the_share_of_attention(figures_of):
    spans = durations(figures_of(f"{GPIPE_2_1_2} --attention-share 0.6"))
    # F 0.2 + 0.15 and 0.2 + 0.45; B and W together 0.4 + 0.3 and 0.4 + 0.9, second token slice first.
    assert [spans[op] for op in ("0F0.0", "0F0.1", "1B0.1", "1B0.0")] == pytest.approx([0.35, 0.65, 1.3, 0.7])
    spans = durations(figures_of(f"{GPIPE_2_1_2} --attention-share 0.6 --head-share 0.5"))
    assert [spans[op] for op in ("0F0.0", "1F0.0", "1B0.0")] == pytest.approx([0.35, 0.6, 1.2])


def test_the_example_in_the_help_is_a_costs_file(capsys, folder):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    lines = text[text.index("  {\n") : text.index("  }\n") + 4].splitlines()
    example = "\n".join(line.split("    time ")[0].split("    optional: ")[0] for line in lines)
    # With the byte order mark that editors write.
    (folder / "costs.json").write_text(example, encoding="utf-8-sig")
    assert main([*GPIPE_2_1_2.split(), "--costs", "costs.json"]) == 0
    assert "closed form" not in capsys.readouterr().out


# Schedules in files


def test_a_schedule_is_written_and_read_again(figures_of):
    words = "--schedule zero-bubble --stages 3 --micro-batches 2 --token-slices 2"
    written = figures_of(f"{words} --write-schedule orders.txt")
    assert read_schedule("orders.txt")[0] == PipelineShape(3, 2, 2)
    assert figures_of("--schedule orders.txt") == written | {"schedule": "orders"}


def test_flags_must_agree_with_a_schedule_file(capsys, printed, folder):
    (folder / "orders.csv").write_text("0F0.0, 3F0.0, 3B0.0, 0B0.0\n1F0.0, 2F0.0, 2B0.0, 1B0.0\n")
    assert read_schedule("orders.csv")[0] == PipelineShape(4, 1, 1, 2, Placement.V)
    printed("--schedule orders.csv --stages 2 --model-chunks 2 --placement v --micro-batches 1")
    for words, number in (
        ("--stages 4", 2),
        ("--model-chunks 1", 2),
        ("--placement looped", "v"),
        ("--micro-batches 2", 1),
        ("--token-slices 3,4", 1),
    ):
        assert main(["--schedule", "orders.csv", *words.split()]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"error: {words.split()[0]} ") and f"which has {number}: " in message


def test_a_deadlock_is_reported_with_its_reason(capsys, folder):
    (folder / "deadlock.txt").write_text("0B0.0, 0F0.0\n")
    words = ["--schedule", "deadlock.txt", "--json"]
    assert main(words) == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["deadlock_free"] is False
    assert "rank 0 at 0B0.0 waits for 0F0.0" in figures["reason"]
    assert main([*words, "why.json"]) == 1
    assert "deadlock free            no: " in capsys.readouterr().out
    assert json.loads((folder / "why.json").read_text()) == figures


def test_a_schedule_that_shared_hardware_queues_lock_is_not_free_of_deadlock(capsys, printed):
    words = "--schedule interleaved --stages 2 --model-chunks 2 --micro-batches 2 --token-slices 4 --hardware-queues"
    assumed = "deadlock free            yes, if no two streams of a rank share a hardware queue\n"
    assert printed(f"{words} 32").endswith(assumed)
    waits = "alltoall: all hosts of a stage wait in every forward for the sizes"
    for dispatcher, tail in (("allgather", "allgather: no host waits\n"), ("alltoall", f"{waits}\n")):
        assert printed(f"{words} 32 --moe-token-dispatcher-type {dispatcher}").endswith(tail)
    between = (
        "--schedule gpipe --stages 2 --model-chunks 2 --micro-batches 1 --token-slices 2 --moe-token-dispatcher-type"
    )
    assert f"{waits}, and messages travel between ops; " in printed(f"{between} alltoall")
    assert main([*words.split(), "1"]) == 1
    assert capsys.readouterr().out.endswith("14 streams share 1 hardware queue: set CUDA_DEVICE_MAX_CONNECTIONS=32\n")


# Memory


def test_memory_is_counted_in_bytes_if_sizes_are_given(printed, figures_of, folder):
    sizes = {"activation": [2, 4], "key_value": 1, "key_value_gradient": 3, "logits": 10}
    (folder / "sizes.json").write_text(json.dumps(sizes))
    words = f"{GPIPE_2_1_2[:-1]}3,1 --token-bytes sizes.json"
    figures = figures_of(f"{words} --html t.html --trace t.json")
    # Once both are forward: activations, keys and values, gradients of the first three tokens' keys and values.
    first, last = 4 * 2 + 4 * 1 + 3 * 3, 4 * 4 + 4 * 10 + 4 * 1 + 3 * 3
    assert figures["peak_memory_bytes"] == [first, last]
    assert figures["memory_bytes"][0][:2] == [[0, 3 * 2 + 4], [1, 4 * 2 + 4]]
    assert '"memory_unit":"bytes"' in (folder / "t.html").read_text()
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert max(event["args"]["held"] for event in events if event["ph"] == "C") == last
    assert f"peak memory              {first / 2**20:.4g} {last / 2**20:.4g}  (by stage), in MiB" in printed(words)


def test_memory_on_the_host_is_not_on_the_device(printed, figures_of, folder):
    (folder / "sizes.json").write_text(json.dumps({"activation": 1, "key_value": 2**20, "stage_input": 2**18}))
    words = "--schedule breadth-first --stages 2 --model-chunks 3 --micro-batches 1 --token-slices 4 --seq-length 64"
    words += " --token-bytes sizes.json --trace t.json"
    without = figures_of(words)
    figures = figures_of(f"{words} --offload --host-bandwidth {2**25},{2**26}")
    assert figures["makespan"] == without["makespan"]
    assert max(figures["peak_memory_bytes"]) < 0.7 * max(without["peak_memory_bytes"])
    assert '"host memory"' in (folder / "t.json").read_text()
    little = figures_of(f"{words} --offload --host-bytes {2**26}")
    assert max(little["peak_host_memory_bytes"]) <= 2**26 < max(figures["peak_host_memory_bytes"])
    shown = printed(f"{words} --offload")
    assert "without copies to hosts  " in shown and "peak on the hosts        " in shown
    # The first stage reads tokens, and stays.
    copies = Timeline.from_json(json.dumps(figures)).host_copies
    inputs = {copy.stage for copy in copies if copy.content == "input"}
    assert "host_copies" not in without and 0 not in inputs and inputs


# Searches


def test_a_schedule_and_token_slices_are_found_within_a_memory_limit(printed, figures_of):
    pipeline = "--stages 2 --micro-batches 2 --token-slices 3 --attention-share 0.5"
    optimised = f"--schedule optimised {pipeline} --memory-limit 1.5 --effort 0.02"
    found = figures_of(f"{optimised} --solve-slices --seq-length 64 --min-token-slice 8 --write-schedule found.txt")
    lengths = found["token_slices"]
    assert len(lengths) == 3 and sum(lengths) == 64 and min(lengths) >= 8
    assert max(found["peak_activation"]) <= 1.5 + 1e-9
    assert 0 < found["lower_bound"] <= found["makespan"] * (1 + 1e-9)
    # The file has the orders that were found, which are better than those of a fixed schedule.
    cut = ",".join(map(str, lengths))
    again = figures_of(f"--schedule found.txt --token-slices {cut} --attention-share 0.5")
    assert again["makespan"] == pytest.approx(found["makespan"], rel=1e-12)
    assert again["orders"] == found["orders"]
    assert found["makespan"] < figures_of(f"--schedule zero-bubble {pipeline}")["makespan"]
    assert "\nlower bound              " in printed(optimised)


def test_the_optimiser_chooses_the_placement_of_stages(figures_of):
    words = "--schedule optimised --stages 4 --micro-batches 2 --token-slices 4 --attention-share 0.6 --effort 0.05"
    free = figures_of(words)
    choices = ("1 --placement looped", "2 --placement looped", "2 --placement v")
    given = [figures_of(f"{words} --model-chunks {choice}") for choice in choices]
    assert free["makespan"] == min(figures["makespan"] for figures in given) < given[0]["makespan"]
    assert free["num_model_chunks"] == 2


def test_layers_are_dealt_so_that_a_head_does_not_delay_all_ranks(figures_of):
    words = "--schedule 1f1b --stages 4 --micro-batches 4 --token-slices 8 --attention-share 0.3 --head-share 0.5"
    alike, dealt = (figures_of(f"{words} --solve-slices {more}") for more in ("", "--solve-stages --layers 32"))
    assert dealt["stage_partition"] == [0, 9, 18, 27, 32]
    assert dealt["bubble_ratio"] < 0.12 < 0.25 < alike["bubble_ratio"]
    assert sum(alike["token_slices"]) == 4096 and len(set(alike["token_slices"])) > 1


# Drawings and measured timelines


def test_a_timeline_is_drawn_and_shown_beside_its_simulation(printed, figures_of, folder):
    drawings = "--svg t.svg --trace t.json --html t.html"
    printed(f"{PIPELINE} {drawings} --json measured.json")
    svg, html, trace = ((folder / f"t.{kind}").read_text() for kind in ("svg", "html", "json"))
    assert svg.startswith("<svg ") and ">1f1b<" in svg and html.startswith("<!doctype html>")
    held = [event["args"]["held"] for event in json.loads(trace)["traceEvents"] if event["ph"] == "C"]
    assert max(held) == pytest.approx(2.5)
    shown = printed(f"--timeline measured.json {drawings}")
    assert shown.startswith("measured\nstage 0 | F0.0 F0.1") and "\nsimulated\nstage 0 | F0.0 F0.1" in shown
    lines = shown.splitlines()
    assert "makespan                 22             22             +0.00%" in lines
    assert "bubble ratio             27.27%         27.27%         +0.00 points" in lines
    assert "eta                      1.0000 (simulated / measured makespan)" in lines
    assert lines[-1] == "largest differences      none"
    svg = (folder / "t.svg").read_text()
    assert ">measured: measured<" in svg and ">simulated<" in svg
    figures = figures_of("--timeline measured.json")
    assert (figures["schedule"], figures["makespan"], figures["eta"]) == ("1f1b", 22, 1.0)
    assert figures["simulated"]["makespan"] == 22
    assert figures["time_by_rank"][0] == {"busy": 16, "dependency": 6, "transfer": 0, "host_overhead": 0}
    # Its op costs can be used to simulate another schedule.
    (folder / "costs.json").write_text(json.dumps(figures["costs"]))
    assert figures_of(PIPELINE.replace("1f1b", "gpipe") + " --costs costs.json")["makespan"] == 22


# Bad input

SIZES = f"{PIPELINE} --seq-length 64 --token-bytes"
OFFLOAD = f"{SIZES} good.json --offload"
FILES = {
    "good.json": '{"activation": 1}',
    "list": "[]",
    "unknown.json": '{"activation": 1, "weights": 2}',
    "two.json": '{"activation": [1, 2]}',
    "below.json": '{"activation": -1}',
    "share.json": '{"activation": 1, "freed_by_input_gradient": 2}',
    "malformed": '{"forward": []}',
    "huge": '{"forward": [[1e308, 1e308]], "backward": [[1e308, 1]]}',
    "instant": json.dumps({"forward": [[1, 0]] * 4, "backward": [[1, 1]] * 4}),
}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--schedule is missing"),
        ("--schedule 2f2b", "schedule '2f2b' is not known"),
        ("--schedule 1f1b", "--stages is missing"),
        ("--schedule 1f1b --stages 1000 --micro-batches 10000", "make a step of 20,000,000 forwards and backwards"),
        (f"{PIPELINE} --stages 1000000000", "--stages 1000000000 is more than 10,000"),
        (f"{PIPELINE} --stages two", "--stages: invalid int value: 'two'"),
        (f"{PIPELINE} --micro-batches 0", "--micro-batches 0 is not"),
        (f"{PIPELINE} --token-slices 1000000000000", "--token-slices 1000000000000 is more"),
        (f"{PIPELINE} --token-slices many", "--token-slices many"),
        *((f"{PIPELINE} --{flag} no/file", "no/file") for flag in "svg html trace write-schedule".split()),
        (f"{PIPELINE} --placement v", "add --model-chunks 2"),
        (f"{PIPELINE} --placement w", "invalid choice: 'w'"),
        (f"{PIPELINE} --attention-share nan", "--attention-share nan"),
        (f"{PIPELINE} --attention-share 0 --head-share -1", "--head-share -1"),
        (f"{PIPELINE} --memory-limit 0", "--memory-limit 0"),
        (f"{PIPELINE} --memory-limit 2.49", "holds 2.5 activations of a micro-batch on rank 0, and --memory-limit"),
        # Flags that need another one
        (f"{PIPELINE} --head-share 0.5", "--head-share 0.5 needs"),
        (f"{PIPELINE} --solve-slices", "--solve-slices needs"),
        (f"{PIPELINE} --costs c.json --attention-share 0.5", "--costs c.json and --attention-share"),
        (f"{PIPELINE} --min-token-slice 9", "--min-token-slice 9 is for"),
        (f"{PIPELINE} --effort 2", "--effort 2.0 is for"),
        (f"{PIPELINE} --attention-share .3 --solve-stages", "--solve-stages is for"),
        (f"{PIPELINE} --attention-share .3 --layers 9", "--layers 9 is for"),
        (f"{PIPELINE} --token-slices 3,4 --solve-slices --attention-share 0.5", "--token-slices 3,4"),
        (f"{PIPELINE} --host-bytes 9", "--host-bytes 9.0 is for"),
        (f"{PIPELINE} --offload", "add --token-bytes"),
        (f"{PIPELINE} --token-bytes b.json", "add --seq-length"),
        (f"{PIPELINE} --speed 9", "unrecognized arguments: --speed 9"),
        # Files
        (f"{SIZES} list", 'list: sizes have no "activation"'),
        (f"{SIZES} unknown.json", "unknown field 'weights'"),
        (f"{SIZES} two.json", "two.json: sizes['activation'] has 2 entries for 4 stages"),
        (f"{SIZES} below.json", "sizes['activation'] has the entry -1"),
        (f"{SIZES} share.json", "sizes['freed_by_input_gradient'] is 2"),
        (f"{OFFLOAD} --host-bytes 0", "--host-bytes 0"),
        (f"{OFFLOAD} --host-bandwidth 1,x", "--host-bandwidth 1,x"),
        (f"{OFFLOAD} --costs instant", "0F0.1 takes none"),
        (f"{PIPELINE} --stages 1 --costs huge", "more than a number can hold"),
        (f"{PIPELINE} --costs malformed", "malformed: costs['forward']"),
        ("--timeline no/file", "no/file cannot be read (No such file"),
        ("--timeline malformed", "malformed: not a timeline"),
        ("--timeline .", ". has no iteration_*.json"),
        ("--timeline t.json --stages 2", "--stages contradicts --timeline"),
    ],
)
def test_bad_input_is_one_line(capsys, folder, words, message):
    for name, text in FILES.items():
        (folder / name).write_text(text)
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err
