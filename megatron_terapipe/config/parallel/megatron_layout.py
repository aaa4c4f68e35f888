"""Megatron's text for the layers of each stage, `--pipeline-model-parallel-layout`, read as a stage partition.

Et*3|(tt|)*6t|L      stages are divided by |
E  t t t | t t | ... | L      E embedding, t transformer layer, L loss; x*3 is xxx, (x)*3 too; commas mean nothing
"""

import re
from itertools import accumulate

from deepspeed_ext.plan.partition import StagePartition
from megatron_terapipe.config.fields.options import flag
from megatron_terapipe.errors import ConfigError

LAYOUT = "pipeline_model_parallel_layout"
"""Field of the configuration."""

FLAG = flag(LAYOUT)

MOST_LAYERS = 10_000
"""Symbols of a text once repetitions are written out."""

_REPEATED = re.compile(r"(?:\(([^()*]*)\)|([^()*|]))\*([0-9]{1,5})")


def layout_stages(text: str, num_ranks: int) -> tuple[StagePartition, int]:
    """Return the transformer layers of each stage, and the number of model chunks.

    Args:
        num_ranks: pipeline ranks. Stage i belongs to rank i mod `num_ranks`, as in Megatron.

    Raises:
        ConfigError: if it is no such text, or has stages that this trainer cannot make.
    """
    stages = _written_out(text).split("|")
    if unknown := sorted({*"".join(stages)} - {*"EtL"}):
        about = (
            "for multi-token prediction, which models here do not have" if "m" in unknown else "not among E, t and L"
        )
        raise ConfigError(f"{FLAG} {text}: {unknown[0]} is {about}: write another layout")
    first, last = stages[0], stages[-1]
    whole = "".join(stages)
    if not (first.startswith("E") and last.endswith("L") and whole.count("E") == whole.count("L") == 1):
        raise ConfigError(f"{FLAG} {text} does not begin with its one E and end with its one L: write Et|t|tL")
    numbers = [stage.count("t") for stage in stages]
    if 0 in numbers:
        raise ConfigError(
            f"{FLAG} {text}: stage {numbers.index(0)} has no transformer layer, and here each stage has one; the "
            "embedding belongs to the first, the output layer to the last: give that stage a t"
        )
    if len(stages) % num_ranks:
        raise ConfigError(
            f"{FLAG} {text} has {len(stages)} stages, not a multiple of --pipeline-model-parallel-size {num_ranks}: "
            "change one of them"
        )
    return StagePartition(tuple(accumulate(numbers, initial=0))), len(stages) // num_ranks


def _written_out(text: str) -> str:
    """Return the text without commas and repetitions.

    Raises:
        ConfigError: if it is longer than models are, or a repetition cannot be read.
    """
    written = "".join(text.replace(",", "").split())
    while match := _REPEATED.search(written):
        grouped, single, number = match.groups()
        repeated = grouped if grouped is not None else single
        if len(written) + len(repeated) * int(number) > MOST_LAYERS:
            raise ConfigError(f"{FLAG} {text[:80]} has more than {MOST_LAYERS:,} symbols: write fewer")
        written = f"{written[: match.start()]}{repeated * int(number)}{written[match.end() :]}"
    if re.search(r"[()*]", written):
        raise ConfigError(f"{FLAG} {text}: a repetition is written x*3 or (xy)*3: change it")
    return written
