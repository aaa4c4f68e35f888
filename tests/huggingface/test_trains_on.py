"""An imported model is trained on from where it was, on any layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_terapipe.convert import main
from megatron_terapipe.errors import CheckpointError
from tests.checkpoint.runs import BEFORE, ROWS, SEQ, VOCAB, Task, Way, batches, perform
from tests.distributed import run_distributed
from tests.huggingface.folder_runs import resume, run_of
from tests.huggingface.models import MODELS, save, whole_model

transformers = pytest.importorskip("transformers")
from tests.huggingface.tiny import tiny_model  # noqa: E402

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --finetune"
LLAMA = (
    f"{SHAPE} --use-rotary-position-embeddings --normalization RMSNorm --swiglu --disable-bias-linear"
    " --ffn-hidden-size 48 --untie-embeddings-and-output-weights --norm-epsilon 1e-6"
)
WAYS = {
    "gpt2": Way("gpt2", 2, f"{SHAPE} --num-key-value-heads 4 --pipeline-model-parallel-size 2 --num-token-slices 3"),
    "llama": Way("llama", 2, f"{LLAMA} --tensor-model-parallel-size 2 --num-token-slices 2"),
}


def _theirs(family: str) -> Any:
    torch.manual_seed(0)
    if family == "gpt2":
        shape = {"n_positions": SEQ, "n_embd": 32, "n_layer": 2, "n_head": 4}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, initializer_range=0.2, **shape))
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQ,
            initializer_range=0.2,
        )
    )


@pytest.mark.parametrize("family", WAYS)
def test_the_first_loss_is_theirs(tmp_path: Path, family: str) -> None:
    theirs = _theirs(family).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    assert main(["from-huggingface", "--load", str(tmp_path / "theirs"), "--output", str(tmp_path / "ours")]) == 0
    outcomes = run_distributed(perform, 2, [Task(WAYS[family], tmp_path / "ours", None)])
    rows = batches(BEFORE, 0, 1)
    tokens, labels = (torch.cat([getattr(each, name) for each in rows]) for name in ("tokens", "labels"))
    assert tokens.shape == (ROWS, SEQ)
    with torch.no_grad():
        logits = theirs(tokens).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    for (outcome,) in outcomes:
        assert outcome.losses[0] == pytest.approx(expected.item(), rel=1e-6)
        assert outcome.losses[-1] < outcome.losses[0]


def test_the_same_command_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "theirs")
    outcomes = run_distributed(resume, 2, tmp_path / "theirs", tmp_path / "ours")
    for outcome in outcomes:
        assert (outcome.start, outcome.family) == (1, "qwen3")
        assert outcome.loss_again == outcome.loss
    assert main(["to-huggingface", "--load", str(tmp_path / "ours"), "--output", str(tmp_path / "back")]) == 0
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").model_type == "qwen3"


def test_a_folder_of_another_model_than_what_was_saved_is_named(tmp_path: Path) -> None:
    for name in ("qwen3", "llama"):
        tiny_model(name).save_pretrained(tmp_path / name)
    save(whole_model(MODELS["llama"]), MODELS["llama"], tmp_path / "ours")
    with pytest.raises(CheckpointError, match="the checkpoint has --hidden-size 48, this run 32: set --hidden-size 48"):
        run_of(tmp_path / "llama", f"--save {tmp_path / 'ours'} --no-load-optim")


def test_flags_that_contradict_a_folder_are_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="the checkpoint has --ffn-hidden-size 48, this run 56: set --ffn-hidden"):
        run_of(tmp_path, "--ffn-hidden-size 56")
    assert run_of(tmp_path, "--make-vocab-size-divisible-by 8 --hidden-dropout 0.1").checkpoint is not None


def test_a_damaged_folder_is_named_before_anything_starts(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    path = next(tmp_path.glob("model-00002-of-*.safetensors"))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be read"):
        run_of(tmp_path, "")
