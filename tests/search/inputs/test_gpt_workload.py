"""A GPT as a workload has the parameters that its layers have when they are built."""

from typing import Any

import pytest
import torch
from deepspeed.pipe import TiedLayerSpec

from megatron_terapipe.config import ModelConfig, flops
from megatron_terapipe.config.presets import MODEL_PRESETS
from megatron_terapipe.model.gpt import gpt_layers
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.search.price.workload_files import read_workload
from tests.model.configs import MODELS, SEQ, model_config


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


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_parameters_of_published_models_are_those_of_the_built_model(name: str) -> None:
    workload = read_workload(name)
    assert workload.config is not None
    assert workload.parameters == built_parameters(workload.config, TensorParallelRanks())


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
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
def test_what_no_fused_kernel_computes_is_written_out(settings: dict[str, float]) -> None:
    layers = gpt_workload(model_config(**settings)).layers[1:-2]
    assert all(layer.attention.written_out for layer in layers)
