"""What of a run waits in the memory of the host: its bytes, and how fast devices copy them there and back."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from megatron_terapipe.config import Config, flops
from megatron_terapipe.config.block_shape import BlockShape
from megatron_terapipe.errors import ConfigError

if TYPE_CHECKING:  # It loads numpy, and not every run copies anything.
    from megatron_terapipe.search.cost.cost_model import CostModel

SUMS_BYTES = 4 + 4 + 8
"""Of a token between two stages of the vocabulary: two sums in fp32, and the label."""

SHARE_OF_HOST = 0.8
"""Of the memory of a host, for copies; the rest is for data, checkpoints on their way, and the system."""


def host_copies_of(config: Config, cost_model: "CostModel") -> HostCopySettings:
    """Return the settings of a run with `--offload-token-slices`, for a timeline in seconds.

    Args:
        config: the configuration, its token slices and stages known.
        cost_model: prices the ops of the run, and knows its cluster.

    Raises:
        ConfigError: if the stages are not known.
    """
    parallel, model = config.parallel, config.model
    if parallel.stage_partition == "parameters":
        raise ConfigError(
            "--offload-token-slices plans copies by the layers of each stage, and --stage-partition parameters deals "
            "them when the model is built: give a list, or uniform"
        )
    blocks = parallel.stage_bounds() or parallel.uniform_stages(model.num_layers)
    element, rows = cost_model.element_bytes, config.batch.micro_batch_size
    sharing = parallel.ds_sequence_parallel_size
    sharing *= parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    stage_input = rows * flops.stage_input_bytes_per_token(model, element) / sharing
    of_stages = [[model.blocks[layer] for layer in blocks.layers(stage)] for stage in range(blocks.num_stages)]
    inputs = [0.0, *(stage_input for _ in of_stages[1:])]  # the first reads tokens
    if parallel.vocabulary_stages:
        later = stage_input + rows * SUMS_BYTES / parallel.ds_sequence_parallel_size
        inputs += [stage_input, *(later for _ in range(1, parallel.vocabulary_parts))]
        of_stages += [[] for _ in range(parallel.vocabulary_parts)]
    nodes, efficiency = cost_model.cluster.nodes, cost_model.efficiency.host_efficiency
    bandwidth = efficiency * min(node.host.bandwidth for node in nodes)
    return HostCopySettings(
        lengths=config.token_slices().lengths,
        input_bytes=tuple(inputs),
        key_value_bytes=tuple(
            rows * sum(_key_value_bytes(config, block, element) for block in of_stage) for of_stage in of_stages
        ),
        to_host=bandwidth,
        from_host=bandwidth,
        host_bytes=SHARE_OF_HOST * min(node.host.memory_bytes / node.num_devices for node in nodes),
        # How many token slices a window reaches depends on their lengths, which differ where documents cut them.
        windows=() if config.document_cuts() else tuple(_widest_window(of_stage) for of_stage in of_stages),
    )


def _key_value_bytes(config: Config, block: BlockShape, element_bytes: int) -> float:
    """Bytes of the keys and values of a token on one rank; a head is on several ranks where these are more."""
    heads, parallel = block.num_key_value_heads, config.parallel
    sharing = parallel.tensor_model_parallel_size * parallel.ds_sequence_parallel_size
    return flops.key_value_bytes_per_token(config.model, block, element_bytes) / min(sharing, heads or 1)


def _widest_window(blocks: Sequence[BlockShape]) -> int | None:
    """The widest sliding window of a stage's layers; None where one attends to all tokens before it."""
    windows = [block.window for block in blocks if block.num_key_value_heads]
    return None if None in windows else max((window for window in windows if window is not None), default=None)
