"""Host copies as pictures show them: a lane to the host and one back below the ops of each rank."""

from typing import NamedTuple

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.copy_lanes import TimedCopy
from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.plan.timeline import Timeline

LANES = ("to host", "from host")
"""Names of the lanes."""

_LETTERS = {Content.INPUT: "I", Content.KEYS_AND_VALUES: "K"}


class DrawnCopy(NamedTuple):
    """A copy in one direction."""

    copy: TimedCopy
    start: float
    end: float

    def label(self, shape: PipelineShape) -> str:
        """Name of it within its row: `K0.1` are keys and values, `I0.1` is a stage input, `2K0.1` that of stage 2."""
        stage = f"{self.copy.stage}" if shape.num_model_chunks > 1 else ""
        return f"{stage}{self.letter}{self.copy.micro_batch}.{self.copy.token_slice}"

    @property
    def letter(self) -> str:
        """Of what is copied."""
        return _LETTERS[self.copy.content]

    def words(self, lane: int) -> str:
        """What is copied, in words.

        Args:
            lane: 0 to the host, 1 back.
        """
        _, stage, micro_batch, token_slice, *_ = self.copy
        what = f"{self.copy.content.value} of token slice {token_slice} of micro-batch {micro_batch} on stage {stage}"
        return f"{what} {LANES[lane]}"


def copies_of(timeline: Timeline, rank: int) -> tuple[list[DrawnCopy], list[DrawnCopy]]:
    """Return the copies of a rank to the host, and those back, each in the order in which they run."""
    own = [copy for copy in timeline.host_copies if timeline.shape.rank_of(copy.stage) == rank]
    there = [DrawnCopy(copy, copy.offload_start, copy.offload_end) for copy in own]
    back = [DrawnCopy(copy, copy.fetch_start, copy.fetch_end) for copy in own]
    return sorted(there, key=lambda drawn: drawn.start), sorted(back, key=lambda drawn: drawn.start)
