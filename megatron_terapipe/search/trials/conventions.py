"""What published tables leave to the reader: names of schedules, how stages count layers, their trainers' defaults."""

import re
from dataclasses import dataclass, replace

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.workload import Workload

VOCAB_SIZE = 50257
"""Tokens of GPT-2's vocabulary, which published trials without a vocabulary size used; padded like the trainer's."""

DEFAULTS = {"recompute": "none", "zero_stage": 0, "num_token_slices": 1}
"""Fields of a strategy that a trial may leave out, where the trainer's own default would be another: the tables are
of plain Megatron."""


PUBLISHED_PRECISION = "fp16"
"""Of trials that do not say: published tables of Megatron are of fp16."""

PRECISION_BY_SECTION = (
    # "From now on the testing is happening with BF16 optimizer", says the section of that day
    # (github.com/bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, "Rebalancing layers").
    ("tr11 chronicles-prequel", re.compile(r"_02-28_|_03-\d\d_"), "bf16"),
)
"""Text in the source, pattern in the group, and the precision that the section around the table states."""


def published_precision(source: str, group: str) -> str:
    """Precision of a trial that does not say, from what its publication says around the table."""
    for text, pattern, precision in PRECISION_BY_SECTION:
        if text in source and pattern.search(group):
            return precision
    return PUBLISHED_PRECISION


@dataclass(frozen=True, slots=True)
class PublishedSchedule:
    """A schedule by the name that its authors gave it.

    Attributes:
        schedule: of the plan.
        activation_limit: activations that it may hold on a rank, as a multiple of 1F1B's peak; None = its own.
        one_layer_model_chunks: whether a model chunk is one layer where the table names no number of model chunks.
    """

    schedule: str
    activation_limit: float | None = None
    one_layer_model_chunks: bool = False


PUBLISHED_SCHEDULES = {
    # Qi et al. 2024 (arXiv 2401.10241) section 5: 1p and 2p are limits of memory, as multiples of 1F1B's; its
    # interleaved baseline has "the maximum number of chunks", one layer each.
    "ZB-1p": PublishedSchedule("zero-bubble", 1.0),
    "ZB-2p": PublishedSchedule("zero-bubble", 2.0),
    "ZB-H1": PublishedSchedule("zero-bubble", 1.0),
    "ZB-H2": PublishedSchedule("zero-bubble", 2.0),
    "1F1B": PublishedSchedule("1f1b"),
    "1F1B-I": PublishedSchedule("interleaved", one_layer_model_chunks=True),
    "GPipe": PublishedSchedule("gpipe"),
}
"""By their names in tables. Any other name is one of the plan's."""


def counting_ends(workload: Workload) -> Workload:
    """The same model where a stage partition also counts the embedding and the head, as a layer each.

    DeepSpeed's `type:transformer|embedding` and the models of Qi et al. deal layers so. The last norm stands between
    the layers and the head, and is dealt with the head.
    """
    return replace(workload, first_dealt=0, end_dealt=len(workload.layers))


def partition_counting_ends(workload: Workload, layers_per_stage: list[int]) -> tuple[int, ...]:
    """Bounds, in the layers of `counting_ends`, of stages that count the embedding and the head as a layer each.

    Args:
        workload: any GPT.
        layers_per_stage: layers of each stage.

    Raises:
        ConfigError: if they are not all the layers, or a stage has none.
    """
    counted = workload.num_dealt_layers + 2
    if sum(layers_per_stage) != counted or min(layers_per_stage) < 1:
        raise ConfigError(
            f"layers_per_stage_counting_embedding_and_head {layers_per_stage} adds up to {sum(layers_per_stage)}, "
            f"not {counted}, or has a stage without: count num_layers, one for the embedding and one for the head"
        )
    bounds = [sum(layers_per_stage[:end]) for end in range(len(layers_per_stage) + 1)]
    return (*bounds[:-1], len(workload.layers))


def layers_counting_ends(num_layers: int, num_stages: int) -> list[int] | None:
    """Layers of each stage where transformer layers do not divide among the stages, but with both ends they do.

    Published models that were sized so (BLOOM: 70 + 2 layers on 12 stages; Qi et al.: 22 + 2 on 8) were dealt so.
    """
    if num_layers % num_stages and (num_layers + 2) % num_stages == 0:
        return [(num_layers + 2) // num_stages] * num_stages
    return None
