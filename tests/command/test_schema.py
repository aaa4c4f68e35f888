"""The JSON Schemas that `terapipe schema` prints, held against files in use and against readers."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from benchmarks.published import RUNS, TRAINERS
from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.command.main import main
from megatron_terapipe.command.schema import FILE_FORMATS
from megatron_terapipe.config.parsing import parse_json
from megatron_terapipe.search.price.profile import profile_to_json
from megatron_terapipe.strategy import DIMENSIONS, Strategy
from tests.architecture.sources import ROOT
from tests.search.price.profiles import profile

FULL = Strategy(
    data_parallel_size=2,
    pipeline_parallel_size=2,
    num_token_slices=2,
    token_slices=(5, 3),
    global_batch_size=4,
    stage_partition=(0, 5, 12),
    placement=(0, 1, 2, 3),
)
OTHERS: tuple[Any, ...] = (None, True, "x", -1, 7, 0.5, [], ["x"], {})
"""Values that replace each value of a file in turn."""


def schema_of(name: str) -> Draft202012Validator:
    schema = FILE_FORMATS[name].json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def cluster_of(link: Any) -> dict[str, Any]:
    return {"nodes": [{"count": 2, "device": "A100-80GB", "devices": 8, "network": link}]}


def files_in_use() -> Iterator[tuple[str, Any]]:
    for path in sorted((ROOT / "examples/clusters").iterdir()):
        if path.suffix in (".json", ".yaml"):
            yield "cluster", yaml.safe_load(path.read_text())
    for link in ("25 GB/s", {"bandwidth": "200 Gbit/s"}, {"bandwidth_Gbps": 200, "latency_us": 5}):
        yield "cluster", cluster_of(link)
    for path in sorted((ROOT / "examples/models").glob("*.json")):
        document = json.loads(path.read_text())
        yield "layers" if "layers" in document else "model", document
    yield from (("trial", json.loads(line)) for line in RUNS.read_text().splitlines())
    yield "trainers", yaml.safe_load(TRAINERS.read_text())
    yield "profile", profile_to_json(profile())
    yield "strategy", FULL.to_json()


def test_files_in_use() -> None:
    seen = set()
    for name, document in files_in_use():
        schema_of(name).validate(json.loads(json.dumps(document)))
        seen.add(name)
    assert seen == set(FILE_FORMATS)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, 3) for name in FILE_FORMATS),
        *(("cluster", cluster_of(link)) for link in (25, {"bandwidth": 25}, {"bandwidth_Gbps": -1})),
        ("cluster", {**cluster_of("25 GB/s"), "colour": "red"}),
    ],
)
def test_refused_files(name: str, wrong: Any) -> None:
    assert not schema_of(name).is_valid(wrong)


def others_of(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Documents with a key less, an unknown key, or another value."""
    yield {**document, "colour": "red"}
    for name in document:
        yield {key: value for key, value in document.items() if key != name}
        for value in OTHERS:
            yield deepcopy(document) | {name: value}


@pytest.mark.parametrize("strategy", [Strategy(), FULL])
def test_the_reader_of_strategies_agrees_with_their_schema(strategy: Strategy) -> None:
    relations, taken = ("is not a multiple of", "contradicts token_slices", "do not go together"), 0
    schema = schema_of("strategy")
    for other in others_of(strategy.to_json()):
        try:
            Strategy.from_json(parse_json(json.dumps(other), "it"))
        except UserError as error:
            # A schema cannot express relations of values.
            assert any(part in str(error) for part in relations) or not schema.is_valid(other), other
        else:
            taken += 1
            assert schema.is_valid(other), other
    assert taken


def test_all_keys_of_a_strategy_are_described() -> None:
    properties = FILE_FORMATS["strategy"].json_schema()["properties"]
    assert [*properties] == [each.name for each in DIMENSIONS]
    assert all(each["description"].endswith(".") for each in properties.values())


def test_the_command_prints_one_or_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "trial"]) == 0
    assert json.loads(capsys.readouterr().out) == FILE_FORMATS["trial"].json_schema()
    assert main(["schema"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(FILE_FORMATS)


def test_the_page_shows_all() -> None:
    page = (ROOT / "docs/reference/files.md").read_text()
    assert sorted(re.findall(r"^```\{json-schema\} (\S+)$", page, re.MULTILINE)) == sorted(FILE_FORMATS)
