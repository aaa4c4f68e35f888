"""The schema of each kind of file describes the files that are read and written."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from megatron_terapipe.command.main import main
from megatron_terapipe.file_formats.table import FILE_FORMATS
from megatron_terapipe.search.learn.calibration import calibrate
from megatron_terapipe.search.learn.cluster_calibrations import read_calibrations, write_calibrations
from megatron_terapipe.search.machine.cluster_files import is_flat, parse_cluster
from megatron_terapipe.search.price.profile_files import profile_to_json
from tests.architecture.sources import ROOT
from tests.file_formats.forms import validate
from tests.run_report.made_up import iteration, whole_run
from tests.search.op_times.profiles import profile
from tests.search.trials.synthetic import STRATEGIES, measured

CLUSTERS = sorted(path for path in (ROOT / "examples/clusters").iterdir() if path.suffix in (".json", ".yaml"))
MODELS = sorted((ROOT / "examples/models").glob("*.json"))
TRIALS = sorted((ROOT / "tests/search").rglob("published_runs.jsonl"))


@pytest.mark.parametrize("name", FILE_FORMATS)
def test_schemas_are_schemas_and_refuse_what_is_no_object(name: str) -> None:
    assert FILE_FORMATS[name].summary.endswith(".")
    with pytest.raises(ValidationError):
        validate(name, 3)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_clusters(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    name = "flat-cluster" if is_flat(document) else "cluster"
    validate(name, document)
    with pytest.raises(ValidationError):
        validate(name, {**document, "colour": "red"})


def test_a_quantity_has_its_unit_in_the_text_or_in_the_name() -> None:
    for link in ("25 GB/s", {"bandwidth": "200 Gbit/s"}, {"bandwidth_Gbps": 200, "latency_us": 5}):
        document = {"nodes": [{"count": 2, "device": "A100-80GB", "devices": 8, "network": link}]}
        parse_cluster(document, "cluster")
        validate("cluster", document)
    for link in (25, {"bandwidth": 25}, {"bandwidth_Gbps": -1}):
        with pytest.raises(ValidationError):
            validate("cluster", {"nodes": [{"count": 2, "device": "A100-80GB", "devices": 8, "network": link}]})


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_models(path: Path) -> None:
    document = json.loads(path.read_text())
    validate("layers" if "layers" in document else "model", document)


@pytest.mark.parametrize("path", TRIALS, ids=lambda path: path.name)
def test_trials(path: Path) -> None:
    schema = Draft202012Validator(FILE_FORMATS["trial"].json_schema())
    for line in path.read_text().splitlines():
        schema.validate(json.loads(line))


@pytest.mark.parametrize("line", whole_run()[:12] + whole_run()[26:], ids=lambda line: type(line).__name__)
def test_lines_of_metrics(line: Any) -> None:
    validate("metrics", json.loads(json.dumps(line.as_json())))


@pytest.mark.parametrize(
    "wrong",
    [{"event": "tea"}, {**iteration(1).as_json(), "lm_loss": "small"}, {"iteration": 1}],
    ids=["event", "loss", "none"],
)
def test_no_lines_of_metrics(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        validate("metrics", wrong)


def test_a_loss_that_is_no_number_is_null() -> None:
    validate("metrics", json.loads(json.dumps(iteration(1, lm_loss=float("nan")).as_json())))


def test_profiles() -> None:
    validate("profile", json.loads(json.dumps(profile_to_json(profile()))))


def test_calibrations(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    one = calibrate(measured(STRATEGIES[:4], noise=0.05))
    write_calibrations(str(path), [one])
    validate("calibration", json.loads(path.read_text()))
    # Of trials that are met exactly, as a few can be.
    write_calibrations(str(path), [replace(one, memory_sd=0.0)])
    validate("calibration", json.loads(path.read_text()))
    assert read_calibrations(str(path))[0].memory_sd == 0.0


def test_the_command_prints_one_or_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    for words, name in ((["schema", "ledger"], "ledger"), (["search", "schema", "ledger"], "ledger")):
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out) == FILE_FORMATS[name].json_schema()
    assert main(["search", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == FILE_FORMATS["answer"].json_schema()
    assert main(["schema"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(FILE_FORMATS)


def test_the_page_shows_all() -> None:
    page = (ROOT / "docs/reference/files.md").read_text()
    assert sorted(re.findall(r"^```\{json-schema\} (\S+)$", page, re.MULTILINE)) == sorted(FILE_FORMATS)
