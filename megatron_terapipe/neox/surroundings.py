"""Settings of data, tokenizer, checkpoints, reports and the launcher."""

import shlex

from megatron_terapipe.config.fields.host_names import check_host_name
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.conversion import Conversion, as_number

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
        single = conversion.take(f"{part}_data_paths")
        paths = [single] if isinstance(single, str) else conversion.several(f"{part}_data_paths")
        weights = conversion.several(f"{part}_data_weights") or [1.0] * len(paths)
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
        conversion.refuse(f"tokenizer_type {kind}", "it is not here", "tokenize the data with another")
        return
    conversion.flag("--tokenizer-type", kind)
    for flag, name in files.items():
        if name is not None:
            conversion.flag(flag, name)


def convert_checkpoints(conversion: Conversion) -> None:
    """Convert when checkpoints are saved.

    Raises:
        ConfigError: if the iterations are no numbers that iterations have.
    """
    factor, scale = conversion.number("checkpoint_factor"), conversion.take("checkpoint_scale", "linear")
    extra = {_iteration(each) for each in conversion.several("extra_save_iters")}
    kept = conversion.count("keep_last_n_checkpoints")
    older = conversion.count("save_interval")
    if conversion.settings.get("save") is not None:
        if scale == "log" and factor:
            extra |= powers(factor, conversion.count("train_iters") or 0)
        elif factor or older:
            conversion.flag("--save-interval", _iteration(factor) if factor else older)
        if extra:
            conversion.flag("--extra-save-iterations", *sorted(extra))
        if kept:
            conversion.flag("--keep-last-n-checkpoints", kept)
    if conversion.settings.get("load") is not None:
        reason = (
            "it takes checkpoints of this trainer, and in Hugging Face's format, to which NeoX's tools convert its own"
        )
        conversion.remark("load", reason)


def powers(factor: float, last: int) -> set[int]:
    """Return the iterations before the last one that `checkpoint_scale: log` saves: whole powers of a factor.

    Args:
        factor: what each is multiplied by to give the next.
        last: the last iteration, which is saved in any case.

    Raises:
        ConfigError: if the powers do not grow.
    """
    if factor <= 1:
        raise ConfigError(f"checkpoint_factor {factor} does not grow with checkpoint_scale log: give more than 1")
    found, step = set(), factor
    while step < last:
        if step == int(step):
            found.add(int(step))
        step *= factor
    return found


def _iteration(value: object) -> int:
    number = as_number("extra_save_iters or checkpoint_factor", value)
    if number is None or number != int(number) or number < 0:
        raise ConfigError(f"extra_save_iters or checkpoint_factor {value} is no number of iterations: give whole ones")
    return int(number)


def convert_reports(conversion: Conversion) -> None:
    """Convert Weights & Biases, and profiles."""
    project, name = conversion.take("wandb_project", "neox"), conversion.take("wandb_run_name")
    if conversion.take("use_wandb", False):
        conversion.flag("--wandb-project", project)
        if name is not None:
            conversion.flag("--wandb-exp-name", name)
    begin, end = conversion.count("profile_step_start", 10), conversion.count("profile_step_stop", 12)
    if conversion.take("profile", False):
        conversion.flag("--profile")
        conversion.flag("--profile-step-start", begin)
        conversion.flag("--profile-step-end", end)


def convert_launch(conversion: Conversion) -> None:
    """Convert how processes are started.

    Raises:
        ConfigError: if the first host has no host name, which the shells of all hosts would read.
    """
    first_host = conversion.take("master_addr")
    if first_host is not None:
        check_host_name(str(first_host), "master_addr")
    for key, (flag, needless) in LAUNCHER.items():
        value = conversion.take(key)
        if value is not None and value != needless:
            conversion.launcher.append((flag, str(value)))
    comment = conversion.take("comment")
    if comment is not None:
        # DeepSpeed splits this into words as a shell does: a comment of several must come out as one.
        conversion.launcher.append(("--launcher_args", shlex.quote(f"--comment={comment}")))
    for key in ("force_multi", "no_ssh_check"):
        if conversion.take(key, False):
            conversion.launcher.append((f"--{key}",))
    for key, launcher in (("deepspeed_slurm", "slurm"), ("deepspeed_mpi", "openmpi")):
        if conversion.take(key, False) and conversion.settings.get("launcher") is None:
            conversion.launcher.append(("--launcher", launcher))
