"""A converted model has the logits of `transformers` with the same weights, and is unchanged when converted back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.convert import main
from megatron_terapipe.inference import WholeModel
from tests.huggingface.models import GEMMA2, MODELS, logits, save, whole_model

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

TOLERANCE = 1e-4


def convert(command: str, load: Path, output: Path, *more: str) -> None:
    assert main([command, "--load", str(load), "--output", str(output), *more]) == 0


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> ModelConfig:
    return MODELS[request.param]


def test_it_has_the_logits_of_transformers_and_comes_back_bit_for_bit(tmp_path: Path, model: ModelConfig) -> None:
    """But for the rows that pad the vocabulary. It is saved by two tensor-parallel ranks where they can share heads."""
    whole = whole_model(model)
    save(whole, model, tmp_path / "ours", tensor_parallel_size=1 if model.num_key_value_heads % 2 else 2)
    convert("to-huggingface", tmp_path / "ours", tmp_path / "theirs")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    tokens = torch.randint(0, 257, (2, 32), generator=torch.Generator().manual_seed(1))
    expected = logits(whole, tokens)[..., : model.vocab_size]
    assert expected.std() > 0.1
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, expected, rtol=0, atol=TOLERANCE)
    convert("from-huggingface", tmp_path / "theirs", tmp_path / "back")
    convert("to-huggingface", tmp_path / "back", tmp_path / "again")
    directory = tmp_path / "back" / (tmp_path / "back" / "latest").read_text()
    info = CheckpointInfo.read(directory)
    found = WholeModel(ModelConfig(**info.model)).load(directory).state_dict()
    expected = whole.state_dict()
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        rows = model.vocab_size if weight.shape[0] == model.padded_vocab_size() else None
        assert torch.equal(weight[:rows], expected[name][:rows]), name
    described, ours = info.model, CheckpointInfo.read(tmp_path / "ours" / "global_step7").model
    # A sequence may be as long as there are positions.
    assert {name for name in ours if described[name] != ours[name]} <= {"seq_length"}
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "theirs" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_the_first_gpt2_was_published_without_prefix_and_with_masks(tmp_path: Path) -> None:
    model = MODELS["gpt2"]
    whole = whole_model(model)
    save(whole, model, tmp_path / "ours")
    convert("to-huggingface", tmp_path / "ours", tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = safetensors_torch.load_file(path)
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 40, 40), "lm_head.weight": old["wte.weight"].clone()}
    safetensors_torch.save_file(old, path)
    convert("from-huggingface", tmp_path / "theirs", tmp_path / "back")
    found = WholeModel(model).load(tmp_path / "back" / "global_step0").state_dict()
    for name, weight in whole.state_dict().items():
        rows = 257 if weight.shape[0] == 384 else None
        assert torch.equal(found[name][:rows], weight[:rows])


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        (GEMMA2, "sliding_window", 40),
        (replace(GEMMA2, softmax_scale=0.2236068), "query_pre_attn_scalar", 20),
        *(
            (
                replace(MODELS["llama"], rotary_scaling="dynamic", rotary_original_length=16, rotary_percent=percent),
                *("max_position_embeddings", 16),
            )
            for percent in (1.0, 0.5)
        ),
    ],
)
def test_what_transformers_must_have_is_written(tmp_path: Path, model: ModelConfig, key: str, value: int) -> None:
    """A window and a whole divisor of Gemma 2, and with dynamic rotations the positions before scaling."""
    if model.rotary_percent != 1:
        changes = {"normalization": "layernorm", "activation": "gelu-exact", "disable_bias_linear": False}
        model = replace(model, num_key_value_heads=6, parallel_residual=True, **changes)
    whole = whole_model(model)
    save(whole, model, tmp_path / "ours")
    convert("to-huggingface", tmp_path / "ours", tmp_path / "theirs")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert getattr(theirs.config, key) == value
    tokens = torch.randint(0, 257, (2, 32), generator=torch.Generator().manual_seed(1))
    expected = logits(whole, tokens)[..., : model.vocab_size]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_may_be_converted_to_another_type(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = MODELS["llama"]
    whole = whole_model(model)
    save(whole, model, tmp_path / "ours")
    convert("to-huggingface", tmp_path / "ours", tmp_path / "theirs", "--dtype", name)
    tensors = safetensors_torch.load_file(tmp_path / "theirs" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    found = tensors["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(found, whole.state_dict()["layers.3.mlp.down.weight"].to(dtype))
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["dtype"] == str(dtype).split(".")[1]
    convert("from-huggingface", tmp_path / "theirs", tmp_path / "back", "--dtype", "fp32")
    back = WholeModel(model).load(tmp_path / "back" / "global_step0").state_dict()
    assert torch.equal(back["layers.3.mlp.down.weight"], found.float())
