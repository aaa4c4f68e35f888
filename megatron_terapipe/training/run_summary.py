"""The summary of a run before training: the first lines of its log, and the output of `--dry-run`."""

from itertools import pairwise
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.plan.programs.lowering import Proof
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES, interleaved
from deepspeed_ext.runtime.launch import LaunchEnvironment
from deepspeed_ext.runtime.topology import ExpertParallelRanks, SequenceParallelRanks
from megatron_terapipe.checkpoint.directories import latest_checkpoint
from megatron_terapipe.config import Config
from megatron_terapipe.config.flops import model_parameters
from megatron_terapipe.errors import CheckpointError, first_line
from megatron_terapipe.model.gpt import ModelRanks
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from megatron_terapipe.planning import machine_in_words
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.training.auto_plan import absent_files, without_files
from megatron_terapipe.training.own_layers import check_layers_of, layers_in_words, partition_of
from megatron_terapipe.training.run import Run, prepare
from megatron_terapipe.training.trained_model import TrainedModel

START = "start"
"""Row of the weights with which a run starts."""

_MOST_STAGES_LISTED = 8
"""Most stages with their layers listed one by one."""


def rows_of_run(run: Run) -> dict[str, str]:
    """Return the model, layout, schedule and start of a prepared run, by the name of the row."""
    layout, parallel, pipeline = run.layout, run.config.parallel, run.pipeline
    batch, model = run.config.batch, run.config.model
    lengths = ", ".join(map(str, run.config.token_slices().lengths)) + " tokens"
    cuts = run.config.document_cuts()
    if cuts is not None:
        lengths = f"{cuts.lengths[0]} to {cuts.lengths[-1]} tokens, by the documents of each micro-batch"
    found = f", found for {machine_in_words(run.config)}"
    sequence = f"{layout.sequence_parallel_size} sequence x " * (layout.sequence_parallel_size > 1)
    experts = f", {layout.expert_parallel_size} expert parallel" * (layout.expert_parallel_size > 1)
    varies = len(run.batch_sizes.steps) > 1
    offload = ", copies in host memory" * run.config.training.offload_token_slices
    parameters = f"{model_parameters(model):,} parameters in {model.num_layers} transformer layers of width "
    return {
        "model": f"{parameters}{model.hidden_size}" if run.trained.is_gpt else f"the layers of {run.trained.program}",
        "ranks": f"{layout.world_size} = {layout.data_parallel_size} data x {sequence}"
        f"{layout.tensor_parallel_size} tensor x "
        f"{layout.pipeline_parallel_size} pipeline parallel"
        + (", sequence parallel" * parallel.sequence_parallel)
        + experts,
        "stages": _stages(run),
        **_experts(run),
        "token slices": f"{pipeline.num_token_slices} of {lengths}{found * ('token_slices' in run.found)}",
        "schedule": f"{parallel.pipeline_schedule}, {_number(pipeline.num_micro_batches, 'micro-batch', 'es')} of "
        f"{_number(batch.micro_batch_size, 'sequence')} on each replica{' at most' * varies}"
        f"{found * (parallel.pipeline_schedule == OPTIMISED)}{_same_as_1f1b(run)}",
        "batch": f"{_batches(run)}, {run.train_iters} iterations{_evaluations(run)}",
        "precision": f"{run.config.precision.dtype}, ZeRO {run.config.optimizer.zero_stage}, recompute "
        f"{run.config.training.recompute_granularity}{offload}",
        START: _start(run),
    }


def table(rows: dict[str, str]) -> list[str]:
    """Return rows as lines, with aligned texts."""
    width = max(map(len, rows))
    return [f"  {name:<{width}}  {text}" for name, text in rows.items()]


def start_of_log(run: Run) -> list[str]:
    """Return the first lines of the log of a run."""
    return ["this run", *table(rows_of_run(run)), *warnings_of_run(run)]


def warnings_of_run(run: Run) -> list[str]:
    """Return warnings: few tokens of experts, other checkpoint directories, other tokenizers, nothing to train."""
    config, lines = run.config.checkpoint, []
    if get_accelerator().device_name() != "cpu" or run.config.training.dry_run:
        few = Strategy.of_config(run.config, run.layout.data_parallel_size).few_tokens(run.config.model)
        lines += [] if few is None else [f"warning: {few}"]
    if config.load is not None and run.checkpoint is None and not _same(config.load, config.save):
        lines.append(
            f"warning: --load {config.load} has no checkpoint, and training starts from new weights: correct the path "
            "if that is wrong; --exit-on-missing-checkpoint makes it an error"
        )
    if config.save is not None and (run.checkpoint is None or not _same(run.checkpoint[0].parent, config.save)):
        there = _saved_before(config.save)
        if there is not None:
            lines.append(
                f"warning: --save {config.save} has {there.name} of an earlier run, which this run does not load "
                f"but may replace it: add --load {config.save} to resume, or save to another directory"
            )
    if run.checkpoint is not None:
        if config.save is not None and (left := run.model_files[1]):
            lines.append(f"warning: checkpoints and exports will not have {', '.join(left)} of {run.checkpoint[0]}")
        then, now = run.checkpoint[1].tokenizer.get("tokenizer_type"), run.tokenizer_settings.tokenizer_type
        if then is not None and then != now:
            lines.append(
                f"warning: the checkpoint was trained with --tokenizer-type {then}, this run has {now}: the same ids "
                "may mean other tokens"
            )
        if run.start.iteration and (changed := run.checkpoint[1].changed_schedule(run.compared_flags)):
            lines.append(f"warning: the checkpoint was trained with {changed}: the flags of this run are used")
    tokens, known = run.config.model.vocab_size or 0, run.tokenizer.vocab_size
    if tokens >= 2 * known and not run.config.data.mock_data:
        lines.append(
            f"warning: the data has the {known} tokens of --tokenizer-type {run.tokenizer.name}, and the model "
            f"{tokens} (--vocab-size): most of them are never trained; give the tokenizer of the model if it has one"
        )
    if run.start.iteration >= run.train_iters and not run.config.training.skip_train:
        lines.append(
            f"no iterations to train: {run.start.iteration} of {run.train_iters} are done; raise --train-iters"
        )
    return lines


def _experts(run: Run) -> dict[str, str]:
    """Return the row of experts, with the waits of hosts for exchanges; empty without experts."""
    model, ranks = run.config.model, run.layout.expert_parallel_size
    if model.num_experts is None:
        return {}
    number = sum(model.layers_of_experts(model.num_layers))
    text = f"{model.num_experts}, {model.moe_router_topk} for each token, in {_number(number, 'layer')}"
    schedule = run.proven_schedule
    waits = Proof(False, schedule.messages_under_ops).waits(schedule.device.exchange)
    return {"experts": text if waits is None else f"{text}; on {ranks} expert-parallel ranks by {waits}"}


def _number(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{plural * (number != 1)}"


def _batches(run: Run) -> str:
    """Return the global batch sizes: each step, or the first and the last of many."""
    steps = run.batch_sizes.steps
    words = [f"{size} from sample {first:,}" for (_, before), (first, size) in pairwise(steps) if size != before]
    if len(words) >= _MOST_STAGES_LISTED:
        words = [f"in {len(words)} steps to {words[-1]}"]
    return ", ".join((f"{steps[0][1]} sequences of {run.config.model.seq_length} tokens", *words))


def _evaluations(run: Run) -> str:
    """Return the batch of evaluations, where it differs from the batch of training."""
    batch, (rows, number) = run.config.batch, run.evaluation_batch
    if batch.eval_global_batch_size is None and batch.eval_micro_batch_size is None:
        return ""
    return f"; evaluations of {rows * number * run.layout.data_parallel_size} in micro-batches of {rows}"


def _same_as_1f1b(run: Run) -> str:
    """Return a note on an interleaved schedule with one stage on each rank; empty for others."""
    parallel, ranks = run.config.parallel, run.layout.pipeline_parallel_size
    if (
        SCHEDULES.get(parallel.pipeline_schedule or "") is not interleaved
        or parallel.num_model_chunks > 1
        or ranks == 1
    ):
        return ""
    return "; with one stage on each rank it is 1f1b: add --num-model-chunks 2"


def _start(run: Run) -> str:
    if run.checkpoint is None:
        return "new weights"
    directory, info = run.checkpoint
    if run.start.iteration:
        return f"after iteration {run.start.iteration}, from {directory}"
    return f"iteration 0, with the weights of {directory}" + f" (iteration {info.iteration})" * (info.iteration > 0)


def _same(one: str | Path, other: str | Path | None) -> bool:
    return other is not None and Path(one).resolve() == Path(other).resolve()


def _saved_before(save: str) -> Path | None:
    try:
        return latest_checkpoint(save)
    except CheckpointError:
        return None


def _stages(run: Run) -> str:
    parallel, num_layers = run.config.parallel, run.config.model.num_layers
    several = f", {parallel.num_model_chunks} on each pipeline rank" if parallel.num_model_chunks > 1 else ""
    several += " in a V" * (parallel.model_chunk_placement == "v")
    if not run.trained.is_gpt:  # Dealt once the layers exist.
        return f"{parallel.num_stages}{several}"
    if parallel.stage_partition == "parameters":
        dealt = "as many parameters for each"
    else:
        partition = parallel.stage_bounds() or parallel.uniform_stages(num_layers)
        dealt = _layers(partition.bounds)
    vocabulary = f", and {parallel.vocabulary_parts} with a part of the vocabulary each" * parallel.vocabulary_stages
    return f"{parallel.num_stages}{several}: {dealt}{vocabulary}"


def _layers(bounds: tuple[int, ...]) -> str:
    """Return the transformer layers of each stage: many equal stages as one number, others one by one."""
    numbers = [end - first for first, end in pairwise(bounds)]
    if len(numbers) > _MOST_STAGES_LISTED and len(set(numbers)) == 1:
        return f"{numbers[0]} transformer layers each"
    each = (range(first, end) for first, end in pairwise(bounds))
    spans = (f"{span[0]}-{span[-1]}" if span[1:] else f"{span[0]}" if span else "none" for span in each)
    return "transformer layers " + ", ".join(spans)


def dry_run(config: Config, launch: LaunchEnvironment, trained: TrainedModel | None = None) -> list[str]:
    """Return the lines of a dry run after all its checks; `trained` as in `prepare`."""
    unchecked = ["devices", "hosts"]
    if trained is not None and trained.datasets is not None:
        unchecked.append(f"data of {trained.program}")
    if not config.training.dry_run_without_files:
        run = prepare(config, launch, trained=trained)
        return [*_lines(_rows_of_dry_run(run, unchecked), unchecked), *warnings_of_run(run)]
    run = prepare(without_files(config), launch, trained=trained)
    # The weights at the start are those of checkpoints, which are not read.
    rows = {name: text for name, text in _rows_of_dry_run(run, unchecked).items() if name != START}
    return _lines(rows, [*unchecked, *absent_files(config)])


def _rows_of_dry_run(run: Run, unchecked: list[str]) -> dict[str, str]:
    """Return the rows of a run, with the stages of a program's layers, unless these need the groups of their ranks."""
    rows, trained = rows_of_run(run), run.trained
    if trained.is_gpt:
        return rows
    parallel, tensor = run.config.parallel, run.layout.tensor_parallel_size
    ranks = ModelRanks(
        TensorParallelRanks(0, tensor, None, parallel.sequence_parallel),
        ExpertParallelRanks(0, run.layout.expert_parallel_size),
        SequenceParallelRanks(0, run.layout.sequence_parallel_size),
    )
    try:
        with torch.device("meta"):
            layers = trained.layers(run.config, ranks)
    except Exception as error:  # Of code that is not ours.
        unchecked.append(f"layers of {trained.program} ({first_line(error)})")
        return rows
    check_layers_of(layers, trained.program)
    partition = partition_of(layers, parallel, run.config.model.num_layers, trained.program)
    bounds = (0, len(layers)) if isinstance(partition, str) else partition.bounds
    return rows | {"stages": f"{rows['stages']}: {layers_in_words(layers, bounds)}"}


def _lines(rows: dict[str, str], unchecked: list[str]) -> list[str]:
    rows = rows | {"not checked here": ", ".join(unchecked)}
    return ["dry run: every check passed, and nothing was started", *table(rows)]
