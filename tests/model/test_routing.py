"""The rule of routers against the routers of transformers: the experts that tokens choose, and their weights."""

from typing import Any

import pytest
import torch

from megatron_terapipe.config.experts import RoutingRule
from megatron_terapipe.huggingface.families.registry import FAMILIES
from megatron_terapipe.huggingface.families.settings import SettingsFile
from megatron_terapipe.model.experts import choose, weigh

pytest.importorskip("transformers")
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.granitemoe import modeling_granitemoe as granite
from transformers.models.granitemoeshared import modeling_granitemoeshared as shared
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

EXPERTS = 32
GROUPED: dict[str, Any] = {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5}
ROUTERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "mixtral": (mixtral.MixtralTopKRouter, mixtral.MixtralConfig, {"num_local_experts": EXPERTS}),
    "mixtral-one": (mixtral.MixtralTopKRouter, mixtral.MixtralConfig, {"num_local_experts": 8}),
    "qwen3_moe": (qwen.Qwen3MoeTopKRouter, qwen.Qwen3MoeConfig, {"num_experts": EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe-sums": (qwen.Qwen3MoeTopKRouter, qwen.Qwen3MoeConfig, {"num_experts": EXPERTS}),
    "olmoe": (olmoe.OlmoeTopKRouter, olmoe.OlmoeConfig, {"num_experts": EXPERTS}),
    "olmoe-renormalised": (olmoe.OlmoeTopKRouter, olmoe.OlmoeConfig, {"num_experts": EXPERTS, "norm_topk_prob": True}),
    "granitemoe": (granite.GraniteMoeTopKRouter, granite.GraniteMoeConfig, {"num_local_experts": EXPERTS}),
    "granitemoeshared": (shared.GraniteMoeSharedTopKRouter, shared.GraniteMoeSharedConfig, {}),
    "glm4_moe": (glm.Glm4MoeTopkRouter, glm.Glm4MoeConfig, {"n_routed_experts": EXPERTS}),
    "glm4_moe-groups": (glm.Glm4MoeTopkRouter, glm.Glm4MoeConfig, {"n_routed_experts": EXPERTS, **GROUPED}),
    "deepseek_v3": (deepseek.DeepseekV3TopkRouter, deepseek.DeepseekV3Config, {"n_routed_experts": EXPERTS}),
}
"""Router, its configuration, and settings."""

DEEPSEEK_V3 = RoutingRule(
    num_experts=EXPERTS, top_k=8, score="sigmoid", num_groups=8, kept_groups=4, scale=2.5, has_bias=True
)
"""Of a model that is not here, because of its attention."""


def rule_of(name: str, settings: dict[str, Any]) -> RoutingRule:
    """The rule that a `config.json` gives."""
    family = name.partition("-")[0]
    return DEEPSEEK_V3 if family == "deepseek_v3" else FAMILIES[family].read(SettingsFile(settings, family)).routing


@pytest.mark.parametrize("name", ROUTERS)
def test_tokens_choose_the_experts_of_transformers_with_their_weights(name: str) -> None:
    router_class, config_class, settings = ROUTERS[name]
    rule = rule_of(name, settings)
    config = config_class(hidden_size=16, **settings)
    router = router_class(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.normal_(generator=generator)
        if rule.has_bias:
            # Large biases, some below -1, decide for many tokens, and make scores negative.
            router.e_score_correction_bias.normal_(generator=generator)
    inputs = torch.randn(500, 16, generator=generator, requires_grad=True)
    logits, weights, chosen = router(inputs)
    bias = router.e_score_correction_bias if rule.has_bias else None
    assert rule.num_experts == router.num_experts
    # The order of the chosen experts has no meaning.
    order = chosen.argsort(1)
    found = choose(logits.detach(), rule, bias).sort(1).values
    assert torch.equal(found, chosen.gather(1, order))
    own = weigh(logits, found, rule)
    torch.testing.assert_close(own, weights.gather(1, order), rtol=0, atol=1e-6)
    drawn = torch.randn(own.shape, generator=generator)
    ours, theirs = (
        torch.autograd.grad((each * drawn).sum(), inputs, retain_graph=True)[0]
        for each in (own, weights.gather(1, order))
    )
    assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_groups_that_transformers_compares_in_another_way_are_refused() -> None:
    with pytest.raises(Exception, match="sets topk_group to 4 and num_experts_per_tok to 6, which is not twice as"):
        rule_of("glm4_moe", {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 6})
