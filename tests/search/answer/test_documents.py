"""Documents: what they say, and that the published schema describes them."""

import json
from dataclasses import fields, replace

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from megatron_terapipe.search.__main__ import main
from megatron_terapipe.search.answer.answer import all_notes, document_text, predict_document, rank_document
from megatron_terapipe.search.answer.json_schema import LaunchPart, json_schema
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.price.prediction import RankMemory, TimeBreakdown
from megatron_terapipe.search.price.workload_files import parse_workload
from megatron_terapipe.strategy import Strategy
from tests.search.answer.answers import answer
from tests.search.answer.documents import checked

LAUNCH = LaunchPart(command="deepspeed ...", files=["out/ranking.json"], why_not=None)


def test_the_document_of_a_ranking() -> None:
    document = checked(document_text(rank_document(answer(), LAUNCH)))
    assert (document["schema_version"], document["command"]) == (1, "rank")
    assert document["search"] == {
        "considered": 5000,
        "rejected": {"does not fit <memory>": 3000, "batch": 1000},
        "priced": 1000,
        "simulated": 0,
        "proven": False,
        "could_save": 0.0,
    }
    assert document["notes"] == all_notes(answer())
    assert document["launch"]["files"] == ["out/ranking.json"]
    entries = document["entries"]
    assert [entry["rank"] for entry in entries] == [1, 2, 3]
    first, last = entries[0], entries[-1]
    assert Strategy.from_json(first["strategy"]) == answer().entries[0].strategy
    assert (last["predicted"], last["feasible"], last["reason"]) == (None, False, "[why] <it> falls")
    predicted = first["predicted"]
    assert predicted["iteration_time_s"] == pytest.approx(1.4)
    assert predicted["tokens_per_s"] == pytest.approx(8 * 128 / 1.4)
    assert predicted["tokens_per_s_per_device"] == pytest.approx(8 * 128 / 1.4 / 16)
    assert predicted["tflops_per_device"] == pytest.approx(predicted["mfu"] * 312)
    assert 0 < predicted["mfu_causal"] < predicted["mfu"]
    assert sum(predicted["breakdown"].values()) == pytest.approx(1.4)
    assert predicted["memory_per_rank"][0]["total"] == pytest.approx(8e9)


def test_the_question_in_a_document_can_be_asked_again() -> None:
    shown = answer()
    document = checked(document_text(predict_document(shown)))
    assert parse_workload(document["model"]["settings"], "model").config == shown.workload.config
    again, _ = parse_cluster({"nodes": document["cluster"]["nodes"]}, "cluster")
    assert again.nodes == shown.cluster.nodes
    assert document["cluster"]["devices"] == {"A100-SXM4-80GB": 16}


def test_an_entry_a_line() -> None:
    lines = document_text(rank_document(answer(), LAUNCH)).splitlines()
    assert sum(line.startswith('  {"rank": ') for line in lines) == 3


def test_the_schema_names_every_part_of_a_prediction() -> None:
    properties = json_schema()["$defs"]["Predicted"]["properties"]
    for name, kind, more in (("breakdown", TimeBreakdown, []), ("memory_per_rank", RankMemory, ["total"])):
        described = properties[name].get("items", properties[name])["properties"]
        assert list(described) == [*(each.name for each in fields(kind)), *more]
        assert all(each["description"] for each in described.values())


@pytest.mark.parametrize("fault", [{"schema_version": 2}, {"notes": None}, {"more": 1}, {"command": "slices"}])
def test_the_schema_refuses_other_documents(fault: dict[str, object]) -> None:
    document = checked(document_text(rank_document(answer(), LAUNCH)))
    with pytest.raises(ValidationError):
        Draft202012Validator(json_schema()).validate(document | fault)


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_more_than_the_peak_is_said_to_be_impossible() -> None:
    shown = answer()
    assert not any("peak" in note for note in all_notes(shown))
    first = shown.entries[0]
    assert first.prediction is not None
    impossible = replace(first, prediction=replace(first.prediction, iteration_time_s=1e-9))
    (note,) = (each for each in all_notes(replace(shown, entries=[impossible])) if "peak" in each)
    assert note.startswith("rank 1 would take ") and "no device does more than its peak" in note
