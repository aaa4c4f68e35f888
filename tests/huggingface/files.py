"""Settings of `config.json` files that tests read; needs no transformers."""

from typing import Any

NEEDED: dict[str, dict[str, Any]] = {
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "norm_topk_prob": True, "n_shared_experts": 2},
    "hunyuan_v1_moe": {"num_experts": 64, "moe_topk": 8},
}
"""Settings of families whose defaults are refused, or make no model."""


def least_settings(name: str) -> dict[str, Any]:
    """Return a file of a family, with its default sizes where the defaults of transformers can be trained here."""
    return {"model_type": name, **NEEDED.get(name, {})}
