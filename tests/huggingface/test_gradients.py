"""Training continues from a folder of Hugging Face: the first step, in token slices, has the loss and the gradients of
transformers' own autograd.

Gradients are turned into theirs by the rules of the weights, which are linear. An error is the norm of a tensor's
difference over the norm of the tensor.
"""

from collections.abc import Callable
from functools import cache, partial
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
CUT = "--token-slices 13,1,7,11"
BY_LAYOUT: dict[str, tuple[int, list[str]]] = {
    CUT: (
        1,
        [
            *("mistral", "qwen2-windows", "gemma", "gemma2", "smollm3", "starcoder2", "stablelm-parallel", "nemotron"),
            *("gpt_bigcode", "ministral", "arcee", "seed_oss", "ernie4_5", "glm", "glm4", "olmo3-scaled", "exaone4"),
            *("helium", "hunyuan_v1_dense", "phi", "cohere2", "minicpm3", "sarvam_mla", "ministral3"),
        ],
    ),
    # Tied and learned weights at both ends, windows by layer, norms side by side, and a state.
    PP2: (2, ["llama-tied-biased-wide-heads", "opt", "gemma3-scaled", "falcon-40b", "bamba"]),
    # One model for each order of the weights of a layer.
    TP2: (
        2,
        [
            *("gpt2", "llama-3.1", "qwen3", "olmo2", "gpt_neox", "phi3", "granite", "nemotron_h", "qwen3_next"),
            *("qwen3_5", "gptj", "cohere", "olmo", "youtu", "deepseek_v3", "mamba2"),
        ],
    ),
    f"{CUT} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall": (
        2,
        [
            *("mixtral", "qwen3_moe", "olmoe", "granitemoe", "granitemoeshared", "glm4_moe"),
            *("qwen3_next-experts", "qwen3_5_moe", "deepseek_v2", "glm4_moe_lite", "qwen2_moe", "flex_olmo"),
            *("hunyuan_v1_moe", "ernie4_5_moe", "mellum", "dots1", "minimax_m2", "exaone_moe", "hy_v3", "afmoe"),
            *("solar_open", "gpt_oss", "granitemoehybrid"),
        ],
    ),
}
"""Number of ranks, and models, by the flags of a layout."""
LAYOUTS = {name: flags for flags, (_, names) in BY_LAYOUT.items() for name in names}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each tiny model, in files of some tensors each."""
    made = {}
    for name in LAYOUTS:
        made[name] = tmp_path_factory.mktemp(name)
        tiny_model(name).save_pretrained(made[name], max_shard_size="40KB")
    return made


@pytest.fixture(scope="module")
def steps_of(folders: dict[str, Path]) -> Callable[[str], dict[str, tuple[Step, ...]]]:
    """Return a function from the flags of a layout to the first step of its models, rank after rank."""

    @cache
    def launched(flags: str) -> dict[str, tuple[Step, ...]]:
        ranks, names = BY_LAYOUT[flags]
        return dict(
            zip(names, run_each(partial(first_step, flags), ranks, [folders[name] for name in names]), strict=True)
        )

    return launched


def test_every_family_is_trained() -> None:
    assert {TINY[name][0] for name in LAYOUTS} == FAMILIES.keys()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_first_step_in_four_token_slices(
    folders: dict[str, Path], steps_of: Callable[[str], dict[str, tuple[Step, ...]]], name: str
) -> None:
    folder, steps = folders[name], steps_of(LAYOUTS[name])[name]
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
        for tensor in (*theirs.parameters(), *theirs.buffers()):
            # Tensors without a gradient are told apart by it.
            tensor.fill_(torch.nan) if tensor.grad is None else tensor.copy_(tensor.grad)
    theirs.save_pretrained(folder)
    saved = safetensors_torch.load_file(folder / "model.safetensors")
    return {name: gradient for name, gradient in saved.items() if not gradient.isnan().all()}


def _loss(theirs: Any) -> torch.Tensor:
    losses = [F.cross_entropy(theirs(each.tokens).logits.flatten(0, 1), each.labels.flatten()) for each in batches()]
    return torch.stack(losses).mean()


def _as_theirs(family: Family, model: ModelConfig, steps: tuple[Step, ...]) -> dict[str, torch.Tensor]:
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
