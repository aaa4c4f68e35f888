"""The examples of models of one's own: the engine in a loop, and programs of `pretrain` on other layouts."""

import io
import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.transformers_layers import read_checkpoint
from tests.architecture.sources import ROOT
from tests.distributed import run_distributed
from tests.end_to_end.launching import read_metrics
from tests.examples.transformers_models import SETTINGS, model_of

EXAMPLES = ROOT / "examples"


def run_own_loop() -> str:
    """Run the example of the engine on this rank, and return its output."""
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / "own_model.py"), run_name="__main__")
    return printed.getvalue()


def test_the_engine_trains_in_a_loop_of_ones_own() -> None:
    printed, _ = run_distributed(run_own_loop, 2)
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", printed, flags=re.MULTILINE)]
    assert len(losses) == 6
    assert losses[0] > 2.0
    assert losses[-1] < losses[0] / 2


# A plain division by the root would make much of the last digits of a gradient that is nearly 0.
COMMON = "--seq-length 24 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --adam-eps 1e-3 --train-iters 4"
SIZES = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --vocab-size 32"
OWN = f"pretrain_own_model.py {SIZES} --convolution-width 4 --eval-iters 2 {COMMON}"
TRANSFORMERS = (
    "pretrain_huggingface_model.py --hf-model model --mock-data --tokenizer-type NullTokenizer --eval-iters 0 " + COMMON
)
SLICED = "--pipeline-model-parallel-size 2 --token-slices 9,1,6,8 --pipeline-schedule zero-bubble"


def run_programs(programs: list[str], folder: Path) -> list[Any]:
    """Run examples on this rank, one after the other, as `python` does; return their exit codes."""
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    codes = []
    for program in programs:
        name, *words = program.split()
        sys.argv = [str(EXAMPLES / name), *words]
        with redirect_stdout(sys.stderr), pytest.raises(SystemExit) as end:
            runpy.run_path(sys.argv[0], run_name="__main__")
        codes.append(end.value.code)
    return codes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of both examples on two stages and on one process."""
    folder = tmp_path_factory.mktemp("trained")
    model_of("gpt2", **SETTINGS["gpt2"]).save_pretrained(folder / "model")
    both = {"own": OWN, "transformers": TRANSFORMERS}
    for name, program in both.items():
        sliced = f"{program} {SLICED} --save {name} --metrics-file sliced_{name}.jsonl"
        assert run_distributed(run_programs, 2, [sliced], folder) == [[0], [0]]
    whole = [f"{program} --metrics-file whole_{name}.jsonl" for name, program in both.items()]
    assert run_distributed(run_programs, 1, whole, folder) == [[0, 0]]
    return folder


@pytest.mark.parametrize("name", ["own", "transformers"])
def test_token_slices_on_two_stages_train_as_one_process(name: str, trained: Path) -> None:
    expected, evaluated = read_metrics(trained / f"whole_{name}.jsonl")
    found, evaluated_found = read_metrics(trained / f"sliced_{name}.jsonl")
    assert [each["iteration"] for each in found] == [each["iteration"] for each in expected]
    for key in ("lm_loss", "grad_norm"):
        assert [each[key] for each in found] == pytest.approx([each[key] for each in expected], rel=1e-6)
    losses = [each["validation_lm_loss"] for each in evaluated_found]
    assert losses == pytest.approx([each["validation_lm_loss"] for each in evaluated], rel=1e-6)
    assert len(losses) == (1 if name == "own" else 0)


def test_a_model_of_transformers_gets_the_trained_weights(trained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    read_checkpoint(model, trained / "transformers/global_step4")
    assert [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])] == []
