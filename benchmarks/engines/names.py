"""Names in the catalogue that tables and pictures know."""

from benchmarks.engines.results import Measured, Name

PLAIN = "plain torch"
DEEPSPEED = "DeepSpeed"
TORCH = "torch.distributed.pipelining"
OURS = "ours"
IN_ONE_THREAD = Name(PLAIN, "one process, 1 thread")
IN_TWO_THREADS = Name(PLAIN, "one process, 2 threads")
PIPELINE_ENGINE = Name(DEEPSPEED, "PipelineEngine (1F1B)")


def ours_with(num_token_slices: int) -> str:
    """Return the name of our engine with so many token slices."""
    return OURS if num_token_slices == 1 else f"{OURS}, {num_token_slices} token slices"


def is_ours(each: Measured) -> bool:
    """Whether this is our engine, with token slices or without."""
    return each.engine.startswith(OURS)


def is_rival(each: Measured) -> bool:
    """Whether this is a pipeline of others."""
    return each.engine in (DEEPSPEED, TORCH)
