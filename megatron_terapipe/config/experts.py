"""Sizes of a model, and mixtures of experts: the settings of their layers, and of the rule by which a router chooses.

    family         scores     chosen by                       weights of the chosen
    Mixtral        softmax    score, 2 of 8                   softmax over the chosen
    Qwen3-MoE      softmax    score, 8 of 128                 softmax over the chosen
    Granite-MoE    softmax    score                           softmax over the chosen
    OLMoE          softmax    score, 8 of 64                  their scores: --moe-router-pre-softmax
    DeepSeek-V3    sigmoid    score + bias, in 4 of 8 groups  scores / their sum x 2.5
    GLM-4.5        sigmoid    score + bias                    scores / their sum

A softmax over the chosen logits is the softmax over all of them, divided by the sum of the chosen: both are one rule.
"""

from dataclasses import dataclass, fields
from typing import Literal

from megatron_terapipe.config.layers import MOST_HEADS, MOST_WIDTH, layers_of_pattern
from megatron_terapipe.config.options import option
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, TRAINING_CANNOT_BE_RUN, ConfigError

_ALL_TOKENS = (
    "the choice of a token would depend on later tokens of the sequence, which are in later token slices: "
    f"{TRAINING_CANNOT_BE_RUN}"
)

MOST_EXPERTS = 32_767
"""Experts of a layer at most: their numbers are kept in 16 bits."""

_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "document_aux_loss": "document_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Names in the log, Megatron's but for documents, by the kind of loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Sizes of a model."""

    model_preset: str | None = option(None, metavar="NAME|PATH")
    """Take the sizes and the parts of a published model: its name (an unknown name lists them), or a
    config.json of Hugging Face, or the folder that holds one. Flags win over it."""

    num_layers: int = option(least=1, most=10_000)
    """Transformer layers."""

    hidden_size: int = option(least=1, most=1_000_000)
    """Width of the residual stream."""

    ffn_hidden_size: int = option(
        derived="4 x --hidden-size; 8/3 x --hidden-size, rounded down to 64, with a gate", least=1, most=MOST_WIDTH
    )
    """Width of the hidden layer of the MLP."""

    num_attention_heads: int = option(least=1, most=MOST_HEADS)
    """Query heads of each attention."""

    num_key_value_heads: int = option(
        derived="--num-attention-heads", aliases=("--num-query-groups",), least=1, most=MOST_HEADS
    )
    """Key and value heads of each attention. If there are fewer than query heads, several query heads share one
    (grouped-query attention)."""

    kv_channels: int = option(derived="--hidden-size / --num-attention-heads", least=1, most=1_000_000)
    """Width of one head."""

    seq_length: int = option(least=1, most=10**9)
    """Tokens of one training sequence."""

    max_position_embeddings: int = option(derived="--seq-length", least=1, most=10**9)
    """Longest sequence that the model can process. With learned positions, their number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSettings(ModelSizes):
    """Layers of experts in a model."""

    num_experts: int | None = option(None, least=1, most=MOST_EXPERTS)
    """Experts of each layer of experts, which takes the place of an MLP. Default: no layers of experts."""

    moe_router_topk: int = option(2, least=1, most=MOST_EXPERTS, needs=("num_experts",))
    """Experts that each token chooses."""

    moe_ffn_hidden_size: int | None = option(
        derived="--ffn-hidden-size", least=1, most=MOST_WIDTH, needs=("num_experts",)
    )
    """Width of the hidden layer of each expert."""

    moe_shared_expert_intermediate_size: int | None = option(None, least=1, most=MOST_WIDTH, needs=("num_experts",))
    """Width of the hidden layer of the shared experts together, which process every token. Default: none."""

    moe_shared_expert_gate: bool = option(False, needs=("moe_shared_expert_intermediate_size",))
    """Multiply the output of the shared experts by the sigmoid of a gate, a number of each token."""

    moe_layer_freq: str = option("1", metavar="PATTERN", needs=("num_experts",))
    """Layers of experts: a number N for layers 0, N, 2N, ..., or a list with a 1 for each layer of experts and a 0 for
    each with an MLP, `[0]*3+[1]*58`."""

    moe_router_score_function: Literal["softmax", "sigmoid"] = option(
        "softmax", needs=("num_experts",), elsewhere={"sqrtsoftplus": MODEL_CANNOT_BE_TRAINED}
    )
    """Function of the router's logits that gives the scores of the experts."""

    moe_router_pre_softmax: bool = option(False, needs=("num_experts",))
    """Weigh experts by the softmax over all of them. By default the softmax is over the chosen ones."""

    moe_router_num_groups: int | None = option(None, least=1, most=MOST_EXPERTS, needs=("num_experts",))
    """Groups of experts, of which each token chooses in --moe-router-group-topk. Default: no groups."""

    moe_router_group_topk: int | None = option(None, least=1, most=MOST_EXPERTS, needs=("moe_router_num_groups",))
    """Groups in which a token chooses its experts."""

    moe_router_topk_scaling_factor: float | None = option(None, above=0, most=1e6, needs=("num_experts",))
    """Factor of the weights of the chosen experts. Default: 1."""

    moe_router_enable_expert_bias: bool = option(False, needs=("num_experts",))
    """Add a bias to the scores by which experts are chosen, as in DeepSeek-V3. After each step it grows for experts
    with few tokens, and shrinks for those with many."""

    moe_router_bias_update_rate: float = option(1e-3, least=0, most=1e3, needs=("moe_router_enable_expert_bias",))
    """Change of this bias in a step."""

    moe_router_load_balancing_type: Literal[
        "none", "aux_loss", "seq_aux_loss", "document_aux_loss", "global_aux_loss"
    ] = option(
        "aux_loss",
        needs=("num_experts",),
        elsewhere={"sinkhorn": _ALL_TOKENS, "quantile_balancing": _ALL_TOKENS},
    )
    """Tokens that the auxiliary loss balances over the experts: tokens of a micro-batch (`aux_loss`), of each sequence
    (`seq_aux_loss`), of each document (`document_aux_loss`), or of the micro-batches of the step so far, on all
    replicas (`global_aux_loss`). `none` has no such loss."""

    moe_aux_loss_coeff: float = option(0.0, least=0, most=1e6, needs=("num_experts",))
    """Factor of the auxiliary loss."""

    moe_z_loss_coeff: float | None = option(None, least=0, most=1e6, needs=("num_experts",))
    """Factor of the z-loss, the mean square of the log of the sum of exponentials of the router's logits."""

    moe_input_jitter_eps: float | None = option(None, above=0, below=1, needs=("num_experts",))
    """Multiply the inputs of the router by random numbers between 1 - EPS and 1 + EPS in training. They depend only on
    the seed, the layer and the position."""

    moe_expert_capacity_factor: float | None = option(None, above=0, most=1e6, needs=("num_experts",))
    """Limit the tokens of each sequence that an expert processes to this factor times the mean. Later tokens are
    dropped. Default: no limit."""

    moe_token_dispatcher_type: Literal["auto", "alltoall", "allgather"] = option(
        "auto", needs=("num_experts",), spellings={"flex": "auto"}
    )
    """How tokens reach the experts of other ranks: `alltoall` sends each to its experts, and the host waits for the
    sizes; `allgather` sends all tokens to all expert-parallel ranks, and nothing waits. `auto` is the cheaper one."""

    @property
    def renormalises(self) -> bool:
        """Whether the scores of the experts that a token chooses are divided by their sum."""
        softmax = self.moe_router_score_function == "softmax"
        return not self.moe_router_pre_softmax if softmax else self.moe_router_topk > 1

    @property
    def router_losses(self) -> tuple[str, ...]:
        """Names of the losses of routers in the log: of the auxiliary loss, if there is one, then of the z-loss."""
        auxiliary = (_LOSSES[self.moe_router_load_balancing_type],) if self.moe_aux_loss_coeff else ()
        return (*auxiliary, *(("z_loss",) if self.moe_z_loss_coeff else ()))

    @property
    def balances_documents(self) -> bool:
        """Whether a loss balances each document."""
        return self.router_losses[:1] == (_LOSSES["document_aux_loss"],)

    def layers_of_experts(self, num_layers: int) -> tuple[bool, ...]:
        """Return for each layer whether it has experts."""
        if self.num_experts is None:
            return (False,) * num_layers
        pattern = self.moe_layer_freq.strip()
        if pattern.isdigit() and int(pattern):
            return tuple(index % int(pattern) == 0 for index in range(num_layers))
        layers = layers_of_pattern(pattern, num_layers, "--moe-layer-freq")
        if not any(layers):
            raise ConfigError(
                f"--moe-layer-freq {pattern} has no layer of experts for --num-experts {self.num_experts}: list a 1, "
                "or drop --num-experts"
            )
        return layers


EXPERT_FIELDS = frozenset(each.name for each in fields(ExpertSettings)) - {each.name for each in fields(ModelSizes)}
"""Fields about experts."""


def check_experts(settings: ExpertSettings) -> None:
    """Check the rules between the settings of experts.

    Raises:
        ConfigError: naming the value and the rule.
    """
    experts, top_k = settings.num_experts, settings.moe_router_topk
    if experts is None:
        return
    if top_k > experts:
        raise ConfigError(f"--moe-router-topk {top_k} is more than --num-experts {experts}: give {experts} or less")
    groups, kept = settings.moe_router_num_groups, settings.moe_router_group_topk
    if groups is not None:
        _check_groups(experts, top_k, groups, kept)
    softmax = settings.moe_router_score_function == "softmax"
    if settings.moe_router_pre_softmax and not softmax:
        raise ConfigError(
            "--moe-router-pre-softmax is for scores by softmax, and --moe-router-score-function is sigmoid: drop one "
            "of them"
        )
    if top_k == 1 and softmax and not settings.moe_router_pre_softmax:
        raise ConfigError(
            "--moe-router-topk 1 with a softmax over the chosen expert gives the weight 1, which no router learns "
            "from: add --moe-router-pre-softmax"
        )
    balancing, coefficient = settings.moe_router_load_balancing_type, settings.moe_aux_loss_coeff
    if balancing == "none" and coefficient:
        raise ConfigError(
            f"--moe-aux-loss-coeff {coefficient:g} has no effect with --moe-router-load-balancing-type none, which has "
            "no loss: drop one of them"
        )


def _check_groups(experts: int, top_k: int, groups: int, kept: int | None) -> None:
    if kept is None:
        raise ConfigError(
            f"--moe-router-num-groups {groups} needs a number of groups to choose in: add --moe-router-group-topk"
        )
    if experts % groups:
        raise ConfigError(f"--moe-router-num-groups {groups} does not divide --num-experts {experts}: give a divisor")
    if kept > groups:
        raise ConfigError(
            f"--moe-router-group-topk {kept} is more than --moe-router-num-groups {groups}: give {groups} or less"
        )
    if top_k % kept or top_k // kept > experts // groups:
        raise ConfigError(
            f"--moe-router-topk {top_k} experts cannot be chosen in --moe-router-group-topk {kept} groups with "
            f"as many in each, because a group has {experts // groups} of --num-experts {experts}: change one of them"
        )
