"""The examples of models of one's own: the engine under a launcher, and programs of `pretrain` on other layouts."""

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
from tests import warm
from tests.architecture.sources import ROOT
from tests.distributed import free_port, run_distributed
from tests.end_to_end.launching import read_metrics
from tests.examples.transformers_models import SETTINGS, VOCAB, model_of

EXAMPLES = ROOT / "examples"


def test_it_trains_under_a_launcher(tmp_path: Path) -> None:
    done = warm.run(f"deepspeed --num_accelerators 2 {EXAMPLES}/own_model.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", done.stdout, flags=re.MULTILINE)]
    assert len(losses) == 6
    assert losses[0] > 2.0
    assert losses[-1] < losses[0] / 2


COMMON = "--seq-length 24 --micro-batch-size 2 --global-batch-size 4 --train-iters 4"
# A plain division by the root would make much of the last digits of a gradient that is nearly 0.
COMMON += " --lr 1e-2 --adam-eps 1e-3"
OWN = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --vocab-size 32 --convolution-width 4 --eval-iters 2"
MODELS = ("llama", "gpt2")
TRANSFORMERS = "--mock-data --tokenizer-type NullTokenizer --eval-iters 0"
SLICED = "--pipeline-model-parallel-size 2 --token-slices 9,1,6,8 --pipeline-schedule zero-bubble --save-interval 2"


def run_of(name: str, layout: str) -> tuple[str, str]:
    """Example and words of a run, whose files begin with its layout."""
    model = f"pretrain_own_model.py {OWN}"
    if name != "own":
        model = f"pretrain_huggingface_model.py --hf-model {name} {TRANSFORMERS}"
    example, _, words = model.partition(" ")
    return example, f"{words} {COMMON} --metrics-file {layout}_{name}.jsonl"


def run_programs(runs: list[tuple[str, str]], folder: Path, ports: list[int]) -> list[Any]:
    """Run examples on this rank, one after the other, as `python` does; return their exit codes."""
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    codes = []
    for (example, words), port in zip(runs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        sys.argv = [str(EXAMPLES / example), *words.split()]
        with redirect_stdout(sys.stderr), pytest.raises(SystemExit) as end:
            runpy.run_path(sys.argv[0], run_name="__main__")
        codes.append(end.value.code)
    return codes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of both examples in token slices on two stages, then on one process; one of them resumed there."""
    folder = tmp_path_factory.mktemp("trained")
    for kind in MODELS:
        model_of(kind, **SETTINGS[kind]).save_pretrained(folder / kind)
    sliced, whole = ([run_of(name, layout) for name in ("own", *MODELS)] for layout in ("sliced", "whole"))
    sliced = [(example, f"{words} {SLICED} --save {number}") for number, (example, words) in enumerate(sliced)]
    assert run_distributed(run_programs, 2, sliced, folder, [free_port() for _ in sliced]) == [[0] * 3] * 2
    example, words = run_of("own", "resumed")
    resumed = (example, f"{words} --num-token-slices 2 --zero-stage 0 --load 0 --load-tag global_step2")
    whole.append(resumed)
    assert run_distributed(run_programs, 1, whole, folder, [free_port() for _ in whole]) == [[0] * 4]
    return folder


@pytest.mark.parametrize("name", ["own", *MODELS])
def test_token_slices_on_two_stages_train_as_one_process(name: str, trained: Path) -> None:
    expected, evaluated = read_metrics(trained / f"whole_{name}.jsonl")
    found, evaluated_found = read_metrics(trained / f"sliced_{name}.jsonl")
    if name == "own":
        resumed, evaluated_resumed = read_metrics(trained / "resumed_own.jsonl")
        found, evaluated_found = [*found, *resumed], [*evaluated_found, *evaluated_resumed]
        expected, evaluated = [*expected, *expected[2:]], evaluated * 2
    assert [each["iteration"] for each in found] == [each["iteration"] for each in expected]
    for key in ("lm_loss", "grad_norm"):
        assert [each[key] for each in found] == pytest.approx([each[key] for each in expected], rel=1e-6)
    losses = [each["validation_lm_loss"] for each in evaluated_found]
    assert losses == pytest.approx([each["validation_lm_loss"] for each in evaluated], rel=1e-6)
    assert len(losses) == (2 if name == "own" else 0)


@pytest.mark.parametrize("number", [1, 2], ids=MODELS)
def test_a_model_of_transformers_gets_the_trained_weights(number: int, trained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained / MODELS[number - 1])
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    read_checkpoint(model, trained / f"{number}/global_step4")
    assert [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])] == []
    assert model(torch.arange(12)[None] % VOCAB).logits.isfinite().all()
