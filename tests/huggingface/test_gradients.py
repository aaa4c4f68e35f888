"""Training continues from a folder of Hugging Face: the first step, in token slices on two ranks, has the loss and the
gradients of transformers' own autograd.

Gradients are turned into theirs by the rules of the weights, which are linear. An error is the norm of a tensor's
difference over the norm of the tensor.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.huggingface.families.family import Family
from megatron_terapipe.huggingface.families.registry import FAMILIES, read_model
from megatron_terapipe.huggingface.folder_weights import meta_layer, rules_of
from megatron_terapipe.huggingface.weight_rules import split_layer
from tests.distributed import run_each
from tests.huggingface.folder_runs import PP2, TP2, Step, batches, first_step

pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
from tests.huggingface.tiny import TINY, tiny_model  # noqa: E402

TOLERANCE = 1e-5
WITH_EXPERTS = [
    *("mixtral", "qwen3_moe", "olmoe", "granitemoe", "granitemoeshared", "glm4_moe"),
    *("qwen3_next-experts", "qwen3_5_moe"),
]
TRAINED = [
    *("gpt2", "llama", "llama-tied-biased-wide-heads", "llama-3.1", "llama-yarn", "mistral", "qwen2", "qwen2-windows"),
    *("qwen3", "gemma", "gemma2", "gemma3", "gemma3-scaled", "phi3", "olmo2", "smollm3", "granite", "gpt_neox"),
    "phi3-longrope",
    *("gpt_neox-serial", "starcoder2", "stablelm", "stablelm-parallel", "nemotron", "falcon-7b", "falcon-40b"),
    "falcon-11b",
    *("opt", "gpt_bigcode", "ministral", "arcee", "seed_oss", "ernie4_5", "glm", "glm4", "olmo3-scaled", "exaone4"),
    *("mamba2", "nemotron_h", "helium", "qwen3_next", "qwen3_5"),
    *("hunyuan_v1_dense", "gptj", "phi", "cohere", "cohere2", "olmo"),
]
"""All models of each family with layers of their own kind. The others differ in names and sizes."""
SHARED_BY_TENSOR_RANKS = [
    *("gpt2", "llama-3.1", "qwen3", "olmo2", "gpt_neox", "phi3", "granite", "glm4_moe", "nemotron_h", "qwen3_next"),
    *("qwen3_5", "gptj", "cohere", "olmo"),
]
"""One model for each order of the weights of a layer."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each tiny model, in files of some tensors each."""
    made = {}
    for name in TRAINED + WITH_EXPERTS:
        made[name] = tmp_path_factory.mktemp(name)
        tiny_model(name).save_pretrained(made[name], max_shard_size="40KB")
    return made


@pytest.fixture(scope="module")
def on_two_stages(folders: dict[str, Path]) -> dict[str, list[Step]]:
    """The first step of each model on two stages, rank after rank."""
    return _steps(folders, TRAINED, PP2)


@pytest.fixture(scope="module")
def on_two_tensor_ranks(folders: dict[str, Path]) -> dict[str, list[Step]]:
    """The first step of some models on two ranks that share each layer, rank after rank."""
    return _steps(folders, SHARED_BY_TENSOR_RANKS, TP2)


@pytest.fixture(scope="module")
def on_two_expert_ranks(folders: dict[str, Path]) -> dict[str, list[Step]]:
    """The first step of models with experts on two stages, in each of which two replicas share the experts."""
    return _steps(
        folders, WITH_EXPERTS, f"{PP2} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall", ranks=4
    )


def test_every_family_is_trained() -> None:
    assert {TINY[name][0] for name in TRAINED + WITH_EXPERTS} == FAMILIES.keys()


@pytest.mark.parametrize("name", TRAINED)
def test_two_stages_with_four_token_slices(
    folders: dict[str, Path], on_two_stages: dict[str, list[Step]], name: str
) -> None:
    _check(name, folders[name], on_two_stages[name])


@pytest.mark.parametrize("name", SHARED_BY_TENSOR_RANKS)
def test_two_tensor_ranks_with_four_token_slices(
    folders: dict[str, Path], on_two_tensor_ranks: dict[str, list[Step]], name: str
) -> None:
    _check(name, folders[name], on_two_tensor_ranks[name])


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_two_stages_and_two_expert_ranks_with_four_token_slices(
    folders: dict[str, Path], on_two_expert_ranks: dict[str, list[Step]], name: str
) -> None:
    _check(name, folders[name], on_two_expert_ranks[name])


def _steps(folders: dict[str, Path], names: list[str], flags: str, ranks: int = 2) -> dict[str, list[Step]]:
    found = run_each(partial(first_step, flags), ranks, [folders[name] for name in names])
    return dict(zip(names, map(list, found), strict=True))


def _check(name: str, folder: Path, steps: list[Step]) -> None:
    theirs = tiny_model(name)
    loss = _loss(theirs)
    loss.backward()
    assert [step.loss for step in steps] == [pytest.approx(loss.item(), rel=TOLERANCE)] * len(steps)
    family, model = read_model(folder, "--load")
    found = _as_theirs(family, model, steps)
    expected = _gradients_by_names_of_files(theirs, folder.with_name(f"{folder.name}-gradients"))
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        error = (gradient - expected[key]).norm() / expected[key].norm().clamp(min=1e-12)
        # A bias of keys moves all scores of a query alike: its gradient is only rounding.
        negligible = expected[key].norm() < 1e-6
        assert negligible or error < TOLERANCE, f"{key}: {error}"


def _gradients_by_names_of_files(theirs: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Save the gradients as if they were weights: in files, experts are apart, and some tensors have older names."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(folder)
    without = {name for name, _ in theirs.named_buffers()}
    saved = safetensors_torch.load_file(folder / "model.safetensors")
    return {name: gradient for name, gradient in saved.items() if name not in without}


def _loss(theirs: Any) -> torch.Tensor:
    losses = [F.cross_entropy(theirs(each.tokens).logits.flatten(0, 1), each.labels.flatten()) for each in batches()]
    return torch.stack(losses).mean()


def _as_theirs(family: Family, model: ModelConfig, steps: list[Step]) -> dict[str, torch.Tensor]:
    whole: dict[int, dict[str, torch.Tensor]] = {}
    for layer, name in {key: None for step in steps for key in step.gradients}:
        parts = [step.gradients[layer, name] for step in steps if (layer, name) in step.gradients]
        cut = next(step.cuts[layer, name] for step in steps if (layer, name) in step.cuts)
        shape = dict(meta_layer(model, layer).named_parameters())[name].shape
        # A stage has the whole gradient, of a tied weight both have it; a tensor- or expert-parallel rank has its part.
        gradient = parts[0] if parts[0].shape == shape else np.concatenate(parts, cut)
        whole.setdefault(layer, {})[name] = torch.from_numpy(gradient)
    theirs: dict[str, torch.Tensor] = {}
    for layer, gradients in whole.items():
        # A bias that routers only choose by has no gradient.
        rules = [rule for rule in rules_of(model, family, layer) if rule.ours in gradients]
        theirs |= split_layer(rules, gradients)
    return theirs
