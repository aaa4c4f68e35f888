"""What cannot be converted is said in one line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.convert import main
from tests.huggingface.models import MODELS, save, whole_model

safetensors_torch = pytest.importorskip("safetensors.torch")

GPT2, LLAMA = MODELS["gpt2"], MODELS["llama"]


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A small GPT-2 in their files."""
    save(whole_model(GPT2), GPT2, tmp_path / "ours")
    main(["to-huggingface", "--load", str(tmp_path / "ours"), "--output", str(tmp_path / "theirs")])
    return tmp_path / "theirs"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (replace(GPT2, position_embedding_type="none"), "--position-embedding-type none, and Hugging Face's gpt2"),
        (
            replace(GPT2, normalization="rmsnorm"),
            "--normalization rmsnorm, and Hugging Face's gpt2 --normalization lay",
        ),
        (replace(GPT2, kv_channels=16), "--kv-channels 16, and Hugging Face's gpt2 --kv-channels 8"),
        (
            replace(GPT2, num_key_value_heads=2),
            "--num-key-value-heads 2, and Hugging Face's gpt2 --num-key-value-heads",
        ),
        (replace(GPT2, layernorm_epsilon=1e-6, kv_channels=16), "--kv-channels 16, and Hugging Face's gpt2 --kv-chan"),
        (replace(LLAMA, qk_norm="head", parallel_residual=True), "--parallel-residual, and Hugging Face's qwen3 no --"),
        (replace(LLAMA, rotary_interleaved=True), "--rotary-interleaved, and Hugging Face's llama no --rotary-inter"),
        (
            replace(
                LLAMA,
                heterogeneous_layers_config_path=json.dumps(
                    {"block_configs": [{}, {"mlp": {"ffn_hidden_size": 64}}, {}]}
                ),
            ),
            "layers of several shapes, and Hugging Face's llama no layers of several shapes",
        ),
    ],
)
def test_what_they_cannot_express_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: ModelConfig, said: str
) -> None:
    save(whole_model(model), model, tmp_path / "ours")
    line = refusal(capsys, "to-huggingface", "--load", tmp_path / "ours", "--output", tmp_path / "theirs")
    assert said in line
    assert line.endswith("so keep it in ours\n")
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            {"model_type": "bert"},
            "config.json is a model of type bert, which cannot be trained here: give one of gpt2, llama",
        ),
        ({"activation_function": "tanh"}, 'sets activation_function to "tanh", and our models have "gelu_new" or "gel'),
        ({"scale_attn_by_inverse_layer_idx": True}, "sets scale_attn_by_inverse_layer_idx to true"),
        ({"n_layer": 4}, "has no tensor transformer.h.3.attn.c_attn.bias, which its config.json asks for"),
        ({"n_layer": 2}, "has a tensor transformer.h.2.attn.c_attn.bias, for which a gpt2 of its config.json has no"),
        (
            {"n_embd": 96},
            "has transformer.wte.weight (257, 48), which is not the (257, 96) that its config.json describes",
        ),
        ({"n_positions": 41}, "has transformer.wpe.weight (40, 48), which is not the (41, 48) that its config.json"),
        ({"n_head": 7}, "--hidden-size 48 is not a multiple of --num-attention-heads 7"),
        ({"tie_word_embeddings": False}, "has no tensor lm_head.weight, which its config.json asks for"),
    ],
)
def test_what_we_cannot_express_is_named(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: dict[str, Any], said: str
) -> None:
    path = theirs / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    assert said in refusal(capsys, "from-huggingface", "--load", theirs, "--output", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "leaves out low_freq_factor, which must be a number",
        ),
        ({"rope_scaling": {"type": "stretched", "factor": 2.0}}, "the rotations of positions as stretched, and our"),
        ({"hidden_act": "quick_gelu"}, 'sets hidden_act to "quick_gelu", and our models have "silu" or "swish"'),
        (
            {"attention_bias": True},
            "has no tensor model.layers.0.self_attn.k_proj.bias, which its config.json asks for",
        ),
        ({"num_key_value_heads": 3}, "has model.layers.0.self_attn.k_proj.weight (16, 48), which is not the (24, 48)"),
        ({"intermediate_size": 96}, "has model.layers.0.mlp.gate_proj.weight (80, 48), which is not the (96, 48)"),
        ({"quantization_config": {"bits": 4}}, 'sets quantization_config to {"bits": 4}, and our models have null'),
    ],
)
def test_a_llama_that_is_not_ours_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: dict[str, Any], said: str
) -> None:
    save(whole_model(LLAMA), LLAMA, tmp_path / "ours")
    main(["to-huggingface", "--load", str(tmp_path / "ours"), "--output", str(tmp_path / "theirs")])
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    assert said in refusal(capsys, "from-huggingface", "--load", tmp_path / "theirs", "--output", tmp_path / "back")


def test_a_family_that_is_not_known_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(whole_model(LLAMA), LLAMA, tmp_path / "ours")
    words = ("to-huggingface", "--load", tmp_path / "ours", "--output", tmp_path / "theirs", "--family", "lama")
    assert refusal(capsys, *words).startswith("error: --family lama is not known: choose gpt2, llama, ")


def _no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def _broken_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def _no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def _cut_short(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _scribbled(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"these were never tensors\n" * 9)


def _index_of_nothing(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))


def _index_without_map(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_no_config, "config.json cannot be read (No such file or directory)"),
        (_broken_config, "config.json is not JSON"),
        (_no_weights, "holds neither model.safetensors nor model.safetensors.index.json"),
        (_cut_short, "model.safetensors cannot be read"),
        (_scribbled, "model.safetensors cannot be read"),
        (_index_of_nothing, "gone.safetensors cannot be read"),
        (_index_without_map, "model.safetensors.index.json cannot be read"),
    ],
)
def test_damaged_files_are_named(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], said: str
) -> None:
    damage(theirs)
    assert said in refusal(capsys, "from-huggingface", "--load", theirs, "--output", tmp_path / "back")


def test_an_output_that_holds_something_is_refused(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("from-huggingface", "to-huggingface"):
        line = refusal(capsys, command, "--load", theirs, "--output", theirs)
        assert line == f"error: --output {theirs} is not an empty directory: name another\n"


def test_nothing_to_load_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "to-huggingface", "--load", tmp_path, "--output", tmp_path / "theirs")
    assert line == f"error: --load {tmp_path} holds no checkpoint: give a directory that a run saved to\n"


def test_a_checkpoint_that_lacks_a_layer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save(whole_model(GPT2), GPT2, tmp_path)
    (directory / "layer_03-model_00-model_states.pt").unlink()
    line = refusal(capsys, "to-huggingface", "--load", tmp_path, "--output", tmp_path / "theirs")
    assert "lacks layer_03-model_00-model_states.pt" in line


def test_a_layer_of_another_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save(whole_model(GPT2), GPT2, tmp_path)
    torch.save({"weight": torch.zeros(3)}, directory / "layer_03-model_00-model_states.pt")
    line = refusal(capsys, "to-huggingface", "--load", tmp_path, "--output", tmp_path / "theirs")
    assert "cannot load layer 3" in line
    assert not (tmp_path / "theirs").exists()
