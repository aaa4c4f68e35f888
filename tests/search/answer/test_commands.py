"""Commands of the search: `rank` keeps its contract, its winner is trainable; `predict` and `slices` take files."""

import json
import re
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.planning import check_trainable
from megatron_terapipe.search.__main__ import COMMANDS, main
from megatron_terapipe.search.answer.flags import add_question_flags, read_strategies
from megatron_terapipe.search.answer.question import precision_of, question_of
from megatron_terapipe.search.answer.slices_command import flags_of
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.strategy import Strategy
from tests.architecture.sources import ROOT
from tests.search.answer.answers import checked, read
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
    for name, document in (("model", MODEL), ("cluster", CLUSTER)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    return [str(tmp_path / "model.json"), str(tmp_path / "cluster.json"), "--global-batch-size", "8"]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and command.summary in text for name, command in COMMANDS.items())


@pytest.mark.parametrize(
    ("model", "flags", "name", "seq_length"),
    [
        ("gpt3-13b", "--seq-length 1024", "gpt3-13b", 1024),
        ("-", "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32", "2x64", 32),
    ],
)
def test_a_question_from_flags(model: str, flags: str, name: str, seq_length: int) -> None:
    parser = ArgumentParser()
    add_question_flags(parser)
    cluster = str(ROOT / "examples" / "clusters" / "p3.16xlarge-48.yaml")
    asked, notes = question_of(parser.parse_args([model, cluster, *flags.split()]), 8)
    problem = asked.problem
    assert (problem.workload.name, problem.workload.seq_length) == (name, seq_length)
    assert (problem.cluster.num_devices, problem.precision, notes) == (384, "fp16", ())


@pytest.mark.parametrize(("device", "precision"), [("T4", "fp16"), ("A100", "bf16"), ("cpu-core", "fp32")])
def test_precision_follows_the_devices(device: str, precision: str) -> None:
    cluster, _ = parse_cluster({"nodes": [{"device": device}]}, "c.json")
    assert precision_of(Namespace(precision=None), cluster) == precision
    assert precision_of(Namespace(precision="fp32"), cluster) == "fp32"


RANK = "rank {model} {cluster} --global-batch-size 8"
SLICES = "slices {model} {cluster} --strategy {given}"
PREDICT = "predict {model} {cluster} --strategies {given}"
PIPELINE = {"pipeline_parallel_size": 4, "global_batch_size": 4, "schedule": "1f1b"}


@pytest.mark.parametrize(
    ("words", "given", "error"),
    [
        ("", "", "the following arguments are required: COMMAND: see python -m megatron_terapipe.search --help"),
        ("rnk", "", "command 'rnk' is not known: did you mean rank?"),
        ("--json", "", "the following arguments are required: COMMAND, and --json is not a flag of this command"),
        (
            "rank - {cluster} --global-batch-size 8 --hidden-size 64",
            "",
            "MODEL -: num_layers, num_attention_heads, seq_length must be given: add them",
        ),
        (f"{RANK} --precision nvfp4", "", ".*--precision"),
        (
            f"{RANK} --precision fp8",
            "",
            "--precision fp8 does not run in terapipe, whose products are in fp32, fp16, bf16",
        ),
        (f"{RANK} --precision fp8 --software deepspeed", "", "--precision fp8 does not run in deepspeed"),
        (f"{RANK} --precision fp8 --software megatron-core", "", "--precision fp8 is not in the products of a A100"),
        (f"{RANK} --seq-len 8", "", ".*--seq-len"),
        (f"{RANK} --schedule dualpipe", "", "--schedule dualpipe is not known: choose among gpipe"),
        (f"{RANK} --tensor-parallel-size x", "", "--tensor-parallel-size x is not whole numbers from 1"),
        (f"{RANK} --zero-stage 0,3", "", "--zero-stage 3 does not run in terapipe: write 0 or 1"),
        (f"{RANK} --top 0", "", "argument --top: 0 is not a whole number from 1 to 1,000,000: see .*rank --help"),
        (f"{RANK} --global-batch-size 0", "", "argument --global-batch-size: 0 is not a whole number from 1"),
        (f"{RANK} --effort 0", "", "argument --effort: 0 is not a finite number above 0"),
        (f"{RANK} --effort inf", "", "argument --effort: inf is not a finite number above 0"),
        (f"{RANK} --memory-headroom 1.5", "", ".* 1.5 is not a share of the memory from 0 to below 1, such as"),
        (f"{RANK} --memory-headroom=-1%", "", "argument --memory-headroom: -1% is not a share"),
        (f"{RANK} --memory-headroom nan", "", "argument --memory-headroom: nan is not a share"),
        (f"{RANK} --memory-headroom some", "", "argument --memory-headroom: some is not a share"),
        (f"{RANK} --token-slices 128,a", "", "--token-slices 128,a is not lengths"),
        (
            f"{RANK} --token-slices 128,128 --num-token-slices 4",
            "",
            "--num-token-slices 4 contradicts --token-slices, which lists 2",
        ),
        (f"{RANK} --schedule 1f1b,optimised", "", "--schedule .* is not ranked.*rank reports its saving"),
        (f"{RANK} --vocabulary-stages on", "", "--vocabulary-stages .* is not ranked.*rank reports its saving"),
        (PREDICT, '{"zero_stage": 1}\n{"stages": 3}', ".*given line 2: strategy: field 'stages' is not known"),
        (PREDICT, '{"zero_stage": -1}', ".*given line 1: strategy: zero_stage -1 is not a whole number"),
        (PREDICT, "{", ".*given line 1: this line is not JSON"),
        (PREDICT, "\n", ".*given holds no strategy"),
        (PREDICT, "[1]", ".*given line 1: strategy: .1. is not a JSON object"),
        (SLICES, json.dumps(PIPELINE | {"tensor_parallel_size": 4}), ".*given: .*16 ranks.*4 devices"),
        (SLICES, json.dumps(PIPELINE | {"num_model_chunks": 2, "schedule": "interleaved"}), ".*given: .*layers"),
        (SLICES, json.dumps(PIPELINE | {"schedule": "gpip"}), ".*given: .*gpip"),
        (SLICES, json.dumps(PIPELINE | {"pipelines": 2}), ".*given line 1: .*'pipelines' is not known"),
        (f"{SLICES} --count 0", json.dumps(PIPELINE), "argument --count: 0 is not a list of whole numbers from 1"),
        (f"{SLICES} --count two", json.dumps(PIPELINE), "argument --count: two is not a list"),
        (f"{SLICES} --granularity 0", json.dumps(PIPELINE), "argument --granularity: 0 is not a whole number from 1"),
    ],
)
def test_errors_are_one_line(
    files: list[str], tmp_path: Path, words: str, given: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "given").write_text(given)
    named = {"model": files[0], "cluster": files[1], "given": tmp_path / "given"}
    assert main([word.format(**named) for word in words.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert re.match(f"error: {error}", shown.err), shown.err


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
    assert "faster than the winner." in printed


def test_the_files_of_the_winner(files: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "out"
    training = ["--tokens", "2B", "--price", "A100=2.5"]
    assert main(["rank", *files, *FEW, "--schedule", "1f1b", "--top", "2", *training, "--output", str(directory)]) == 0
    first = read(directory / "ranking.json")["entries"][0]
    hours = 2e9 / first["predicted"]["tokens_per_s"] / 3600
    assert first["decision"]["cost"] == pytest.approx(4 * 2.5 * hours)
    names = {path.name for path in directory.iterdir()}
    assert names >= {"strategy.json", "hostfile", "ds_config.json", "launch.sh", "report.html"}
    winner = Strategy.from_json(json.loads((directory / "strategy.json").read_text()))
    check_trainable(winner, small_model())


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
    assert re.search(r": one would with --memory-headroom 0\.[89]\d* or ", printed.err)
    assert "the nearest" not in printed.out + printed.err, "what fits the devices needs no more than they have"


def test_a_ranking_has_other_trainers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.json").write_text(json.dumps({**MODEL, "seq_length": 65536, "position_embedding_type": "rope"}))
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": [{"device": "A100-SXM4-40GB", "devices": 2}]}))
    asked = ["rank", str(tmp_path / "model.json"), str(tmp_path / "cluster.json"), "--global-batch-size", "1", *FEW]
    asked += ["--schedule", "1f1b", "--tensor-parallel-size", "2"]
    found, without = tmp_path / "with.json", tmp_path / "without.json"
    assert main([*asked, "--json", str(found)]) == 0
    assert "\n- megatron-core: " in capsys.readouterr().out
    assert main([*asked, "--json", str(without), "--no-rivals"]) == 0
    assert "Ulysses" not in capsys.readouterr().out
    trainers = {
        name: each for each in read(found)["advice"] if (name := each["name"]) in ("megatron-core", "fsdp", "alst")
    }
    assert len(trainers) == 3 and not trainers.keys() & {each["name"] for each in read(without)["advice"]}
    assert all("; no published run like it)" in each["line"] for each in trainers.values())
    assert trainers["fsdp"]["iteration_time_s"] and trainers["alst"]["strategy"]["zero_stage"] == 3
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


def slices(tmp_path: Path, strategy: dict[str, object], *flags: str) -> int:
    """Find the token slices of a strategy on sixteen devices."""
    for name, document in (("p3", {"nodes": [{"count": 2, "machine": "p3.16xlarge"}]}), ("strategy", strategy)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    sizes = ["--num-layers", "8", "--seq-length", "4096", "--strategy", str(tmp_path / "strategy.json")]
    return main(["slices", "gpt3-13b", str(tmp_path / "p3.json"), *sizes, *flags])


CUT = {"tensor_parallel_size": 2, "pipeline_parallel_size": 8, "global_batch_size": 4, "schedule": "1f1b"}


def test_slices_print_a_curve_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answer.json"
    assert slices(tmp_path, CUT, "--count", "2,4", "--json", str(path)) == 0
    answer = read(path)
    best = answer["best"]
    assert [row["num_token_slices"] for row in answer["curve"]] == [1, 2, 4]
    assert best["iteration_time_s"] == min(row["iteration_time_s"] for row in answer["curve"])
    assert best["speedup"] == pytest.approx(answer["curve"][0]["iteration_time_s"] / best["iteration_time_s"])
    assert best["mfu_causal"] < best["mfu"]
    assert sum(best["token_slices"]) == 4096 and len(best["token_slices"]) == best["num_token_slices"]
    assert not any(length % 16 for length in best["token_slices"])
    assert answer["flags"] == flags_of(tuple(best["token_slices"])) and answer["notes"] == []
    shown = capsys.readouterr().out
    assert "speed-up" in shown and f"flags of the best: {answer['flags']}" in shown
    assert slices(tmp_path, CUT, "--count", "2,4", "--json", "-") == 0
    assert checked(capsys.readouterr().out) == answer
    # An entry of a ranking, and another granularity.
    entry = {"rank": 1, "strategy": {**CUT, "num_token_slices": 3}, "feasible": True}
    assert slices(tmp_path, entry, "--count", "2", "--granularity", "128", "--json", "-") == 0
    assert not any(length % 128 for length in checked(capsys.readouterr().out)["curve"][-1]["token_slices"])


@pytest.mark.parametrize(("symbol", "equal"), [("M", True), ("G", True), ("*", False)])
def test_layers_without_attention_have_equal_token_slices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], symbol: str, equal: bool
) -> None:
    """With a small head, so that stages are balanced."""
    documents = {
        "model": {
            **{"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 128},
            **{"seq_length": 65536, "hybrid_layer_pattern": f"{symbol}-" * 16},
        },
        "cluster": {"nodes": [{"machine": "dgx-h100"}]},
        "strategy": {"pipeline_parallel_size": 8, "global_batch_size": 1, "schedule": "1f1b", "recompute": "stage"},
    }
    for name, document in documents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    model, cluster, strategy = (str(tmp_path / f"{name}.json") for name in documents)
    assert main(["slices", model, cluster, "--strategy", strategy, "--count", "8", "--json", "-"]) == 0
    lengths = checked(capsys.readouterr().out)["best"]["token_slices"]
    assert (lengths == [8192] * 8) is equal and lengths == sorted(lengths, reverse=True)


def test_flags_of_one_token_slice():
    assert flags_of((2048,)) == "--num-token-slices 1"
    assert flags_of((704, 688, 656)) == "--num-token-slices 3 --token-slices 704,688,656"
