"""Rows of published tables of mixtures of experts, as trials.

A row is a line whose `model` is a name. It has the figures as they were printed: `system`, `gpus`, `precision`, `tp`,
`pp`, `cp`, `ep`, `etp`, `vpp`, `micro_batch`, `global_batch`, `seq`, `step_time_s` and some more. A row is left out,
with the reason, where it is no step of pretraining, where the layout or the model is not known, and where no formula
describes the layers. Settings that a table does not print are those of Megatron's recipes for throughput: routers
choose evenly, optimizer states are divided, nothing is recomputed. Sources of models:

    Qwen3      Qwen team, arXiv 2505.09388 table 2
    gpt-oss    OpenAI, arXiv 2508.10925 section 2
    Grok-1     github.com/xai-org/grok-1; here with the tokenizer of Llama 3 and one norm before each part, as
               github.com/NVIDIA/dgxc-benchmarking trains it
    Mixtral    Jiang et al., arXiv 2401.04088 table 1; 8x22B as released
    Llama 4    `config.json` of the released weights
    GLM-4.5    GLM team, arXiv 2508.06471 table 1
    OLMoE      Muennighoff et al., arXiv 2409.02060 table 1
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

from megatron_terapipe.config.presets import LLAMA, UNTIED

_USUAL: Mapping[str, Any] = {**LLAMA, **UNTIED, "kv_channels": 128, "moe_token_dispatcher_type": "alltoall"}


def _model(
    layers: int, hidden: int, heads: int, groups: int, vocabulary: int, experts: tuple[int, int, int], **own: Any
) -> Mapping[str, Any]:
    """Settings of a model; `experts`: experts of a layer, those that a token chooses, and the width of each."""
    names = "num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"
    sizes = dict(zip(names, (layers, hidden, heads, groups, vocabulary), strict=True))
    chosen = dict(zip(("num_experts", "moe_router_topk", "moe_ffn_hidden_size"), experts, strict=True))
    return MappingProxyType({**_USUAL, **sizes, **chosen, **own})


_GPT_OSS: Mapping[str, Any] = {
    **{"kv_channels": 64, "sliding_window": 128, "window_attn_skip_freq": "2"},
    **{"disable_bias_linear": False, "add_qkv_bias": True},
}
_QWEN3 = {"qk_norm": "head"}
_LLAMA4 = {"moe_router_score_function": "sigmoid", "moe_shared_expert_intermediate_size": 8192}
_GLM = {"moe_router_score_function": "sigmoid", "add_qkv_bias": True}

MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen330ba3b": _model(48, 2048, 32, 4, 151936, (128, 8, 768), **_QWEN3),
        "qwen3235ba22b": _model(94, 4096, 64, 4, 151936, (128, 8, 1536), **_QWEN3),
        "gptoss20b": _model(24, 2880, 64, 8, 201088, (32, 4, 2880), **_GPT_OSS),
        "gptoss120b": _model(36, 2880, 64, 8, 201088, (128, 4, 2880), **_GPT_OSS),
        "grok1": _model(64, 6144, 48, 8, 128256, (8, 2, 32768), activation="geglu"),
        "mixtral8x7b": _model(32, 4096, 32, 8, 32000, (8, 2, 14336)),
        "mixtral8x22b": _model(56, 6144, 48, 8, 32768, (8, 2, 16384)),
        "llama4scout": _model(48, 5120, 40, 8, 202048, (16, 1, 8192), **_LLAMA4),
        "llama4maverick": _model(
            48, 5120, 40, 8, 202048, (128, 1, 8192), **_LLAMA4, ffn_hidden_size=16384, moe_layer_freq="[0,1]*24"
        ),
        "glm45air": _model(
            46, 4096, 96, 8, 151552, (128, 8, 1408), **_GLM, ffn_hidden_size=10944,
            moe_shared_expert_intermediate_size=1408, moe_layer_freq="[0]*1+[1]*45",
        ),
        "glm45": _model(
            92, 5120, 96, 8, 151552, (160, 8, 1536), **_GLM, ffn_hidden_size=12288, qk_norm="head",
            moe_shared_expert_intermediate_size=1536, moe_layer_freq="[0]*3+[1]*89",
        ),
        "olmoe": _model(16, 2048, 16, 16, 50304, (64, 8, 1024), qk_norm="all-heads", moe_router_pre_softmax=True),
    }
)  # fmt: skip
"""Settings by the beginning of a name in small letters and digits."""

NOT_WRITTEN: Mapping[str, str] = MappingProxyType(
    {
        r"deepseek|kimi|moonlight|glm5": "latent attention",
        r"nemotron|qwen3next|qwen3[56]|jamba": "layers with a recurrent state",
        r"vl|omni|tokendrop": "other inputs, or tokens that are dropped",
    }
)
"""Models that no formula describes: a pattern of names, and the cause."""

CLUSTERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "h100": {"device": "H100-SXM5-80GB"},
        "b200": {"device": "B200-SXM-180GB"},
        "a100": {"device": "A100-SXM4-80GB"},
        # NVLink joins the 72 devices of a rack, of which a layout uses 64.
        "gb200": {"device": "GB200-186GB", "devices_per_node": 64, "inter_node_Gbps": 64 * 400},
    }
)
"""Fields of a cluster by the name of a system, without DGX."""

LAYOUT = ("gpus", "tp", "pp", "cp", "ep", "micro_batch", "global_batch", "seq")

NO_SPEED = "headline", "measured, short"
"""Beginnings of the `quality` of rows that measure no steady step."""

RECIPES: Mapping[tuple[str, str], tuple[str, bool]] = MappingProxyType(
    {
        ("qwen330ba3b", ""): ("hybridep", False),
        ("qwen3235ba22b", "h100"): ("alltoall", True),
        ("qwen3235ba22b", "gb200"): ("hybridep", False),
    }
)
"""Dispatcher of tokens, and whether other micro-batches hide its exchanges, by model and beginning of a system, for
rows of Megatron-Bridge that do not print them: those of its recipes (src/megatron/bridge/perf_recipes). The others are
`alltoall`, without."""


class LeftOutError(Exception):
    """A row that is no trial, with the reason."""


def is_row(document: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether the object of a line is a row of a published table."""
    return isinstance(document, Mapping) and isinstance(document.get("model"), str) and "strategy" not in document


def trial_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object of a trial.

    Raises:
        LeftOutError: where the row is none.
    """
    _check(row)
    model, cluster, devices = _settings(row), CLUSTERS[_system(row)], row["gpus"]
    ranks = row["tp"] * row["pp"] * row["cp"]
    chunks = row.get("vpp") or 1
    # Megatron's default are the tensor-parallel ranks of attention; recipes of other publications set 1.
    cut = row.get("etp") or (row["tp"] if "dgxc" in row["source"] else 1)
    dispatcher, overlaps = _exchange(row)
    strategy = {
        "data_parallel_size": devices // ranks,
        "context_parallel_size": row["cp"],
        "tensor_parallel_size": row["tp"],
        "pipeline_parallel_size": row["pp"],
        # Ranks that share the experts: those that share one of them are among these.
        "expert_parallel_size": row["ep"] * cut,
        "expert_tensor_parallel_size": cut,
        "expert_dispatcher": dispatcher,
        "overlaps_expert_exchange": overlaps,
        "micro_batch_size": row["micro_batch"],
        "global_batch_size": row["global_batch"],
        "num_model_chunks": chunks,
        "schedule": "interleaved" if chunks > 1 else "1f1b",
        "sequence_parallel": row["tp"] > 1,
        "zero_stage": 1,
        "recompute": "full" if "full" in str(row.get("recompute")) else "none",
    }
    precision = "bf16" if row["precision"].lower() == "bf16" else "fp8"
    names = {"layers": model["num_layers"], "gpus": devices, "batch": row["global_batch"], "tokens": row["seq"]}
    group = ", ".join([_known(row), _system(row), *(f"{name} {value}" for name, value in names.items())])
    return {
        "source": f"Megatron-core, {precision}, {_system(row)}",
        "id": str(row.get("id", "")),
        "group": group,
        "model": model,
        "cluster": {**cluster, "num_devices": devices},
        "software": "megatron-core",
        "precision": precision,
        "forced_balance": not str(row.get("routing")).startswith("real"),
        "strategy": strategy,
        "measured": {"iteration_time_s": row["step_time_s"]},
    }


def _exchange(row: Mapping[str, Any]) -> tuple[str, bool]:
    """Dispatcher, and whether its exchanges are hidden."""
    named = str(row.get("dispatcher") or (row.get("features") or {}).get("moe_dispatcher") or "").lower()
    recipe = ("alltoall", False)
    if "Bridge" in row["source"] and not named:
        fits = (each for each in RECIPES if _known(row) == each[0] and _system(row).startswith(each[1]))
        recipe = RECIPES.get(next(fits, ("", "")), recipe)
    dispatcher = next((each for each in ("deepep", "hybridep", "alltoall") if each in named), recipe[0])
    return dispatcher, bool(row.get("a2a_overlap", recipe[1]))


def _system(row: Mapping[str, Any]) -> str:
    return str(row.get("system")).lower().removeprefix("dgx-")


def _check(row: Mapping[str, Any]) -> None:
    if not str(row.get("task")).startswith("pretrain"):
        raise LeftOutError("not pretraining")
    if str(row.get("quality")).startswith(NO_SPEED):
        raise LeftOutError("a headline, or a few steps")
    if row.get("release") == "verification card" and row["task"] == "pretrain":
        raise LeftOutError("a check of correctness, whose publisher calls its speed no result")
    if row.get("in_head") is False:
        raise LeftOutError("corrected or withdrawn by its publisher")
    missing = [name for name in (*LAYOUT, "precision", "step_time_s") if row.get(name) is None]
    if missing or row.get("fsdp"):
        raise LeftOutError(f"layout not known ({', '.join(missing) or 'weights divided among replicas'})")
    if row["gpus"] % (row["tp"] * row["pp"] * row["cp"]):
        raise LeftOutError("ranks that do not divide the GPUs")
    if _system(row) not in CLUSTERS:
        raise LeftOutError(f"no data sheet of {_system(row)}")


def _known(row: Mapping[str, Any]) -> str:
    """Name of its model in `MODELS`."""
    name = re.sub(r"[^a-z0-9]", "", row["model"].lower()).removeprefix("release")
    for pattern, cause in NOT_WRITTEN.items():
        if re.search(pattern, name):
            raise LeftOutError(cause)
    known = max((each for each in MODELS if name.startswith(each)), key=len, default=None)
    if known is None:
        raise LeftOutError(f"model {row['model']} not known")
    return known


def _settings(row: Mapping[str, Any]) -> dict[str, Any]:
    settings = {**MODELS[_known(row)], "seq_length": row["seq"], "max_position_embeddings": row["seq"]}
    if row.get("layers"):
        settings["num_layers"] = row["layers"]
    return settings
