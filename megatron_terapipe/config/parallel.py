"""The section that says how the work is laid out: over ranks, and over time."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.partition import METHODS, StagePartition
from deepspeed_ext.plan.schedules import SCHEDULES
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.options import (
    check_choices,
    check_positive,
    option,
    resolve,
)
from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Parallelism: world size = data x tensor x pipeline parallel size; token slices need no ranks.

    Raises:
        ConfigError: if a size is not positive, a value not supported, or two fields contradict each other.
    """

    tensor_model_parallel_size: int = option(1, aliases=("--model-parallel-size",))
    """Ranks that share each layer's matrices."""

    sequence_parallel: bool = False
    """Between the matrices, give each tensor-parallel rank its part of every token slice: the same traffic, less
    memory."""

    pipeline_model_parallel_size: int = option(1, aliases=("--pipe-parallel-size",))
    """Stages of the pipeline, each on a rank of its own."""

    data_parallel_size: int | None = None
    """Ranks that share the batch. They follow from the world size; given, they are checked against it."""

    no_pipeline_parallel: bool = False
    """Say that there is no pipeline; the pipeline-parallel size must then be 1."""

    num_token_slices: int = option(
        derived="as many as --token-slices lists, else 1",
        aliases=("--pipe-sp-splits",),
    )
    """Token slices that every sequence is cut into. They flow through the pipeline one after the other."""

    token_slices: str | None = option(
        None,
        metavar="LENGTHS",
        translations={"--pipe-sp-strategy": {"average": None, "uniform_comp": "balanced"}},
    )
    """Lengths of the token slices, such as 704,688,656; `balanced` gives each the same work, forward and backward,
    counted in FLOPs. Left out, they are as equal as can be."""

    pipeline_schedule: str = option("1f1b", choices=tuple(SCHEDULES))
    """Order in which a stage runs its forwards and backwards."""

    stage_partition: str = option(
        "uniform",
        metavar="PARTITION",
        aliases=("--pp-partition-method",),
        spellings={"type:transformer": "uniform"},
    )
    """How layers are dealt to stages: `uniform` deals the same number to each, `parameters` the same number of
    parameters; 0,5,12 gives layers 0 to 4 to the first stage and 5 to 11 to the second, and a JSON file may hold
    that list. Only transformer layers count; the embedding belongs to the first stage, the final norm and the
    output layer to the last."""

    decoder_first_pipeline_num_layers: int | None = None
    """Transformer layers of the first stage, which also holds the embedding; the others share the rest evenly."""

    decoder_last_pipeline_num_layers: int | None = None
    """Transformer layers of the last stage, which also holds the output layer; the others share the rest evenly."""

    strategy: str | None = option(None, metavar="FILE")
    """Take the parallelism and the batch from a strategy file, as the search writes it."""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library. Left out, the one that suits the accelerator."""

    distributed_timeout_minutes: int = 30
    """Minutes to wait for another rank before giving up."""

    local_rank: int | None = None
    """Rank on this machine. The launcher sets it."""

    def __post_init__(self) -> None:
        """Fill in the number of token slices, then check."""
        check_choices(self)
        check_positive(
            self,
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "data_parallel_size",
            "num_token_slices",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "distributed_timeout_minutes",
        )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            # Scripts set it whatever the size; on one rank there is nothing to share.
            object.__setattr__(self, "sequence_parallel", False)
        if self.no_pipeline_parallel and self.pipeline_model_parallel_size != 1:
            raise ConfigError(
                "--no-pipeline-parallel contradicts --pipeline-model-parallel-size "
                f"{self.pipeline_model_parallel_size}: drop one of them"
            )
        self._resolve_token_slices()
        self._check_ends()
        self.stage_bounds()

    def _check_ends(self) -> None:
        ends = {
            "--decoder-first-pipeline-num-layers": self.decoder_first_pipeline_num_layers,
            "--decoder-last-pipeline-num-layers": self.decoder_last_pipeline_num_layers,
        }
        given = [f"{name} {number}" for name, number in ends.items() if number is not None]
        if given and self.stage_partition != "uniform":
            raise ConfigError(
                f"{given[0]} and --stage-partition {self.stage_partition} both deal layers to stages: drop one of them"
            )
        if len(given) > self.pipeline_model_parallel_size - 1:
            raise ConfigError(
                f"{' and '.join(given)} leave no other stage for the rest of the layers: raise "
                "--pipeline-model-parallel-size, or drop it"
            )

    def _resolve_token_slices(self) -> None:
        if self.token_slices == "auto":
            raise ConfigError("--token-slices auto comes with a later version: use --token-slices balanced")
        if self.token_slices == "balanced":
            if self.num_token_slices is None:
                raise ConfigError("--token-slices balanced does not say how many: add --num-token-slices")
        elif self.token_slices is not None:
            num_lengths = len(self.listed_token_slices() or ())
            resolve(self, "num_token_slices", num_lengths)
            if self.num_token_slices != num_lengths:
                raise ConfigError(
                    f"--num-token-slices {self.num_token_slices} contradicts --token-slices "
                    f"{self.token_slices}, which lists {num_lengths}: drop the former"
                )
        resolve(self, "num_token_slices", 1)

    def listed_token_slices(self) -> TokenSlices | None:
        """Return the token slices that `--token-slices` lists; None if it lists none.

        Raises:
            ConfigError: if it is not a list of positive whole numbers.
        """
        if self.token_slices is None or self.token_slices == "balanced":
            return None
        try:
            return TokenSlices.parse(self.token_slices)
        except PlanError as error:
            raise ConfigError(f"--token-slices: {error}") from None

    def uniform_stages(self, num_layers: int) -> StagePartition:
        """Return the transformer layers of each stage, as even as can be but for the ends that flags give.

        Raises:
            ConfigError: if the ends leave too few layers for the stages between.
        """
        first = [] if self.decoder_first_pipeline_num_layers is None else [self.decoder_first_pipeline_num_layers]
        last = [] if self.decoder_last_pipeline_num_layers is None else [self.decoder_last_pipeline_num_layers]
        num_between = self.pipeline_model_parallel_size - len(first) - len(last)
        rest = num_layers - sum(first) - sum(last)
        if rest < num_between:
            raise ConfigError(
                f"the first and last stage leave {max(rest, 0)} of {num_layers} layers for {num_between} stages: give "
                "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers fewer"
            )
        between = StagePartition.uniform(rest, num_between)
        sizes = [*first, *(len(between.layers(stage)) for stage in range(num_between)), *last]
        return StagePartition(tuple(accumulate(sizes, initial=0)))

    def stage_bounds(self) -> StagePartition | None:
        """Return the transformer layers of each stage; None if a rule deals them.

        Raises:
            ConfigError: if the bounds do not give every stage a layer.
        """
        if self.stage_partition in METHODS:
            return None
        if self.stage_partition.startswith("type:"):
            raise ConfigError(
                f"--stage-partition {self.stage_partition}: only transformer layers are dealt out, as by "
                "type:transformer: use uniform, beside it --decoder-first-pipeline-num-layers or "
                "--decoder-last-pipeline-num-layers where embedding and output layer weigh much"
            )
        try:
            bounds = StagePartition.parse(self.stage_partition)
        except PlanError as error:
            raise ConfigError(f"--stage-partition: {error}") from None
        num_stages = self.pipeline_model_parallel_size
        if bounds.num_stages != num_stages:
            raise ConfigError(
                f"--stage-partition {bounds} has {bounds.num_stages} stages, but --pipeline-model-parallel-size is "
                f"{num_stages}: give {num_stages + 1} bounds, the first layer of each stage and the end"
            )
        return bounds

    def layout(self, world_size: int) -> ParallelLayout:
        """Lay the parallel axes over the ranks.

        Raises:
            ConfigError: if the sizes do not multiply to `world_size`.
        """
        try:
            layout = ParallelLayout.for_world_size(
                world_size,
                tensor_parallel_size=self.tensor_model_parallel_size,
                pipeline_parallel_size=self.pipeline_model_parallel_size,
                num_token_slices=self.num_token_slices,
            )
        except PlanError as error:
            raise ConfigError(str(error)) from None
        if self.data_parallel_size not in (None, layout.data_parallel_size):
            needed = layout.world_size // layout.data_parallel_size * self.data_parallel_size
            raise ConfigError(
                f"--data-parallel-size {self.data_parallel_size} contradicts the {world_size} processes "
                f"launched, which leave {layout.data_parallel_size}: launch {needed} processes"
            )
        return layout
