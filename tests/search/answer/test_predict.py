"""`predict` prices what it is given, keeps what cannot run, and names the line that is no strategy."""

import json
from pathlib import Path

import pytest

from megatron_terapipe.search.__main__ import main
from tests.search.answer.documents import read

MODEL = {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 256, "vocab_size": 1024}
CLUSTER = {"nodes": [{"count": 2, "device": "A100-SXM4-40GB", "devices": 2}]}
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


def predict(tmp_path: Path, text: str, *flags: str) -> int:
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    (tmp_path / "s.jsonl").write_text(text)
    names = [str(tmp_path / name) for name in ("model.json", "cluster.json")]
    return main(["predict", *names, "--strategies", str(tmp_path / "s.jsonl"), *flags])


def test_all_are_there_in_the_order_of_the_file(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    text = "\n\n".join(map(json.dumps, LINES)) + "\n"
    assert predict(tmp_path, text, "--json", str(out)) == 0
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


def test_a_batch_for_those_that_say_none(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert predict(tmp_path, '{"data_parallel_size": 4}', "--json", str(out), "--global-batch-size", "16") == 0
    assert read(out)["entries"][0]["strategy"]["global_batch_size"] == 16


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
def test_a_line_that_is_no_strategy(tmp_path: Path, text: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict(tmp_path, text) == 2
    message = capsys.readouterr().err
    assert error in message and message.count("\n") == 1


def test_what_rank_writes_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`strategy.json` and `ranking.json` are one document over many lines."""
    out = tmp_path / "out.json"
    for document, number in (
        (LINES[0], 1),
        ([{"strategy": LINES[0], "rank": 1}, LINES[2]], 2),
        ({"entries": [{"strategy": LINES[0]}]}, 1),
    ):
        assert predict(tmp_path, json.dumps(document, indent=1), "--json", str(out)) == 0
        assert len(read(out)["entries"]) == number
    assert predict(tmp_path, json.dumps([LINES[0], {"dp": 2}], indent=1)) == 2
    assert "s.jsonl entry 2: strategy: field 'dp' is not known" in capsys.readouterr().err
    assert predict(tmp_path, "[\n]") == 2
    assert "holds no strategy" in capsys.readouterr().err
