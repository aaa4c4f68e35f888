"""Models of transformers, of every family, here and back, and ours there and back: logits, and tensors bit for bit."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from megatron_terapipe.checkpoint.conversion import check_class, check_export, export_checkpoint, import_model
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import prediction_layers
from megatron_terapipe.convert import main
from megatron_terapipe.errors import CheckpointError, ConfigError
from megatron_terapipe.huggingface.families.family import Family
from megatron_terapipe.huggingface.families.registry import FAMILIES, read_model
from megatron_terapipe.huggingface.families.settings import SettingsFile
from megatron_terapipe.huggingface.folder_weights import dequantized, meta_layer, rules_of
from megatron_terapipe.huggingface.weight_rules import split_layer
from megatron_terapipe.inference import WholeModel
from megatron_terapipe.model.gpt import further_words, layers_with_weights
from tests.huggingface.models import COMMON, GEMMA2, MODELS, logits, save, whole_model

transformers = pytest.importorskip("transformers")
MtpModel = pytest.importorskip("transformers.modeling_layers").MtpModel
safetensors_torch = pytest.importorskip("safetensors.torch")
load_file, save_file = safetensors_torch.load_file, safetensors_torch.save_file
from tests.huggingface.tiny import TINY, VOCAB, tiny_config, tiny_model  # noqa: E402

TOLERANCE = 1e-4


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 32), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", TINY)
def test_there_and_back(tmp_path: Path, tokens: torch.Tensor, name: str) -> None:
    theirs = tiny_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    directory, _ = import_model(tmp_path / "theirs", tmp_path / "ours")
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(_logits(directory, tokens), expected, rtol=0, atol=TOLERANCE)
    export_checkpoint(directory, tmp_path / "back")
    _check_tensors(tmp_path / "theirs", tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32, attn_implementation="eager"
    )
    assert back.config.model_type == TINY[name][0]
    with torch.no_grad():
        assert torch.equal(back(tokens).logits, expected)


@pytest.mark.parametrize(
    ("name", "begin", "settings"),
    [
        ("deepseek_v3", "model.layers.3.", {}),
        ("glm4_moe", "model.layers.3.", {}),
        ("qwen3_next-experts", "mtp.", {"layer_types": ["linear_attention"] * 2 + ["full_attention"]}),
    ],
)
def test_a_layer_that_predicts_a_further_token_is_read_where_asked_for(
    tmp_path: Path, tokens: torch.Tensor, name: str, begin: str, settings: dict[str, Any]
) -> None:
    tiny_model(name, **settings).save_pretrained(tmp_path / "theirs")
    family, model = read_model(tmp_path / "theirs", "--load")
    model = replace(model, mtp_num_layers=1)
    (index,) = prediction_layers(model.num_layers, 1)
    layer = whole_model(model).layers[str(index)]
    further = split_layer(rules_of(model, family, index), layer.state_dict())
    path = tmp_path / "theirs" / "model.safetensors"
    usual = load_file(path)
    if begin != "mtp.":
        copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        further |= {f"{begin}{each}.weight": usual[f"{theirs}.weight"].clone() for each, theirs in copies.items()}
    assert all(each.startswith(begin) for each in further)
    save_file(usual | {each: tensor.contiguous() for each, tensor in further.items()}, path, {"format": "pt"})

    main = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs", dtype=torch.float32, attn_implementation="eager"
    )
    # Its pattern has the number of the published model's layer.
    main._keys_to_ignore_on_load_unexpected, main.config.num_mtp_layers = [f"^{re.escape(begin)}"], 1
    main.config.mtp_layer_types = ["full_attention"]
    theirs = MtpModel.from_pretrained(main).eval()
    directory, remarks = import_model(tmp_path / "theirs", tmp_path / "ours", mtp_num_layers=1)
    assert not remarks
    ours, state = WholeModel(model).load(directory), SequenceState(TokenSlices((31,)))
    with torch.no_grad():
        hidden, read, after = main.model(tokens).last_hidden_state[:, :-1], tokens[:, :-1], tokens[:, 1:]
        positions = torch.arange(1, 32).expand(2, -1)
        expected = theirs.shared_head(theirs.forward_layer(0, hidden, positions, None, input_ids=after))
        known = further_words(ours.layers["0"], ours.output(read, state), torch.stack((after, after), -1))
        found = ours.layers[str(index)](known, state.past(index, 0)).logits[-1].compute()[..., :VOCAB]
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)

    export_checkpoint(directory, tmp_path / "back")
    _check_tensors(tmp_path / "theirs", tmp_path / "back")
    directory, (remark,) = import_model(tmp_path / "theirs", tmp_path / "without")
    assert f"has 1 layer that predict further tokens ({begin}*)" in remark
    export_checkpoint(directory, tmp_path / "plain")
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == usual.keys()
    with pytest.raises(CheckpointError, match=r"^--mtp-num-layers 1 reads .*does not have: give the number"):
        import_model(tmp_path / "plain", tmp_path / "again", mtp_num_layers=1)


_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 2.0, 5.0, 9.0]}
_LINEAR, _DYNAMIC = ({"rope_type": name, "factor": 2.0} for name in ("linear", "dynamic"))
_OUTSIDE = {"rope_parameters": None, "rope_theta": 100.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(
            ("llama", _OUTSIDE | {"rope_scaling": scaling})
            for scaling in (
                *(_YARN, _LLAMA3, _LONGROPE, _LINEAR, _DYNAMIC),
                {**_YARN, "original_max_position_embeddings": 32},
                {"rope_type": "yarn", "factor": None},
            )
        ),
        ("gpt_neox", _OUTSIDE | {"rope_scaling": _YARN, "rotary_pct": 0.5, "rotary_emb_base": 100}),
        ("gemma3", {"rope_scaling": _YARN, "original_max_position_embeddings": 16}),
        ("gpt2", {"n_embd": 24, "hidden_size": 32, "n_layer": None, "num_hidden_layers": 3}),
        ("gpt2", {"n_head": None, "num_attention_heads": 4, "n_positions": 1, "max_position_embeddings": 64}),
        ("gpt_bigcode", {"n_layer": 1, "num_hidden_layers": 3}),
        ("falcon-7b", {"hidden_size": 48, "n_embed": 32}),
        ("granite", {"embedding_multiplier": 3, "residual_multiplier": 1, "logits_scaling": 2}),
    ],
)
def test_keys_have_the_meaning_that_transformers_gives_them(
    tmp_path: Path, tokens: torch.Tensor, name: str, settings: dict[str, Any]
) -> None:
    theirs = tmp_path / "theirs"
    tiny_model(name).save_pretrained(theirs)
    config = json.loads((theirs / "config.json").read_text()) | settings
    (theirs / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    directory, _ = import_model(theirs, tmp_path / "ours")
    export_checkpoint(directory, tmp_path / "back")
    found = _logits(directory, tokens)
    for folder in (theirs, tmp_path / "back"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            torch.testing.assert_close(found, model(tokens).logits, rtol=0, atol=TOLERANCE)


def _logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    whole = WholeModel(ModelConfig(**CheckpointInfo.read(directory).model)).load(directory).eval()
    return logits(whole, tokens)[..., :VOCAB]


def _check_tensors(first: Path, second: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        rows = _unread_rows(name)
        assert torch.equal(tensor[rows:], after[name][rows:]), name


def _unread_rows(name: str) -> int:
    """OPT has two positions that no token is at."""
    return 2 if name == "model.decoder.embed_positions.weight" else 0


def test_a_model_may_be_written_as_another_family_that_has_it(tmp_path: Path, tokens: torch.Tensor) -> None:
    theirs: Any = tiny_model("llama")
    theirs.save_pretrained(tmp_path / "theirs")
    directory, _ = import_model(tmp_path / "theirs", tmp_path / "ours")
    export_checkpoint(directory, tmp_path / "back", family="mistral")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert back.config.model_type == "mistral"
    with torch.no_grad():
        torch.testing.assert_close(back(tokens).logits, theirs(tokens).logits, rtol=0, atol=TOLERANCE)


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


HYBRID = ModelConfig(
    **COMMON | {"num_layers": 4, "num_key_value_heads": 2, "normalization": "rmsnorm", "disable_bias_linear": True},
    **{"position_embedding_type": "none", "hybrid_layer_pattern": "M-A-", "activation": "squared-relu"},
    **{"mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 6},
)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_class_of_transformers_loads_the_tensors_of_tied_and_untied_models(tmp_path: Path, family: Family) -> None:
    """By their names and shapes only: no weight is made."""
    tiny = next(name for name, (kind, _) in TINY.items() if kind == family.name)
    model = family.read(SettingsFile(tiny_config(tiny).to_dict(), ""))
    for untied in (True, False) if not model.add_output_bias else (True,):
        model = family.written(replace(model, untie_embeddings_and_output_weights=untied))
        (tmp_path / "config.json").write_text(json.dumps({**family.write(model), "pad_token_id": None}))
        shapes: dict[str, tuple[int, ...]] = {}
        for index in layers_with_weights(model):
            split = split_layer(rules_of(model, family, index), meta_layer(model, index).state_dict())
            shapes |= {name: tuple(tensor.shape) for name, tensor in split.items()}
        assert check_class(tmp_path, family.architecture, shapes) == []


def test_what_transformers_would_not_load_as_it_was_trained_is_refused(tmp_path: Path) -> None:
    """As tied embeddings, of which the class knows nothing, and values that are not the written ones."""
    save(whole_model(HYBRID), HYBRID, tmp_path / "ours")
    _, remarks = export_checkpoint(tmp_path / "ours" / "global_step7", tmp_path / "theirs")
    assert [each[:48] for each in remarks] == [
        "nemotron_h ties no weights: the output layer is ",
        "read it with transformers 5.10 or newer",
    ]
    path, config = tmp_path / "theirs" / "model.safetensors", tmp_path / "theirs" / "config.json"
    tensors = load_file(path)
    assert not check_export(tmp_path / "theirs")
    save_file({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, path, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"would load another model: its Nemotron.* lm_head\.weight differs"):
        check_export(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        (HYBRID, "tie_word_embeddings", False),
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
    """An output layer where a class ties none; a window and a whole divisor of Gemma 2; with dynamic rotations the
    positions before scaling."""
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


def test_experts_in_mxfp4_are_read_and_written_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As published files of gpt-oss have them: the same weights as of a copy in bf16, which comes back."""
    monkeypatch.setitem(TINY, "gpt_oss", ("gpt_oss", TINY["gpt_oss"][1] | {"intermediate_size": 64}))
    packed, copy = tmp_path / "packed", tmp_path / "copy"
    for folder in (packed, copy):
        tiny_model("gpt_oss").bfloat16().save_pretrained(folder)
    tensors, numbers = load_file(packed / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
        numbers[name] = dequantized(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    save_file(load_file(copy / "model.safetensors") | numbers, copy / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    for method in ("fp8", "mxfp4"):
        quantization = {"quant_method": method, "modules_to_not_convert": ["lm_head"]}
        (packed / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
        if method == "fp8":
            with pytest.raises(
                ConfigError, match=r'quant_method to "fp8", and our models have "mxfp4" or null: give a'
            ):
                import_model(packed, tmp_path / "refused")
    directory, _ = import_model(packed, tmp_path / "ours")
    export_checkpoint(directory, tmp_path / "back")
    assert len(numbers) == 6
    _check_tensors(copy, tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


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
