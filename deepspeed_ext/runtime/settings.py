"""DeepSpeed's configuration, read before DeepSpeed does: what has no value, no effect here, or a wrong one."""

from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any

from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

from deepspeed_ext.plan.errors import UserError

REFUSED = {
    "curriculum_learning": "give batches of growing length, and their token_slices to train_batch",
    "data_efficiency.data_sampling.curriculum_learning": "choose samples in your data loader",
    "data_efficiency.data_routing.random_ltd": "no layer leaves out tokens here",
    "progressive_layer_drop": "no layer is left out here",
}
"""Sections that say how to train and that this engine cannot follow, if they are `enabled`, with a remedy."""

WITHOUT_EFFECT = {
    "activation_checkpointing": "recompute with the module's activation_checkpoint_interval",
    "sparse_attention": "attention is the layers' own",
    "pipeline.stages": "the module's layout decides",
    "pipeline.partition": "the module's partition decides",
    "pipeline.seed_layers": "layers are always seeded",
    "pipeline.pipe_partitioned": "activations are not partitioned",
    "pipeline.grad_partitioned": "gradients are not partitioned",
    "pipeline.use_reentrant": "recomputation is not reentrant",
}
"""Sections and settings that change nothing, with what does."""

_FREE = ("pipeline", "autotuning")
"""Sections in which DeepSpeed itself has values `auto`."""


def read_settings(config: Mapping[str, Any] | str | Path | None, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration, known to have a value for every key.

    Args:
        config: the configuration, or its file; None if the keywords have it.
        keywords: others of `deepspeed.initialize`, among them perhaps `config_params`, or `args` with a
            `deepspeed_config`.

    Raises:
        UserError: if there is none, its file cannot be read, or it asks for what is not done here.
    """
    if config is None:
        config = keywords.get("config_params") or getattr(keywords.get("args"), "deepspeed_config", None)
    if config is None:
        raise UserError("initialize got no DeepSpeed configuration: give config, a dict or the path of a JSON file")
    if not isinstance(config, Mapping):
        try:
            config = load_ds_config(str(config))
        except (OSError, ValueError) as error:
            raise UserError(
                f"the DeepSpeed configuration {config} cannot be read ({str(error).splitlines()[0]}): give the path of "
                "a JSON file"
            ) from None
    settings = dict(config)
    open_keys = list(_open_keys(settings))
    if open_keys:
        raise UserError(
            f"the DeepSpeed configuration has the value 'auto' for {', '.join(open_keys)}, which only Hugging Face's "
            "Trainer fills in: give numbers"
        )
    if (shared := settings.get("sequence_parallel_size", 1)) != 1:
        raise UserError(
            f"the DeepSpeed configuration has sequence_parallel_size {shared}, by which its own engines share "
            "sequences: give the module layout=ParallelLayout(sequence_parallel_size=...) instead"
        )
    for section, remedy in REFUSED.items():
        found = _at(settings, section)
        if isinstance(found, Mapping) and found.get("enabled"):
            raise UserError(f"the DeepSpeed configuration enables {section}, which is not done here: {remedy}")
    return settings


def without_settings(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `deepspeed.initialize` without those that bring a configuration, to give another in their place."""
    left = {name: value for name, value in keywords.items() if name != "config_params"}
    if getattr(left.get("args"), "deepspeed_config", None) is not None:
        left["args"] = copy(left["args"])
        left["args"].deepspeed_config = None
    return left


def settings_without_effect(settings: Mapping[str, Any]) -> str | None:
    """A warning that lists the sections that are on and change nothing here; None if there are none."""
    found = ((name, remedy, _at(settings, name)) for name, remedy in WITHOUT_EFFECT.items())
    idle = [f"{name} ({remedy})" for name, remedy, value in found if value is not None and value is not False]
    return f"without effect in the DeepSpeed configuration: {', '.join(idle)}" if idle else None


def _at(settings: Mapping[str, Any], path: str) -> Any:
    found: Any = settings
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _open_keys(settings: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Keys of which the value is `auto`."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            if key not in _FREE:
                yield from _open_keys(value, f"{path}{key}.")
        elif value == "auto":
            yield f"{path}{key}"
