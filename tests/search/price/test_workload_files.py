import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import TiedLayerSpec

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.config import ModelConfig, flops
from megatron_terapipe.config.presets import MODEL_PRESETS
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.families.registry import FAMILIES
from megatron_terapipe.model.gpt import gpt_layers
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.search.price.workload_files import parse_workload, read_workload
from tests.architecture.sources import ROOT
from tests.model.configs import MODELS, SEQ, model_config

GPT = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 100}
HEADS = {"query_heads": 2, "head_size": 2}
LAYER = {"tokens": 8, "hidden_size": 4, "products": [{"inputs": 4, "outputs": 16}]}


def layer(**fields: object) -> dict[str, Any]:
    """A model of one layer."""
    return {"seq_length": 8, "layers": [LAYER | fields]}


def attending(**fields: object) -> dict[str, Any]:
    return layer(attention=HEADS | fields)


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_presets_are_as_large_as_published(name: str) -> None:
    workload = read_workload(name)
    assert workload.name == name
    # The published counts of GPT-3 are not defined; small models are mostly embedding.
    assert workload.parameters == pytest.approx(MODEL_PRESETS[name].published_parameters, rel=0.06)
    assert workload.config is not None


@pytest.mark.parametrize(
    ("document", "changes", "name", "sizes"),
    [
        (GPT | {"name": "mine"}, {}, "mine", (4, 32, 64, 100)),
        ({"preset": "gpt2", "seq_length": 512}, {"num_layers": 3}, "3x768", (3, 512, 768, 50257)),
        # Longer sequences make no other model of a preset.
        ({"preset": "llama2-70b"}, {"seq_length": 32768}, "llama2-70b", (80, 32768, 8192, 32000)),
    ],
)
def test_a_gpt_by_its_fields(
    document: dict[str, Any], changes: dict[str, int], name: str, sizes: tuple[int, ...]
) -> None:
    workload = parse_workload(document, "m.json", changes)
    found = workload.config
    assert found is not None and workload.name == name and workload.num_dealt_layers == found.num_layers
    assert (found.num_layers, found.seq_length, found.hidden_size, found.vocab_size) == sizes


def test_a_model_by_its_layers() -> None:
    workload = parse_workload(
        {
            "name": "own",
            "seq_length": 8,
            "layers": [
                LAYER | {"repeat": 3, "attention": {"query_heads": 2, "head_size": 2, "causal": False}},
                LAYER | {"kind": "head", "parameters": 70},
            ],
        },
        "m.json",
    )
    assert len(workload.layers) == workload.num_dealt_layers == 4
    assert workload.layers[0] is workload.layers[2]
    assert workload.parameters == 3 * 64 + 70
    assert not workload.can_cut_tokens
    assert workload.config is None


def test_layers_in_sliding_windows_can_be_cut() -> None:
    workload = parse_workload(attending(sliding_window=3, normed=True, written_out=True), "m.json")
    assert workload.can_cut_tokens
    attention = workload.layers[0].attention
    assert (attention.sliding_window, attention.normed_channels) == (3, 8)
    assert attention.positions(2, 8, 8) == 6 * 3


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "m.json holds [], which is not an object"),
        (
            GPT | {"num_local_experts": 8},
            "m.json sets num_local_experts to 8, and experts are not in this type of model: this",
        ),
        ({"model_type": "bloom"}, f"is a model of type bloom, which is none of the {len(FAMILIES)} families"),
        ({"architectures": ["BertModel"]}, 'm.json is a config.json of ["BertModel"] without model_type, which names'),
        (GPT | {"num_layers": 10**9}, "m.json: num_layers 1000000000 is more than 10,000: give less"),
        ({"num_layers": 2}, "m.json: hidden_size, num_attention_heads, seq_length must be given: add them"),
        (GPT | {"hidden_size": 10}, "m.json: hidden_size 10 is not a multiple of num_attention_heads 4: change one"),
        ({"preset": "gpt3-13"}, 'm.json: preset "gpt3-13" is not known: did you mean gpt3-13b?'),
        (layer(unshared_parameters=65), "is more than the layer's 64 parameters"),
        (
            attending(causal=False, separate_window=3),
            "m.json: layers[0].attention.separate_window 3 does not divide the layer's 8 tokens",
        ),
        (attending(separate_window=4), "has separate_window 4, which is not causal, and is causal"),
        (
            attending(causal=False, sliding_window=4),
            "has sliding_window 4, which reaches back from a token, and is not",
        ),
        (attending(query_heads=3, key_value_heads=2), "does not divide query_heads 3"),
        (layer() | {"end_dealt_layer": 2}, "m.json: end_dealt_layer 2 is not in 1 to 1"),
        (
            {
                "seq_length": 8,
                "layers": [LAYER | {"shared_weight": "w", "shared_parameters": count} for count in (8, 16)],
            },
            "shared weight 'w' has 8 entries in one layer and 16 in another",
        ),
    ],
)
def test_errors(document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_workload(document, "m.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt3-13", "model gpt3-13 is neither a file nor a preset: did you mean gpt3-13b?"),
        ("Qwen/Qwen2.5-7B", "model Qwen/Qwen2.5-7B is not a local file"),
        ("missing.json", "missing.json cannot be read"),
    ],
)
def test_names_without_a_model(name: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read_workload(name)


def test_flags_do_not_change_layers() -> None:
    with pytest.raises(ConfigError, match="lists layers, which flags do not change: drop --num-layers"):
        parse_workload(layer(), "m.json", {"num_layers": 2})


def test_transgan_has_the_layers_that_amp_counts() -> None:
    workload = read_workload(str(ROOT / "examples" / "models" / "transgan.json"))
    assert workload.num_dealt_layers == 56
    blocks = [index for index, layer in enumerate(workload.layers) if layer.kind == "block"]
    assert blocks == [*range(3, 15), *range(41, 53)]
    wide, windowed = workload.layers[3], workload.layers[41]
    assert (wide.tokens, wide.hidden_size) == (81, 1024)
    assert windowed.attention is not None
    assert (windowed.tokens // windowed.attention.separate_window, windowed.hidden_size) == (256, 16)  # type: ignore[operator]
    # The output of each step of upsampling is the input of the next: pixels x channels never shrink before the colours.
    sizes = [layer.output_elements for layer in workload.layers[:-1]]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "models").iterdir()), ids=lambda path: path.name)
def test_examples(path: Path) -> None:
    assert read_workload(str(path)).parameters > 0


def test_a_model_of_hugging_face(tmp_path: Path) -> None:
    settings = {"model_type": "gemma2", "num_hidden_layers": 4, "hidden_size": 256, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    for path in (tmp_path, tmp_path / "config.json"):
        whole = read_workload(str(path))
        assert (whole.name, whole.seq_length, len(whole.layers)) == ("gemma2", 8192, 7)
        assert read_workload(str(path), {"seq_length": 512, "num_layers": 2}).seq_length == 512
    (tmp_path / "config.json").write_text(json.dumps(settings | {"hidden_size": "256"}))
    with pytest.raises(ConfigError, match='sets hidden_size to "256", and it must be a whole number above 0'):
        read_workload(str(tmp_path))


def built_parameters(model: ModelConfig, ranks: TensorParallelRanks) -> int:
    """Parameters that the trainer's layers have, a tied weight once."""
    total, tied = 0, set()
    with torch.device("meta"):
        for spec in gpt_layers(model, ranks):
            if isinstance(spec, TiedLayerSpec):
                if spec.key in tied:
                    continue
                tied.add(spec.key)
            total += sum(parameter.numel() for parameter in spec.build().parameters())
    return total


PRESETS = {name: read_workload(name).config for name in MODEL_PRESETS}


@pytest.mark.parametrize("model", [*PRESETS.values(), *MODELS.values()], ids=[*PRESETS, *MODELS])
def test_parameters_are_those_of_the_built_model(model: ModelConfig) -> None:
    workload = gpt_workload(model)
    assert workload.parameters == flops.model_parameters(model) == built_parameters(model, TensorParallelRanks())


def two_ranks_share(model: ModelConfig) -> bool:
    """Whether the heads of every layer, and the words as they are padded for one rank, are even."""
    return model.padded_vocab_size() % 2 == 0 and all(block.num_key_value_heads % 2 == 0 for block in model.blocks)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if two_ranks_share(model)])
def test_ranks_have_the_parameters_of_their_parts(name: str) -> None:
    model, workload = MODELS[name], gpt_workload(MODELS[name])
    counted = sum(layer.parameters_per_rank(2) for layer in workload.layers)
    if not model.untie_embeddings_and_output_weights:
        counted -= workload.layers[-1].parameters_per_rank(2)
    assert counted == built_parameters(model, TensorParallelRanks(0, 2))


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"sliding_window": 5}, [5, 5]),
        ({"sliding_window": 5, "window_attn_skip_freq": "2"}, [5, None]),
        ({"sliding_window": SEQ - 1}, [SEQ - 1] * 2),
        ({"sliding_window": SEQ}, [None, None]),
        ({}, [None, None]),
    ],
)
def test_windows_are_those_of_the_layers(settings: dict[str, Any], windows: list[int | None]) -> None:
    model = model_config(num_layers=2, **settings)
    attentions = [layer.attention for layer in gpt_workload(model).layers[1:-2]]
    assert [attention.sliding_window for attention in attentions] == windows
    assert not any(attention.written_out for attention in attentions)


@pytest.mark.parametrize("settings", [{"attention_softcap": 30.0}, {"attention_dropout": 0.1}])
def test_attention_without_a_fused_kernel_is_written_out(settings: dict[str, float]) -> None:
    layers = gpt_workload(model_config(**settings)).layers[1:-2]
    assert all(layer.attention.written_out for layer in layers)
