"""A dry run: all checks of a run that need neither its devices nor its hosts, and the lines that it prints."""

from deepspeed_ext.runtime.launch.environment import LaunchEnvironment
from megatron_terapipe.config import Config
from megatron_terapipe.config.flops import model_parameters
from megatron_terapipe.config.parallel import OPTIMISED
from megatron_terapipe.planning.cost_model import machine_in_words
from megatron_terapipe.training.absent_files import absent_files, without_files
from megatron_terapipe.training.run import Run, prepare


def dry_run(config: Config, launch: LaunchEnvironment) -> list[str]:
    """Lines that say what would run, once every check has passed.

    Args:
        config: the configuration.
        launch: this process, and how many ranks the run has.

    Raises:
        UserError: if anything does not fit.
    """
    if not config.training.dry_run_without_files:
        return _lines(prepare(config, launch), ["devices", "hosts"])
    return _lines(prepare(without_files(config), launch), ["devices", "hosts", *absent_files(config)])


def _lines(run: Run, unchecked: list[str]) -> list[str]:
    """Say how a prepared run is laid out over ranks and over time."""
    layout, parallel, pipeline = run.layout, run.config.parallel, run.pipeline
    batch, model = run.config.batch, run.config.model
    lengths = ", ".join(map(str, run.config.token_slices().lengths)) + " tokens"
    cuts = run.config.document_cuts()
    if cuts is not None:
        lengths = f"{cuts.lengths[0]} to {cuts.lengths[-1]} tokens, by the documents of each micro-batch"
    found = f", found for {machine_in_words(run.config)}"
    sequence = f"{layout.sequence_parallel_size} sequence x " * (layout.sequence_parallel_size > 1)
    offload = ", copies in host memory" * run.config.training.offload_token_slices
    sequences = "sequence" if batch.micro_batch_size == 1 else "sequences"
    rows = {
        "model": f"{model_parameters(model):,} parameters in {model.num_layers} transformer layers of width "
        f"{model.hidden_size}",
        "ranks": f"{layout.world_size} = {layout.data_parallel_size} data x {sequence}"
        f"{layout.tensor_parallel_size} tensor x "
        f"{layout.pipeline_parallel_size} pipeline parallel" + (", sequence parallel" * parallel.sequence_parallel),
        "stages": _stages(run),
        "token slices": f"{pipeline.num_token_slices} of {lengths}{found * run.found_token_slices}",
        "schedule": f"{parallel.pipeline_schedule}, {pipeline.num_micro_batches} micro-batches of "
        f"{batch.micro_batch_size} {sequences} on each replica{found * (parallel.pipeline_schedule == OPTIMISED)}",
        "batch": f"{run.global_batch_size} sequences of {model.seq_length} tokens, {run.train_iters} iterations",
        "precision": f"{run.config.precision.dtype}, ZeRO {run.config.optimizer.zero_stage}, recompute "
        f"{run.config.training.recompute_granularity}{offload}",
        "not checked here": ", ".join(unchecked),
    }
    width = max(map(len, rows))
    return ["dry run: every check passed, and nothing was started", *(f"  {n:<{width}}  {t}" for n, t in rows.items())]


def _stages(run: Run) -> str:
    parallel, num_layers = run.config.parallel, run.config.model.num_layers
    several = f", {parallel.num_model_chunks} on each pipeline rank" if parallel.num_model_chunks > 1 else ""
    if parallel.stage_partition == "parameters":
        dealt = "as many parameters for each"
    else:
        bounds = parallel.stage_bounds() or parallel.uniform_stages(num_layers)
        dealt = f"transformer layers {bounds}"
    vocabulary = f", and {parallel.vocabulary_parts} with a part of the vocabulary each" * parallel.vocabulary_stages
    return f"{parallel.num_stages}{several}: {dealt}{vocabulary}"
