"""Settings of data, tokenizer, checkpoints, reports and the launcher."""

from typing import Any

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.conversion import Conversion, Effect

LAUNCHER = {
    "hostfile": ("--hostfile", None),
    "include": ("--include", None),
    "exclude": ("--exclude", None),
    "num_nodes": ("--num_nodes", -1),
    "num_gpus": ("--num_gpus", None),
    "master_addr": ("--master_addr", None),
    "master_port": ("--master_port", 29500),
    "launcher": ("--launcher", "pdsh"),
}
"""Flag of the launcher for each setting, and the value that needs none."""


def convert_data(conversion: Conversion) -> None:
    """Convert what is read."""
    path = conversion.take("data_path")
    split = str(conversion.take("split", "969, 30, 1")).replace(" ", "")
    if path is not None:
        conversion.flag("--data-path", path)
        conversion.flag("--split", split)
    for part in ("train", "valid", "test"):
        paths, weights = conversion.take(f"{part}_data_paths", []), conversion.take(f"{part}_data_weights")
        paths = [paths] if isinstance(paths, str) else paths
        weights = [1.0] * len(paths) if weights is None else weights
        if len(weights) != len(paths):
            raise ConfigError(
                f"{part}_data_weights has {len(weights)} entries and {part}_data_paths {len(paths)}: give one for each"
            )
        pairs = [word for pair in zip(weights, paths, strict=True) for word in pair]
        if paths:
            conversion.flag(f"--{part}-data-path", *(pairs if len(paths) > 1 else paths))


def convert_tokenizer(conversion: Conversion) -> None:
    """Convert the tokenizer; NeoX names its file `vocab_file`, whatever it is."""
    kind = conversion.take("tokenizer_type", "GPT2BPETokenizer")
    vocabulary, merges = conversion.take("vocab_file"), conversion.take("merge_file")
    if kind == "GPT2BPETokenizer":
        files = {"--vocab-file": vocabulary, "--merge-file": merges}
    elif kind in ("HFTokenizer", "SPMTokenizer"):
        files = {"--tokenizer-model": vocabulary}
    else:
        reason = f"{kind} is not here: tokenize the data anew, with another"
        conversion.note("tokenizer_type", Effect.CHANGES, reason)
        return
    conversion.flag("--tokenizer-type", kind)
    for flag, name in files.items():
        if name is not None:
            conversion.flag(flag, name)


def convert_checkpoints(conversion: Conversion) -> None:
    """Convert when checkpoints are saved."""
    interval, scale = conversion.count("checkpoint_factor"), conversion.take("checkpoint_scale", "linear")
    kept = conversion.count("keep_last_n_checkpoints")
    older = conversion.count("save_interval")
    saves = conversion.settings.get("save") is not None
    if scale != "linear":
        reason = "checkpoints are saved every --save-interval, which grows by no factor"
        conversion.note("checkpoint_scale", Effect.NONE, reason)
    elif saves and (interval or older):
        conversion.flag("--save-interval", interval or older)
    if saves and kept:
        conversion.flag("--keep-last-n-checkpoints", kept)
    if conversion.settings.get("load") is not None:
        conversion.note("load", Effect.NONE, "checkpoints of NeoX itself cannot be loaded; those of this trainer can")


def convert_reports(conversion: Conversion) -> None:
    """Convert Weights & Biases."""
    project, name = conversion.take("wandb_project", "neox"), conversion.take("wandb_run_name")
    if conversion.take("use_wandb", False):
        conversion.flag("--wandb-project", project)
        if name is not None:
            conversion.flag("--wandb-exp-name", name)


def convert_launch(conversion: Conversion) -> None:
    """Convert how processes are started."""
    for key, (flag, needless) in LAUNCHER.items():
        value = conversion.take(key)
        if value is not None and value != needless:
            conversion.launcher.append((flag, str(value)))
    comment = conversion.take("comment")
    if comment is not None:
        conversion.launcher.append(("--launcher_args", f"--comment={comment}"))
    for key in ("force_multi", "no_ssh_check"):
        if conversion.take(key, False):
            conversion.launcher.append((f"--{key}",))
    for key, launcher in (("deepspeed_slurm", "slurm"), ("deepspeed_mpi", "openmpi")):
        if conversion.take(key, False) and conversion.settings.get("launcher") is None:
            conversion.launcher.append(("--launcher", launcher))


def convert_extra(conversion: Conversion) -> None:
    """Note the settings that NeoX hands to DeepSpeed unseen."""
    extra: dict[str, Any] = conversion.section("deepspeed_extra_args")
    for name in extra:
        reason = "it can stand in a file for --deepspeed-config, which says if it is not for this trainer"
        conversion.note(f"deepspeed_extra_args.{name}", Effect.NEAR, reason)
