"""The rule of routers where biases decide, against the routers of transformers; `tests/huggingface` has all others."""

import pytest
import torch

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.experts import choose, weigh

pytest.importorskip("transformers")
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm

GROUPED = {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5}
RULE = ModelConfig(
    **{"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": 8, "num_experts": 32},
    **{"moe_router_topk": 8, "moe_router_score_function": "sigmoid", "moe_router_num_groups": 8},
    **{"moe_router_group_topk": 4, "moe_router_topk_scaling_factor": 2.5, "moe_router_enable_expert_bias": True},
)


@pytest.mark.parametrize(
    ("router_class", "config_class"),
    [(glm.Glm4MoeTopkRouter, glm.Glm4MoeConfig), (deepseek.DeepseekV3TopkRouter, deepseek.DeepseekV3Config)],
)
def test_tokens_choose_the_experts_of_transformers_with_their_weights(router_class: type, config_class: type) -> None:
    router = router_class(config_class(hidden_size=16, n_routed_experts=32, **GROUPED))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.normal_(generator=generator)
        # Large biases, some below -1, decide for many tokens, and make scores negative.
        router.e_score_correction_bias.normal_(generator=generator)
    inputs = torch.randn(500, 16, generator=generator, requires_grad=True)
    logits, weights, chosen = router(inputs)
    # The order of the chosen experts has no meaning.
    order = chosen.argsort(1)
    found = choose(logits.detach(), RULE, router.e_score_correction_bias).sort(1).values
    assert torch.equal(found, chosen.gather(1, order))
    torch.testing.assert_close(weigh(logits, found, RULE), weights.gather(1, order), rtol=0, atol=1e-6)
