"""The names of the files of a checkpoint, most of them DeepSpeed's, and of directories beside it."""

LATEST = "latest"
"""File that holds the tag of the newest whole checkpoint."""

REPLACED = ".replaced"
"""Ends the name of a checkpoint while another takes its name."""

DAMAGED = ".damaged"
"""Ends the name of a checkpoint that was found damaged, and kept aside."""

BF16_PREFIX = "bf16_"
"""Begins the names of the optimizer's files in bf16."""


def _model_rank(stage: int, tensor_parallel_rank: int, tensor_parallel_size: int) -> str:
    """Number of a rank within one replica of the model, stage by stage."""
    return f"mp_rank_{stage * tensor_parallel_size + tensor_parallel_rank:02d}"


def state_file(stage: int, tensor_parallel_rank: int, tensor_parallel_size: int) -> str:
    """File of a rank's counters and, where the optimizer's state is not partitioned, of that state.

    Args:
        tensor_parallel_rank: the rank among those that share the stage.
    """
    return f"{_model_rank(stage, tensor_parallel_rank, tensor_parallel_size)}_model_states.pt"


def optimizer_files(
    stage: int, tensor_parallel_rank: int, tensor_parallel_size: int, data_parallel_size: int
) -> list[str]:
    """Files of a rank's partitioned optimizer state, one for each replica, without the prefix of bf16.

    Args:
        tensor_parallel_rank: the rank among those that share the stage.
    """
    rank = _model_rank(stage, tensor_parallel_rank, tensor_parallel_size)
    return [f"zero_pp_rank_{replica}_{rank}_optim_states.pt" for replica in range(data_parallel_size)]
