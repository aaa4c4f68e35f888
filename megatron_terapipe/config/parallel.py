"""The section of parallelism: the layout of the work over ranks, and its order in time."""

from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Literal

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.layout import METHODS, ParallelLayout, StagePartition
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.options import check, one_of, option, resolve
from megatron_terapipe.errors import ConfigError, errors_in

AUTO = "auto"
"""Token slices, or the layers of stages, that are found for a run once its number of ranks is known; until then no
sequence is cut."""

BALANCED, BY_DOCUMENTS = "balanced", "balanced-by-documents"
"""Token slices of equal work: for one document in each sequence; for the documents of each micro-batch."""

MOST_RANKS = 1_000_000
"""Ranks of a run at most: several times as many as the largest machines have devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Parallelism: world size = data x sequence x tensor x pipeline parallel size; token slices need no ranks."""

    tensor_model_parallel_size: int = option(1, aliases=("--model-parallel-size",), least=1, most=10_000)
    """Ranks that share the matrices of each layer."""

    sequence_parallel: bool = False
    """Give each tensor-parallel rank its part of every token slice between the matrices. This needs less memory and the
    same traffic."""

    ds_sequence_parallel_size: int = option(1, aliases=("--context-parallel-size",), least=1, most=10_000)
    """Sequence-parallel ranks: each has its part of every token slice between the matrices, and attends with its part
    of the heads to all tokens, as DeepSpeed-Ulysses does. This needs less memory, and exchanges tokens for heads around
    attention. They are not the ranks of `--sequence-parallel`, which share matrices."""

    pipeline_model_parallel_size: int = option(
        1, aliases=("--pipe-parallel-size",), also={"--no-pipeline-parallel": 1}, least=1, most=10_000
    )
    """Ranks of the pipeline, each with its part of the layers."""

    num_model_chunks: int = option(
        derived="by --num-layers-per-virtual-pipeline-stage, else 1",
        aliases=("--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size"),
        least=1,
        most=10_000,
    )
    """Stages (model chunks) that each pipeline rank owns. More model chunks make stages smaller and bubbles shorter,
    but need more messages and keep more activations."""

    model_chunk_placement: Literal["looped", "v", "auto"] = "looped"
    """Which stages a rank owns if it owns several: with `looped` stage i is on rank i mod P of P ranks; with `v` the
    stages fold back, so that the first rank also has the last stage. `v` is for `--pipeline-schedule optimised` and
    schedules from files. `auto`, with `optimised` and `--token-slices auto`, finds the one with which the step is
    shorter."""

    expert_model_parallel_size: int = option(1, least=1, most=10_000)
    """Ranks that share the experts of each layer, each with as many of them. They are data-, sequence- and
    tensor-parallel ranks of the same stage, and add none to the world size: each computes its experts for the tokens of
    all of them."""

    data_parallel_size: int | None = option(None, least=1, most=MOST_RANKS)
    """Ranks that share the batch. They follow from the world size. If given, the number is checked against it."""

    vocabulary_stages: bool = False
    """Give each pipeline rank one more stage, with its part of the output layer's vocabulary, and not the last rank the
    whole of it (arXiv 2411.05288). The weights of embedding and output layer must be untied."""

    no_overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks after the last op, instead of layer by layer while it runs."""

    overlap_param_gather: bool = False
    """Under ZeRO 1, and in bf16, gather the weights that other data-parallel ranks updated while the next forward
    runs."""

    num_token_slices: int = option(
        derived="as many as --token-slices lists or finds, else 1", aliases=("--pipe-sp-splits",), least=1, most=16_384
    )
    """Token slices that every sequence is split into. They pass through the pipeline one after the other."""

    token_slices: str | None = option(
        None,
        metavar="LENGTHS",
        also={"--pipe-sp-strategy": {"average": None, "uniform_comp": "balanced"}},
    )
    """Lengths of the token slices, such as 704,688,656. `balanced` gives each the same work, forward and backward,
    counted in FLOPs. `balanced-by-documents` does so for each micro-batch by its documents, which
    `--reset-attention-mask` keeps apart, with lengths from a small set. `auto` finds the lengths with which a step is
    predicted to be shortest on `--cluster`, and, without `--num-token-slices`, their number. Default: as equal as
    possible."""

    pipeline_schedule: str = option(
        derived="optimised with vocabulary stages, interleaved with model chunks, else 1f1b",
        metavar="SCHEDULE",
        also={"--enable-zbh1-pipeline": "zero-bubble"},
    )
    """Order in which a rank runs forwards and backwards: `gpipe`; `1f1b`; `interleaved`, which is 1f1b for model
    chunks; `zero-bubble`, which defers weight gradients until a rank would be idle; `breadth-first`, which runs all
    micro-batches on one stage before the rank goes on to its next; `optimised`, which is found for this model, these
    token slices, this batch and `--cluster` before the run starts; or a file of ops, as `terapipe plan`
    writes one."""

    schedule_memory_limit: float | None = option(None, metavar="A", most=1e9)
    """Activations that `--pipeline-schedule optimised` may keep on a rank, in units of one whole micro-batch on that
    rank. Default: as many as `1f1b` keeps with one stage on each rank."""

    cluster: str | None = option(None, metavar="FILE")
    """Cluster for which `--strategy auto`, `--token-slices auto` and `--pipeline-schedule optimised` find answers: a
    cluster file as `terapipe search` reads it, or a hostfile, whose devices are assumed to be
    A100-SXM4-80GB. Default: nodes of eight A100-SXM4-80GB, on any machine."""

    op_profile: str | None = option(None, metavar="FILE")
    """Profile with the times of ops and messages for these answers, as `terapipe search measure`
    writes it. Default: times computed from data sheets."""

    op_calibration: str | None = option(None, metavar="FILE")
    """Trials of this cluster (.jsonl), or constants fitted to them, for these answers; as the search's `--calibrate`
    and `--calibration` read them."""

    stage_partition: str = option(
        "uniform",
        metavar="PARTITION",
        aliases=("--pp-partition-method",),
        spellings={"type:transformer": "uniform"},
    )
    """Which layers are on which stage. The number of stages is ranks x model chunks. `uniform` gives each stage the
    same number of layers, `parameters` the same number of parameters. `auto`, with `--token-slices auto`, finds the
    layers that make the step short, for example where the output layer is expensive. 0,5,12 gives layers 0 to 4 to the
    first stage and 5 to 11 to the second; a JSON file may hold that list. Only transformer layers count: the embedding
    belongs to the first stage, the final norm and the output layer to the last; with 0,0,5,12,12 each of these has a
    stage of its own."""

    strategy: str | None = option(None, metavar="FILE")
    """Read the parallelism and the batch sizes from a strategy file, as the search writes it. `auto` searches before
    the run starts, as `terapipe search rank` does, and keeps the values of other flags."""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library. Default: the one for the accelerator."""

    distributed_timeout_minutes: float = option(30.0, least=0.1, most=1e6)
    """Longest time in minutes for which a rank waits for another. If the run stalls for so long, one line names the
    rank that the others wait for, and all processes end with exit code 75. It must be longer than any work of a single
    rank, such as compiling or writing its part of a checkpoint."""

    local_rank: int | None = option(None, least=0, most=65_535)
    """Rank on this machine. The launcher sets it."""

    def __post_init__(self) -> None:
        check(self)
        if self.vocabulary_stages and self.pipeline_model_parallel_size == 1:
            # One rank has no other to share with.
            object.__setattr__(self, "vocabulary_stages", False)
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            # Scripts set it whatever the size; one rank has no other to share with.
            object.__setattr__(self, "sequence_parallel", False)
        self._resolve_token_slices()
        resolve(self, "num_model_chunks", 1)
        self._resolve_schedule()
        self.stage_bounds()
        if self.stage_partition == AUTO and self.token_slices != AUTO:
            raise ConfigError(
                "--stage-partition auto is found together with the token slices: add --token-slices auto, or give a "
                "list"
            )

    @property
    def num_stages(self) -> int:
        """Stages with transformer layers: as many as pipeline ranks, unless each owns several."""
        return self.pipeline_model_parallel_size * self.num_model_chunks

    @property
    def vocabulary_parts(self) -> int:
        """Pipeline layers that share the output layer: one, or with vocabulary stages one for each pipeline rank."""
        return self.pipeline_model_parallel_size if self.vocabulary_stages else 1

    def pipeline(self, num_micro_batches: int = 1) -> PipelineShape:
        """Extent of the pipeline, with so many micro-batches."""
        return PipelineShape(
            self.num_stages + self.vocabulary_stages * self.vocabulary_parts,
            num_micro_batches,
            self.num_token_slices or 1,
            self.num_model_chunks + self.vocabulary_stages,
            self.placements[0],
        )

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements of model chunks to choose from: one, unless it is to be found."""
        return tuple(Placement) if self.model_chunk_placement == AUTO else (Placement(self.model_chunk_placement),)

    def _resolve_schedule(self) -> None:
        usual = "interleaved" if self.num_model_chunks > 1 else "1f1b"
        resolve(self, "pipeline_schedule", OPTIMISED if self.vocabulary_stages else usual)
        name = self.pipeline_schedule
        placement = self.model_chunk_placement
        if placement != "looped" and self.num_model_chunks == 1:
            raise ConfigError(
                f"--model-chunk-placement {placement} deals several stages to each rank: add --num-model-chunks 2, or "
                "drop it"
            )
        if placement == AUTO and (name != OPTIMISED or self.token_slices != AUTO):
            raise ConfigError(
                "--model-chunk-placement auto is found together with the token slices: add --token-slices auto "
                f"--pipeline-schedule {OPTIMISED}, or choose looped or v"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        name, limit = self.pipeline_schedule, self.schedule_memory_limit
        if limit is not None and limit < 1:
            raise ConfigError(
                f"--schedule-memory-limit {limit} is less than one micro-batch, which has to go forward before it can "
                "go backward: give 1 or more"
            )
        if limit is not None and name != OPTIMISED:
            raise ConfigError(
                f"--schedule-memory-limit {limit} goes with --pipeline-schedule {OPTIMISED}, not with {name}: drop it"
            )
        if name in SCHEDULES:
            with errors_in(f"--pipeline-schedule {name}"):
                # A schedule raises an error for pipelines that it is not for.
                next(SCHEDULES[name](self.pipeline(), 0), None)
        elif name != OPTIMISED and not Path(name).is_file():
            raise ConfigError(
                f"--pipeline-schedule {name} is neither a schedule nor a file of one: choose "
                f"{one_of([*SCHEDULES, OPTIMISED])}, or name a file"
            )

    def _resolve_token_slices(self) -> None:
        if self.token_slices == AUTO:
            self._check_auto()
            return
        if self.token_slices in (BALANCED, BY_DOCUMENTS):
            if self.num_token_slices is None:
                raise ConfigError(f"--token-slices {self.token_slices} needs their number: add --num-token-slices")
        elif self.token_slices is not None:
            num_lengths = len(self.listed_token_slices() or ())
            resolve(self, "num_token_slices", num_lengths)
            if self.num_token_slices != num_lengths:
                raise ConfigError(
                    f"--num-token-slices {self.num_token_slices} contradicts --token-slices "
                    f"{self.token_slices}, which lists {num_lengths}: drop the former"
                )
        resolve(self, "num_token_slices", 1)

    def _check_auto(self) -> None:
        if self.pipeline_schedule is not None and self.pipeline_schedule not in (*SCHEDULES, OPTIMISED):
            raise ConfigError(
                f"--token-slices auto does not go with --pipeline-schedule {self.pipeline_schedule}, a file for one "
                f"number of token slices: give their lengths, or choose {one_of([*SCHEDULES, OPTIMISED])}"
            )

    def listed_token_slices(self) -> TokenSlices | None:
        """Return the token slices that `--token-slices` lists; None if it lists none."""
        if self.token_slices in (None, BALANCED, BY_DOCUMENTS, AUTO):
            return None
        try:
            return TokenSlices.parse(self.token_slices)
        except PlanError as error:
            words = one_of([BALANCED, BY_DOCUMENTS, AUTO])
            raise ConfigError(f"--token-slices: {error}, or give {words} in their place") from None

    def uniform_stages(self, num_layers: int) -> StagePartition:
        """Return the partition with as equal numbers of layers as possible."""
        return StagePartition.uniform(num_layers, self.num_stages)

    def stage_bounds(self) -> StagePartition | None:
        """Return the transformer layers of each stage; None if a rule deals them."""
        if self.stage_partition in (*METHODS, AUTO):
            return None
        if self.stage_partition.startswith("type:"):
            raise ConfigError(
                f"--stage-partition {self.stage_partition}: only transformer layers are dealt out, as by "
                "type:transformer: use uniform, and --decoder-first-pipeline-num-layers or "
                "--decoder-last-pipeline-num-layers where embedding and output layer are expensive"
            )
        with errors_in("--stage-partition"):
            bounds = StagePartition.parse(self.stage_partition)
        if bounds.num_stages != self.num_stages:
            times = f" x --num-model-chunks {self.num_model_chunks}" if self.num_model_chunks > 1 else ""
            raise ConfigError(
                f"--stage-partition {bounds} has {bounds.num_stages} stages, but --pipeline-model-parallel-size is "
                f"{self.pipeline_model_parallel_size}{times}: give {self.num_stages + 1} bounds, the first layer of "
                "each stage and the end"
            )
        return bounds

    @property
    def least_world_size(self) -> int:
        """Ranks that the sizes need, with as few replicas as they allow where --data-parallel-size is not given."""
        experts, sharing = self.expert_model_parallel_size, self.ranks_of_a_replica // self.pipeline_model_parallel_size
        return self.ranks_of_a_replica * (self.data_parallel_size or experts // gcd(experts, sharing))

    @property
    def ranks_of_a_replica(self) -> int:
        """Ranks that work on the same sequences."""
        return self.ds_sequence_parallel_size * self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    def layout(self, world_size: int) -> ParallelLayout:
        """Return the layout of the parallel axes over the ranks."""
        if world_size > MOST_RANKS:
            raise ConfigError(
                f"{world_size} ranks are more than the {MOST_RANKS:,} that a run can have: lower "
                "--data-parallel-size, --ds-sequence-parallel-size, --tensor-model-parallel-size or "
                "--pipeline-model-parallel-size"
            )
        with errors_in(""):
            layout = ParallelLayout.for_world_size(
                world_size,
                sequence_parallel_size=self.ds_sequence_parallel_size,
                tensor_parallel_size=self.tensor_model_parallel_size,
                pipeline_parallel_size=self.pipeline_model_parallel_size,
                num_token_slices=self.num_token_slices or 1,
                expert_parallel_size=self.expert_model_parallel_size,
            )
        if self.data_parallel_size not in (None, layout.data_parallel_size):
            needed = layout.world_size // layout.data_parallel_size * self.data_parallel_size
            raise ConfigError(
                f"--data-parallel-size {self.data_parallel_size} contradicts the {world_size} processes "
                f"launched, which leave {layout.data_parallel_size}: launch {needed} processes"
            )
        return layout
