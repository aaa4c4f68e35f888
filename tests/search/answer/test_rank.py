"""`rank` keeps its contract, its winner is trainable, and `predict` prices files of strategies."""

import json
import re
from pathlib import Path

import pytest

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.planning import check_trainable
from megatron_terapipe.search.__main__ import main
from megatron_terapipe.search.answer.flags import read_strategies
from megatron_terapipe.strategy import Strategy
from tests.search.answer.answers import read
from tests.search.problems import small_model

MODEL = {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 256, "vocab_size": 1024}
CLUSTER = {"nodes": [{"count": 2, "device": "A100-SXM4-40GB", "devices": 2}]}
FEW = ["--micro-batch-size", "1,2", "--num-token-slices", "1,2", "--num-model-chunks", "1,2", "--recompute", "none"]
STRATEGY_FIELDS = (
    "data_parallel_size tensor_parallel_size pipeline_parallel_size num_token_slices token_slices micro_batch_size "
    "global_batch_size schedule num_model_chunks recompute zero_stage stage_partition placement"
)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    return [str(tmp_path / "model.json"), str(tmp_path / "cluster.json"), "--global-batch-size", "8"]


def test_the_json_is_that_of_the_contract(files: list[str], tmp_path: Path) -> None:
    out = tmp_path / "ranking.json"
    assert main(["rank", *files, *FEW, "--top", "4", "--json", str(out)]) == 0
    entries = read(out)["entries"]
    assert [entry["rank"] for entry in entries] == [1, 2, 3, 4]
    for entry in entries:
        assert set(entry["strategy"]) >= set(STRATEGY_FIELDS.split())
        assert set(entry["predicted"]) >= {"iteration_time_s", "bubble_ratio", "peak_memory_bytes"}
        assert entry["feasible"] is True and entry["reason"] is None
        low, high = entry["predicted"]["interval_s"]
        assert 0 < low < entry["predicted"]["iteration_time_s"] < high
        check_trainable(Strategy.from_json(entry["strategy"]), small_model())
    sizes = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    assert len({tuple(entry["strategy"][size] for size in sizes) for entry in entries}) == 4
    assert all(entry["variants"] >= 1 for entry in entries)
    # The same question has the same answer.
    assert main(["rank", *files, *FEW, "--top", "4", "--json", str(tmp_path / "again.json")]) == 0
    assert (tmp_path / "again.json").read_text() == out.read_text()


@pytest.mark.parametrize(
    ("strategy", "flags", "words"),
    [
        (
            {"data_parallel_size": 1, "pipeline_parallel_size": 4, "schedule": "gpipe"},
            "--tensor-parallel-size 1,2 --sequence-parallel off",
            (
                *("strategies of the space", "priced on their schedule", "schedule: the winner has 1f1b, and it gpipe"),
                "--schedule leaves it out: gpipe is not 1f1b.",
            ),
        ),
        (
            {"pipeline_parallel_size": 4, "num_model_chunks": 2},
            "",
            ("It cannot run: 8 stages are more than the 6 layers.",),
        ),
    ],
)
def test_explanations(
    files: list[str],
    tmp_path: Path,
    strategy: dict[str, object],
    flags: str,
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = tmp_path / "lost.json"
    lost.write_text(json.dumps(strategy))
    asked = ["rank", *files, *FEW, "--schedule", "1f1b", *flags.split(), "--top", "2", "--explain", str(lost)]
    assert main(asked) == 0
    printed = capsys.readouterr().out
    assert all(each in printed for each in words), printed


def test_explain_a_faster_strategy_outside_the_flags(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, out = tmp_path / "fast.json", tmp_path / "free.json"
    assert main(["rank", *files, *FEW, "--top", "1", "--json", str(out)]) == 0
    fast.write_text(json.dumps(read(out)["entries"][0]))
    pinned = "--recompute full --micro-batch-size 1 --num-token-slices 2 --tensor-parallel-size 2".split()
    assert main(["rank", *files, *pinned, "--top", "1", "--explain", str(fast)]) == 0
    printed = capsys.readouterr().out
    assert "--recompute leaves it out: none is not full." in printed
    assert "faster than the winner." in printed and "as fast as the winner" not in printed


def test_the_files_of_the_winner(files: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "out"
    training = ["--tokens", "2B", "--price", "A100=2.5", "--failures-per-device-year", "0.2", "--save-seconds", "9"]
    assert main(["rank", *files, *FEW, "--schedule", "1f1b", "--top", "2", *training, "--output", str(directory)]) == 0
    first = read(directory / "ranking.json")["entries"][0]
    hours = 2e9 / first["predicted"]["tokens_per_s"] / first["decision"]["goodput"] / 3600
    assert first["decision"]["cost"] == pytest.approx(4 * 2.5 * hours)
    names = {path.name for path in directory.iterdir()}
    assert names >= {"strategy.json", "hostfile", "ds_config.json", "launch.sh", "report.html"}
    winner = Strategy.from_json(json.loads((directory / "strategy.json").read_text()))
    check_trainable(winner, small_model())


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--schedule", "dualpipe"], "--schedule dualpipe is not known: choose among gpipe"),
        (["--tensor-parallel-size", "x"], "--tensor-parallel-size x is not whole numbers from 1"),
        (["--zero-stage", "0,3"], "--zero-stage 3 does not run in terapipe: write 0 or 1"),
        (["--top", "0"], "--top 0 is not a whole number from 1"),
        (["--effort", "0"], "--effort 0.0 is not above 0"),
        (["--effort", "inf"], "--effort inf is not above 0 and finite"),
        (["--memory-headroom", "1.5"], "--memory-headroom 1.5 is not a share of the memory from 0 to below 1"),
        (["--memory-headroom=-1%"], "--memory-headroom -1% is not a share"),
        (["--memory-headroom", "nan"], "--memory-headroom nan is not a share"),
        (["--memory-headroom", "some"], "--memory-headroom some is not a share"),
        (["--token-slices", "128,a"], "--token-slices 128,a is not lengths"),
    ],
)
def test_errors_are_one_line(
    files: list[str], flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rank", *files, *flags]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {error}") and message.count("\n") == 1


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        (["--stage-partition", "0,2,7"], "break the rule 'the stage partition fits model and stages'"),
        (
            ["--tensor-parallel-size", "3"],
            "the parallel sizes that flags fix do not divide the 4 devices: give divisors of 4",
        ),
        (["--data-parallel-size", "3"], "no layout of the ranks has the sizes that flags fix"),
        (["--num-layers", "6000", "--hidden-size", "8192"], "need more memory than the devices have"),
    ],
)
def test_no_strategy_names_the_last_rule(
    files: list[str], constraints: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--schedule", "1f1b", "--num-token-slices", "1", "--num-model-chunks", "1", "--recompute", "full"]
    assert main(["rank", *files, *few, *constraints]) == 1
    printed = capsys.readouterr()
    assert words in printed.err and len(printed.err.splitlines()) == 1
    assert "none of the others" not in printed.out


def test_proposed_trials(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "proposed.jsonl"
    assert main(["rank", *files, *FEW, "--top", "1", "--propose-trials", str(out)]) == 0
    assert f"run them with `terapipe search trial --strategies {out}`" in " ".join(capsys.readouterr().out.split())
    proposed = [Strategy.from_json(json.loads(line)) for line in out.read_text().splitlines()]
    assert len(proposed) == 8
    assert len({(one.tensor_parallel_size, one.pipeline_parallel_size) for one in proposed}) >= 3
    for one in proposed:
        check_trainable(one, ModelConfig(**MODEL))
    assert read_strategies(str(out)) == proposed


def test_headroom_without_any_strategy(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank", *files, *FEW, "--memory-headroom", "99%", "--explain"]) == 1
    printed = capsys.readouterr()
    assert "fit the devices, but none keeps as much memory free as --memory-headroom asks for" in printed.err
    assert "rejected by the rule: memory kept free (--memory-headroom)" in printed.out
    assert re.search(r"--memory-headroom 0\.[89]\d* allows it", " ".join(printed.out.split()))
    assert "the nearest" not in printed.out + printed.err, "what fits the devices needs no more than they have"


def test_a_ranking_has_other_trainers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.json").write_text(json.dumps({**MODEL, "seq_length": 65536, "position_embedding_type": "rope"}))
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": [{"device": "A100-SXM4-40GB", "devices": 2}]}))
    asked = ["rank", str(tmp_path / "model.json"), str(tmp_path / "cluster.json"), "--global-batch-size", "1", *FEW]
    asked += ["--schedule", "1f1b", "--tensor-parallel-size", "2"]
    found, without = tmp_path / "with.json", tmp_path / "without.json"
    assert main([*asked, "--json", str(found)]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert notes[0].startswith("note: Megatron-core with Transformer Engine would take ")
    assert main([*asked, "--json", str(without), "--no-rivals"]) == 0
    assert "Ulysses" not in capsys.readouterr().out
    trainers = {each["software"]: each for each in read(found)["trainers"]}
    assert list(trainers) == ["megatron-core", "fsdp", "alst"] and read(without)["trainers"] == []
    assert [each["measured_on_such_devices"] for each in trainers.values()] == [True, True, False]
    assert trainers["fsdp"]["strategy"]["data_parallel_size"] == 1 and trainers["fsdp"]["why_not"] is None
    assert trainers["alst"]["strategy"]["zero_stage"] == 3
    assert read(found)["entries"] == read(without)["entries"]


LINES = [
    {"pipeline_parallel_size": 4, "micro_batch_size": 2, "global_batch_size": 8, "schedule": "gpipe"},
    {"tensor_parallel_size": 16},
    {"data_parallel_size": 4, "global_batch_size": 8},
    {"data_parallel_size": 2, "pipeline_parallel_size": 2, "stage_partition": [0, 2, 7]},
    {"pipeline_parallel_size": 2, "micro_batch_size": 4096, "global_batch_size": 8192},
    {"strategy": {"pipeline_parallel_size": 4, "placement": [2, 3, 0, 1]}, "rank": 7},
    {"pipeline_parallel_size": 4, "global_batch_size": 8, "vocabulary_stages": True},
    {"pipeline_parallel_size": 4, "num_token_slices": 2, "global_batch_size": 8, "schedule": "optimised"},
]


def predict(files: list[str], tmp_path: Path, text: str, *flags: str) -> int:
    (tmp_path / "s.jsonl").write_text(text)
    return main(["predict", *files[:2], "--strategies", str(tmp_path / "s.jsonl"), *flags])


def test_predict_keeps_the_order_of_the_file(files: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    text = "\n\n".join(map(json.dumps, LINES)) + "\n"
    assert predict(files, tmp_path, text, "--json", str(out)) == 0
    entries = read(out)["entries"]
    assert [entry["index"] for entry in entries] == list(range(len(LINES)))
    assert sorted(entry["rank"] for entry in entries) == list(range(1, len(LINES) + 1))
    feasible = [entry["feasible"] for entry in entries]
    assert feasible == [True, False, True, False, False, True, False, True]
    assert "16 ranks" in entries[1]["reason"] and entries[1]["predicted"] is None
    assert "stage_partition" in entries[3]["reason"] or "stage partition" in entries[3]["reason"]
    assert "out of memory" in entries[4]["reason"] and entries[4]["predicted"]["peak_memory_bytes"] > 40e9
    assert entries[5]["strategy"]["placement"] == [2, 3, 0, 1]
    by_rank = sorted((entry for entry in entries if entry["feasible"]), key=lambda entry: entry["rank"])
    times = [entry["predicted"]["iteration_time_s"] for entry in by_rank]
    assert times == sorted(times)
    assert max(entry["rank"] for entry in by_rank) == 4
    assert "write schedule 'optimised'" in entries[6]["reason"]


def test_batch_for_strategies_without_one(files: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--json", str(out), "--global-batch-size", "16", "--tokens", "1M"]
    assert predict(files, tmp_path, '{"data_parallel_size": 4}', *flags) == 0
    (entry,) = read(out)["entries"]
    assert entry["strategy"]["global_batch_size"] == 16
    assert entry["decision"]["days"] == pytest.approx(1e6 / entry["predicted"]["tokens_per_s"] / 86400)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"data_parallel_size": 1}\n{"stages": 3}', "s.jsonl line 2: strategy: field 'stages' is not known"),
        ('{"data_parallel_size": 0}', "s.jsonl line 1: strategy: data_parallel_size 0 is not a whole number"),
        ("{", "s.jsonl line 1: this line is not JSON"),
        ("\n", "s.jsonl holds no strategy"),
        ("[1]", "s.jsonl line 1: strategy: [1] is not a JSON object"),
    ],
)
def test_a_line_that_is_no_strategy(
    files: list[str], tmp_path: Path, text: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(files, tmp_path, text) == 2
    message = capsys.readouterr().err
    assert error in message and message.count("\n") == 1


def test_answers_of_rank_are_read(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`strategy.json` and `ranking.json` are one document over many lines."""
    out = tmp_path / "out.json"
    for document, number in (
        (LINES[0], 1),
        ([{"strategy": LINES[0], "rank": 1}, LINES[2]], 2),
        ({"entries": [{"strategy": LINES[0]}]}, 1),
    ):
        assert predict(files, tmp_path, json.dumps(document, indent=1), "--json", str(out)) == 0
        assert len(read(out)["entries"]) == number
    assert predict(files, tmp_path, json.dumps([LINES[0], {"dp": 2}], indent=1)) == 2
    assert "s.jsonl entry 2: strategy: field 'dp' is not known" in capsys.readouterr().err
    assert predict(files, tmp_path, "[\n]") == 2
    assert "holds no strategy" in capsys.readouterr().err
