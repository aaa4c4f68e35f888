"""The rule of routers where biases decide, against the routers of transformers; `tests/huggingface` has all others."""

import pytest
import torch

from megatron_terapipe.config.experts import RoutingRule
from megatron_terapipe.model.experts import choose, weigh

pytest.importorskip("transformers")
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm

GROUPED = {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5}
RULE = RoutingRule(num_experts=32, top_k=8, score="sigmoid", num_groups=8, kept_groups=4, scale=2.5, has_bias=True)


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
