"""A dimension is declared once: a patch of three files adds one, and everything that lists dimensions has it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

PATCH = {
    # The field of the strategy: flags, JSON, tables, comparisons, ties, layouts and world size follow.
    "megatron_terapipe/strategy.py": (
        "    placement: tuple[int, ...] | None = dimension(",
        '''    expert_tensor_parallel_size: int = dimension(
        1,
        trained=(1,),
        priced=(1,),
        tried=(1,),
        ranks=True,
        flag_help=(13, "ranks that share each expert"),
        label=(14, "expert-tensor size"),
        column=(13, "etp"),
        usual="1",
        phrase=(11, "etp {}"),
        tie=15,
    )
    """Ranks that share each expert."""

    placement: tuple[int, ...] | None = dimension(''',
    ),
    # The field of the configuration that it sets: the trainer's flag, its help and its check follow.
    "megatron_terapipe/config/parallel.py": (
        "    no_overlap_grad_reduce: bool",
        '''    expert_tensor_parallel_size: Literal[1] = 1
    """Ranks that share each expert."""

    no_overlap_grad_reduce: bool''',
    ),
    # The flag is no longer refused.
    "megatron_terapipe/arguments/foreign_flags.toml": (
        'one = "expert-tensor-parallel-size"\n',
        "",
    ),
}
"""By file, a text and its replacement. CONTRIBUTING.md names the same three files."""

MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 257}
CLUSTER = {"nodes": [{"device": "A100-SXM4-40GB", "devices": 2}]}
FEW = "--num-token-slices 1 --num-model-chunks 1 --recompute none --schedule 1f1b --effort 0.02 --top 2".split()

SCRIPT = """
import contextlib, io, json, sys
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.__main__ import main
from megatron_terapipe.search.answer.screen import COLUMNS

rank, trainer = json.loads(sys.argv[1]), json.loads(sys.argv[2])
answers = {}

def run(name, words):
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(words)
    answers[name] = code, out.getvalue(), error.getvalue()

run("ranked", [*rank, "--expert-tensor-parallel-size", "1", "--output", "out", "--explain"])
run("refused", [*rank, "--expert-tensor-parallel-size", "2"])
with open("two.jsonl", "w") as file:
    file.write(json.dumps({"expert_tensor_parallel_size": 2}))
run("predicted", ["predict", *rank[1:3], "--strategies", "two.jsonl", "--global-batch-size", "2", "--json", "-"])
answers["columns"] = [name for _, name in COLUMNS]
answers["trained"] = parse_arguments([*trainer, "--strategy", "out/strategy.json"]).parallel.expert_tensor_parallel_size
for name, words in (("strategy", ["--strategy", "two.jsonl"]), ("flag", ["--expert-tensor-parallel-size", "2"])):
    try:
        parse_arguments([*trainer, *words])
    except ConfigError as error:
        answers[name] = str(error)
print(json.dumps(answers))
"""


def _not_needed(folder: str, names: list[str]) -> set[str]:
    """Folders of the package that neither a search nor the flags of the trainer import."""
    unused = {"training", "model", "data", "huggingface"}
    return unused & set(names) if Path(folder) == REPOSITORY / "megatron_terapipe" else set()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Answers of the patched package."""
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(REPOSITORY / "megatron_terapipe", folder / "megatron_terapipe", ignore=_not_needed)
    for path, (old, new) in PATCH.items():
        text = (folder / path).read_text()
        assert text.count(old) == 1, f"{path} has no single {old!r}: fix the patch and the documents"
        (folder / path).write_text(text.replace(old, new))
    for name, document in (("model.json", MODEL), ("cluster.json", CLUSTER)):
        (folder / name).write_text(json.dumps(document))
    rank = ["rank", "model.json", "cluster.json", "--global-batch-size", "2", "--no-progress", *FEW]
    trainer = [f"--{name.replace('_', '-')}={value}" for name, value in MODEL.items()]
    trainer += "--mock-data --train-iters 1 --lr 1 --micro-batch-size 1".split()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(rank), json.dumps(trainer)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, object] = json.loads(done.stdout)
    return answers | {"strategy.json": json.loads((folder / "out" / "strategy.json").read_text())}


def test_three_files_at_most() -> None:
    assert len(PATCH) <= 3
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    assert all(f"`{path}`" in text for path in PATCH)


def test_search_prices_the_new_dimension(answers: dict[str, object]) -> None:
    code, table, _ = answers["ranked"]
    assert code == 0 and "to run the winner" in table
    assert "etp" in answers["columns"]
    assert answers["strategy.json"]["expert_tensor_parallel_size"] == 1
    assert list(answers["strategy.json"])[-2:] == ["expert_tensor_parallel_size", "placement"]


def test_the_launched_trainer_reads_it(answers: dict[str, object]) -> None:
    assert answers["trained"] == 1


def test_values_that_are_not_allowed_are_refused(answers: dict[str, object]) -> None:
    code, _, error = answers["refused"]
    assert code == 2
    assert error == "error: --expert-tensor-parallel-size 2 is not 1, the only value that can be priced: write it\n"
    code, answer, _ = answers["predicted"]
    (entry,) = json.loads(answer)["entries"]
    assert code == 0 and not entry["feasible"]
    assert entry["reason"] == "expert_tensor_parallel_size 2 is not one of 1"
    assert answers["strategy"] == "strategy: expert_tensor_parallel_size 2 cannot be trained yet: use 1"
    assert answers["flag"].startswith("--expert-tensor-parallel-size")
