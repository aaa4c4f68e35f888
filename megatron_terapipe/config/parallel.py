"""The section that says how the work is laid out: over ranks, and over time."""

from dataclasses import dataclass
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
    """Ranks that share each layer. Only 1 in this version."""

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

    stage_partition: str = option("uniform", metavar="PARTITION", aliases=("--pp-partition-method",))
    """How layers are dealt to stages: `uniform` deals the same number to each, `parameters` the same number of
    parameters; 0,5,12 gives layers 0 to 4 to the first stage and 5 to 11 to the second, and a JSON file may hold
    that list. Only transformer layers count; the embedding belongs to the first stage, the final norm and the
    output layer to the last."""

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
            "distributed_timeout_minutes",
        )
        if self.tensor_model_parallel_size != 1:
            raise ConfigError(
                f"--tensor-model-parallel-size {self.tensor_model_parallel_size}: tensor parallelism "
                "comes with a later version: set it to 1, and cut the model with "
                "--pipeline-model-parallel-size"
            )
        if self.no_pipeline_parallel and self.pipeline_model_parallel_size != 1:
            raise ConfigError(
                "--no-pipeline-parallel contradicts --pipeline-model-parallel-size "
                f"{self.pipeline_model_parallel_size}: drop one of them"
            )
        self._resolve_token_slices()
        self.stage_bounds()

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

    def stage_bounds(self) -> StagePartition | None:
        """Return the transformer layers of each stage; None if a rule deals them.

        Raises:
            ConfigError: if the bounds do not give every stage a layer.
        """
        if self.stage_partition in METHODS:
            return None
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
