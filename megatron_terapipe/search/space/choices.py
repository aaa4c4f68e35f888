"""The values of each dimension that the search tries: all that make sense, or those that the user pins."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning.pipeline_plan import COUNTS
from megatron_terapipe.search.space.problem import Problem

SOLVED = "solved"
"""The stage partition that balances the predicted time of stages; in a strategy it is a list of bounds."""

MODEL_CHUNKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Model chunks that are tried. With more, a stage has few layers, and launches and transfers are most of its time."""

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Values of each dimension, in the order in which ties are broken.

    Attributes:
        data_parallel_size: None = whatever the other two leave over.
        tensor_parallel_size: sizes.
        pipeline_parallel_size: sizes.
        num_model_chunks: stages of each pipeline rank.
        micro_batch_size: sequences.
        num_token_slices: numbers of token slices; their lengths are as equal as can be until finalists are refined.
        token_slices: lengths that the user pins; `num_token_slices` then has their number alone.
        schedule: names.
        recompute: modes.
        zero_stage: ZeRO stages.
        sequence_parallel: off, on.
        stage_partition: rules, `solved`, or bounds.
    """

    data_parallel_size: tuple[int, ...] | None
    tensor_parallel_size: tuple[int, ...]
    pipeline_parallel_size: tuple[int, ...]
    num_model_chunks: tuple[int, ...]
    micro_batch_size: tuple[int, ...]
    num_token_slices: tuple[int, ...]
    schedule: tuple[str, ...]
    recompute: tuple[str, ...]
    zero_stage: tuple[int, ...]
    sequence_parallel: tuple[bool, ...]
    stage_partition: tuple[str | tuple[int, ...], ...]
    token_slices: tuple[int, ...] | None = None

    @property
    def orders(self) -> tuple[tuple[str, int], ...]:
        """Pairs of a schedule and a number of model chunks."""
        return tuple((schedule, model_chunks) for schedule in self.schedule for model_chunks in self.num_model_chunks)

    @property
    def per_layout(self) -> int:
        """Strategies of one layout of the ranks."""
        axes = (
            self.orders,
            self.stage_partition,
            self.micro_batch_size,
            self.num_token_slices,
            self.recompute,
            self.sequence_parallel,
            self.zero_stage,
        )
        size = 1
        for axis in axes:
            size *= len(axis)
        return size

    def pinned(self, pins: Mapping[str, tuple[Any, ...]]) -> "Choices":
        """These choices but for what the user pins.

        Args:
            pins: values by the name of the dimension; `token_slices` holds the lengths.

        Raises:
            ConfigError: if `token_slices` and `num_token_slices` contradict each other.
        """
        assert pins.keys() <= {each.name for each in fields(self)}, pins
        lengths = pins.get("token_slices")
        if lengths is None:
            return replace(self, **pins)
        if pins.get("num_token_slices", (len(lengths),)) != (len(lengths),):
            raise ConfigError(
                f"--num-token-slices {','.join(map(str, pins['num_token_slices']))} contradicts --token-slices, which "
                f"lists {len(lengths)}: drop the former"
            )
        return replace(self, **{**pins, "num_token_slices": (len(lengths),)})


def all_choices(problem: Problem) -> Choices:
    """All values that are tried where nothing is pinned."""
    workload = problem.workload
    sizes = _divisors(problem.cluster.num_devices)
    counts = tuple(count for count in COUNTS if count <= workload.seq_length) if workload.can_cut_tokens else (1,)
    return Choices(
        data_parallel_size=None,
        tensor_parallel_size=sizes,
        pipeline_parallel_size=sizes,
        num_model_chunks=MODEL_CHUNKS,
        micro_batch_size=_divisors(problem.global_batch_size),
        num_token_slices=counts,
        schedule=("1f1b", "interleaved", "zero-bubble", "gpipe"),
        recompute=RECOMPUTE,
        zero_stage=(1, 0),
        sequence_parallel=(False, True),
        stage_partition=("uniform", "parameters", SOLVED),
    )


def _divisors(number: int) -> tuple[int, ...]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))
