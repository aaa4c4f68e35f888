"""Costs of the ops of a run's pipeline in FLOPs; schedules and token slices are found with them.

The cost of an op on the tokens from `start` to `end`, in FLOPs of one sequence on one tensor-parallel rank, has three
terms, fixed + linear (end - start) + quadratic (end^2 - start^2):

    F     products of the stage's layers, attention of each token x to x + 1 positions; the head on the last stage
    BI    as many products; 2.5 times the attention, whose scores a flash kernel computes again
    BW    as many products, but for the head's, which BI computes: logits are not kept (docs/adr/0024)

Full recomputation adds F to BI, but for the head, which it leaves out; of the logits BI computes those again that are
more than may be alive. `fixed` makes each op cost as if its micro-batch
had `ROWS_LOST_PER_OP` rows more, and so short token slices cost more than their share.

These are proportions, not times. What is left out: the look-up of the embedding, norms and activations, which grow with
the products; the messages, which travel under the ops; and what differs from one device to another.
"""

from itertools import pairwise
from typing import NamedTuple

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.partition import StagePartition
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config import flops
from megatron_terapipe.config.config import Config

ROWS_LOST_PER_OP = 64
"""Rows that the products of an op lose, not measured but assumed: kernels compute tiles of 128 rows, and what is left
of the last one is on average half of it."""


class Terms(NamedTuple):
    """Cost of one kind of op on one stage, by where its token slice begins and ends."""

    fixed: float
    linear: float
    quadratic: float

    def cost(self, start: int, end: int) -> float:
        """Cost of the op of a token slice, in FLOPs of one sequence on one tensor-parallel rank.

        Args:
            start: first token of the token slice.
            end: token behind its last one.
        """
        return self.fixed + self.linear * (end - start) + self.quadratic * (end**2 - start**2)


class StageTerms(NamedTuple):
    """Costs of the ops of one stage."""

    forward: Terms
    input_gradient: Terms
    weight_gradient: Terms


def op_costs(config: Config, token_slices: TokenSlices | None = None) -> OpCosts:
    """Costs of the ops of a run, per stage and token slice.

    Args:
        config: the configuration.
        token_slices: lengths of the token slices; None for those of the configuration.
    """
    bounds = list((token_slices or config.token_slices()).bounds())
    kinds = zip(*stage_terms(config), strict=True)
    forward, backward, weight_gradient = (
        tuple(tuple(terms.cost(start, end) for start, end in bounds) for terms in stages) for stages in kinds
    )
    return OpCosts(forward, backward, weight_gradient)


def stage_terms(config: Config) -> list[StageTerms]:
    """Costs of the ops of each stage, for token slices of any length."""
    model, ranks = config.model, config.parallel.tensor_model_parallel_size
    lost = ROWS_LOST_PER_OP / config.batch.micro_batch_size
    recomputed = config.training.recompute_granularity == "full"
    num_logits = config.batch.micro_batch_size * model.seq_length * model.padded_vocab_size(ranks) / ranks
    found = []
    for stage, layers in enumerate(blocks_of_stages(config)):
        blocks = [model.blocks[layer] for layer in layers]
        products = sum(flops.linear_flops_per_token(model, block) for block in blocks) / ranks
        attention = sum(flops.attention_flops_per_position(model, block) for block in blocks) / ranks
        head = flops.logits_flops_per_token(model) / ranks if stage == config.parallel.num_stages - 1 else 0.0
        of_head = flops.BACKWARD_PER_FORWARD + flops.logits_computed_again(num_logits)

        def terms(products: float, attention: float) -> Terms:
            # 1 + 2 + .. + n = n / 2 + n^2 / 2.
            return Terms(products * lost, products + attention / 2, attention / 2)

        of_input = attention * (flops.FLASH_BACKWARD_PER_FORWARD + recomputed)
        found.append(
            StageTerms(
                terms(products + head, attention),
                terms(products * (1 + recomputed) + head * of_head, of_input),
                terms(products, 0.0),
            )
        )
    return found


def blocks_of_stages(config: Config) -> list[range]:
    """Transformer layers of each stage; of the rule `parameters`, as many as one tensor-parallel rank would deal."""
    parallel, model = config.parallel, config.model
    stages = range(parallel.num_stages)
    if parallel.stage_partition != "parameters":
        partition = parallel.stage_bounds() or parallel.uniform_stages(model.num_layers)
        return [partition.layers(stage) for stage in stages]
    words = model.padded_vocab_size() * model.hidden_size
    before = [words, flops.embedding_parameters(model) - words]
    blocks = [flops.block_parameters(model, block) for block in model.blocks]
    partition = StagePartition.balanced([*before, *blocks, flops.norm_parameters(model), words], parallel.num_stages)
    # A stage may hold nothing but an embedding or the head.
    bounds = [min(max(bound - len(before), 0), model.num_layers) for bound in partition.bounds]
    return [range(*pair) for pair in pairwise(bounds)]
