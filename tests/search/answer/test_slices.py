"""The command `slices`."""

import json
import re
from pathlib import Path

import pytest

from megatron_terapipe.search.__main__ import main
from megatron_terapipe.search.answer.slices_command import flags_of
from tests.search.answer.answers import checked, read

CLUSTER = {
    "nodes": [
        {"name": "a", "count": 2, "machine": "p3.16xlarge"},
    ]
}
STRATEGY = {"tensor_parallel_size": 2, "pipeline_parallel_size": 8, "global_batch_size": 4, "schedule": "1f1b"}
SIZES = ["--num-layers", "8", "--seq-length", "4096"]


@pytest.fixture
def files(tmp_path: Path):
    def write(name, document):
        path = tmp_path / name
        path.write_text(json.dumps(document))
        return str(path)

    return write


def run(files, *flags, strategy=STRATEGY, cluster=CLUSTER):
    named = ["gpt3-13b", files("cluster.json", cluster), "--strategy", files("strategy.json", strategy)]
    return main(["slices", *named, *SIZES, *flags])


def test_writes_json(files, tmp_path, capsys):
    path = tmp_path / "answer.json"
    assert run(files, "--count", "2,4", "--json", str(path)) == 0
    answer = read(path)
    best = answer["best"]
    assert [row["num_token_slices"] for row in answer["curve"]] == [1, 2, 4]
    assert best["iteration_time_s"] == min(row["iteration_time_s"] for row in answer["curve"])
    assert best["speedup"] == pytest.approx(answer["curve"][0]["iteration_time_s"] / best["iteration_time_s"])
    assert best["mfu_causal"] < best["mfu"]
    assert sum(best["token_slices"]) == 4096
    assert len(best["token_slices"]) == best["num_token_slices"]
    assert not any(length % 16 for length in best["token_slices"])
    assert answer["flags"] == flags_of(tuple(best["token_slices"]))
    assert answer["notes"] == []
    shown = capsys.readouterr().out
    assert "speed-up" in shown and f"flags of the best: {answer['flags']}" in shown
    assert run(files, "--count", "2,4", "--json", "-") == 0
    assert checked(capsys.readouterr().out) == answer


@pytest.mark.parametrize(("symbol", "equal"), [("M", True), ("G", True), ("*", False)])
def test_layers_without_attention_have_equal_token_slices(files, capsys, symbol: str, equal: bool) -> None:
    """With a small head, so that stages are balanced."""
    sizes = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 128, "seq_length": 65536}
    model = files("model.json", {**sizes, "hybrid_layer_pattern": f"{symbol}-" * 16})
    cluster = files("cluster.json", {"nodes": [{"machine": "dgx-h100"}]})
    strategy = {"pipeline_parallel_size": 8, "global_batch_size": 1, "schedule": "1f1b", "recompute": "stage"}
    words = cluster, "--strategy", files("strategy.json", strategy), "--count", "8", "--json", "-"
    assert main(["slices", model, *words]) == 0
    lengths = checked(capsys.readouterr().out)["best"]["token_slices"]
    assert (lengths == [8192] * 8) is equal and lengths == sorted(lengths, reverse=True)


def test_takes_an_entry_of_a_ranking_and_a_granularity(files, capsys):
    entry = {"rank": 1, "strategy": {**STRATEGY, "num_token_slices": 3}, "feasible": True}
    assert run(files, "--count", "2", "--granularity", "128", "--json", "-", strategy=entry) == 0
    answer = checked(capsys.readouterr().out)
    assert not any(length % 128 for length in answer["curve"][-1]["token_slices"])


@pytest.mark.parametrize(
    ("strategy", "flags", "message"),
    [
        ({**STRATEGY, "pipeline_parallel_size": 16}, (), "strategy.json: .*32 ranks.*16 devices"),
        ({**STRATEGY, "pipeline_parallel_size": 9, "tensor_parallel_size": 1}, (), "strategy.json: .*layers"),
        ({**STRATEGY, "schedule": "gpip"}, (), "strategy.json: .*gpip"),
        ({**STRATEGY, "pipelines": 2}, (), "strategy.json: .*'pipelines' is not known"),
        (STRATEGY, ("--count", "0"), "--count 0 is not a list"),
        (STRATEGY, ("--count", "two"), "--count two is not a list"),
        (STRATEGY, ("--granularity", "0"), "--granularity 0 is not a whole number from 1"),
    ],
)
def test_errors_of_slices(files, capsys, strategy, flags, message):
    assert run(files, *flags, strategy=strategy) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert len(shown.err.splitlines()) == 1
    assert re.search(message, shown.err), shown.err


def test_flags_of_one_token_slice():
    assert flags_of((2048,)) == "--num-token-slices 1"
    assert flags_of((704, 688, 656)) == "--num-token-slices 3 --token-slices 704,688,656"
