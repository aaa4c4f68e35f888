"""The schema of each kind of file describes the files that are read and written."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError

from benchmarks.published import RUNS, TRAINERS
from deepspeed_ext.plan.command import main as plan
from deepspeed_ext.plan.command.options import build_parser
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.plan.memory import TokenBytes
from deepspeed_ext.plan.ops import PipelineShape
from megatron_terapipe.command.main import main
from megatron_terapipe.config.parsing import parse_json
from megatron_terapipe.file_formats.table import FILE_FORMATS
from megatron_terapipe.search.learn.calibration import calibrate
from megatron_terapipe.search.learn.cluster_calibrations import read_calibrations, write_calibrations
from megatron_terapipe.search.price.profile import profile_to_json
from megatron_terapipe.strategy import DIMENSIONS, Strategy
from tests.architecture.sources import ROOT
from tests.file_formats.forms import check_reader, validate
from tests.run_report.made_up import iteration, whole_run
from tests.search.learn.synthetic import STRATEGIES, measured
from tests.search.price.profiles import profile

SHAPE = PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2)
ROWS = [[1.0, 2.0], [3.0, 4.0]]
COSTS = {
    "forward": ROWS,
    "backward": ROWS,
    "weight_gradient": ROWS,
    "transfer": {"latency": [0.5], "bandwidth": 8.0, "bytes": [1.0, 2.0]},
    "reductions": [[1.0], [0.5, 0.5]],
}
TOKEN_BYTES = {
    "activation": 64.0,
    "key_value": [8.0, 8.0],
    "key_value_gradient": [16.0, 16.0],
    "logits": 32.0,
    "freed_by_input_gradient": 0.25,
    "logits_limit": 1e6,
    "stage_input": [0.0, 8.0],
    "state": [4.0, 4.0],
}
FULL = Strategy(
    data_parallel_size=2,
    pipeline_parallel_size=2,
    num_token_slices=2,
    token_slices=(5, 3),
    global_batch_size=4,
    stage_partition=(0, 5, 12),
    placement=(0, 1, 2, 3),
)


def cluster_of(link: Any) -> dict[str, Any]:
    """A cluster with a link."""
    return {"nodes": [{"count": 2, "device": "A100-80GB", "devices": 8, "network": link}]}


def sound() -> Iterator[tuple[str, Any]]:
    """Files in use, each with its kind."""
    for path in sorted((ROOT / "examples/clusters").iterdir()):
        if path.suffix in (".json", ".yaml"):
            document = yaml.safe_load(path.read_text())
            yield "cluster", document
    for link in ("25 GB/s", {"bandwidth": "200 Gbit/s"}, {"bandwidth_Gbps": 200, "latency_us": 5}):
        yield "cluster", cluster_of(link)
    for path in sorted((ROOT / "examples/models").glob("*.json")):
        document = json.loads(path.read_text())
        yield "layers" if "layers" in document else "model", document
    yield from (("trial", json.loads(line)) for line in RUNS.read_text().splitlines())
    yield "trainers", yaml.safe_load(TRAINERS.read_text())
    for line in (*whole_run()[:12], *whole_run()[26:], iteration(1, lm_loss=float("nan"))):
        yield "metrics", line.as_json()
    yield "profile", profile_to_json(profile())
    yield "strategy", FULL.to_json()
    epilog = build_parser("terapipe plan").epilog or ""
    yield "token-bytes", json.JSONDecoder().raw_decode(epilog[epilog.index('  {"activation"') :].lstrip())[0]


def test_files_in_use() -> None:
    seen = set()
    for name, document in sound():
        validate(name, document)
        seen.add(name)
    assert seen >= {"cluster", "layers", "model", "trial", "metrics"}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, 3) for name in FILE_FORMATS),
        *(("cluster", cluster_of(link)) for link in (25, {"bandwidth": 25}, {"bandwidth_Gbps": -1})),
        ("cluster", {**cluster_of("25 GB/s"), "colour": "red"}),
        ("metrics", {"event": "tea"}),
        ("metrics", {**iteration(1).as_json(), "lm_loss": "small"}),
        ("metrics", {"iteration": 1}),
    ],
)
def test_no_such_file(name: str, wrong: Any) -> None:
    with pytest.raises(ValidationError):
        validate(name, wrong)


def partition(text: str, path: Path = Path("stages.json")) -> StagePartition:
    """Read a stage partition from a file in the working directory."""
    path.write_text(text)
    return StagePartition.parse(str(path))


LENGTHS = ("for 2 stages", "entries for")
READERS: list[tuple[str, Any, Callable[[str], object], tuple[str, ...]]] = [
    # Kind, a file with all keys, its reader, and parts of messages about relations, which a schema cannot express.
    ("costs", COSTS, lambda text: OpCosts.from_json(text, SHAPE), LENGTHS),
    ("costs", COSTS | {"transfer": 0.1}, lambda text: OpCosts.from_json(text, SHAPE), LENGTHS),
    ("token-bytes", TOKEN_BYTES, lambda text: TokenBytes.from_json(text, SHAPE), LENGTHS),
    ("partition", [0, 5, 12], partition, ("-1 does not", "does not rise", "neither")),
    *(
        (
            "strategy",
            strategy.to_json(),
            lambda text: Strategy.from_json(parse_json(text, "it")),
            ("is not a multiple of", "contradicts token_slices", "do not go together"),
        )
        for strategy in (Strategy(), FULL)
    ),
]


@pytest.mark.parametrize(("name", "document", "read", "relations"), READERS, ids=[row[0] for row in READERS])
def test_readers_and_schemas_agree(
    name: str,
    document: Any,
    read: Callable[[str], object],
    relations: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    check_reader(name, document, read, relations=relations)


def test_all_keys_are_described() -> None:
    assert TOKEN_BYTES.keys() == TokenBytes.__dataclass_fields__.keys()
    schema = FILE_FORMATS["strategy"].json_schema()
    assert [*schema["properties"]] == [each.name for each in DIMENSIONS]
    assert all(each["description"].endswith(".") for each in schema["properties"].values())
    # Strategies in answers are the same, and whole, without the sizes that most have not.
    in_answers = FILE_FORMATS["answer"].json_schema()["$defs"]["Entry"]["properties"]["strategy"]
    whole = [each.name for each in DIMENSIONS if not each.optional]
    assert in_answers["properties"] == schema["properties"] and in_answers["required"] == whole
    assert [each.name for each in DIMENSIONS if each.optional] == ["expert_parallel_size", "zero_shard_size"]


def test_calibrations(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    one = calibrate(measured(STRATEGIES[:4], noise=0.05))
    for each in (one, replace(one, memory_sd=0.0)):  # As of a few trials that are met exactly.
        write_calibrations(str(path), [each])
        validate("calibration", path.read_text())
    assert read_calibrations(str(path))[0].memory_sd == 0.0


PIPELINE = ["--stages", "2", "--micro-batches", "2", "--token-slices", "2"]


def test_answers_of_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("costs.json").write_text(json.dumps(COSTS))
    Path("order.txt").write_text("0B0.0, 0F0.0\n1F0.0, 1B0.0\n")
    of_tokens = {"activation": 64, "key_value": 8, "key_value_gradient": 16, "stage_input": 8, "state": 4}
    Path("token_bytes.json").write_text(json.dumps(of_tokens))
    offload = ["--seq-length", "512", "--token-bytes", "token_bytes.json", "--offload", "--host-bandwidth", "4096"]
    solved = ["--attention-share", "0.5", "--head-share", "0.1", "--solve-slices", "--solve-stages", "--effort", "0.1"]
    costs = ["--costs", "costs.json"]
    for number, (code, words, keys) in enumerate(
        (
            (0, ["--schedule", "1f1b", *PIPELINE], {"critical_path"}),
            (0, ["--schedule", "zero-bubble", *PIPELINE, *costs], {"transfers", "reductions", "duration"}),
            (0, ["--schedule", "interleaved", *PIPELINE, "--model-chunks", "2"], {"placement"}),
            (0, ["--schedule", "breadth-first", *PIPELINE, *offload], {"host_copies", "memory_bytes"}),
            (0, ["--schedule", "1f1b", *PIPELINE, *solved], {"stage_partition"}),
            (0, ["--timeline", "answer1.json"], {"eta", "costs"}),
            (1, ["--schedule", "order.txt"], {"reason"}),
        )
    ):
        answer = Path(f"answer{number}.json")
        assert plan([*words, "--json", str(answer)]) == code
        validate("plan", answer.read_text())
        assert keys <= json.loads(answer.read_text()).keys()


def test_the_command_prints_one_or_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "run"]) == 0
    assert json.loads(capsys.readouterr().out) == FILE_FORMATS["run"].json_schema()
    assert main(["schema"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(FILE_FORMATS)


def test_the_page_shows_all() -> None:
    page = (ROOT / "docs/reference/files.md").read_text()
    assert sorted(re.findall(r"^```\{json-schema\} (\S+)$", page, re.MULTILINE)) == sorted(FILE_FORMATS)
