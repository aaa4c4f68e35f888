"""Configurations of GPT-NeoX: every YAML file of a model."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.migration_survey.attempts import Attempt
from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.neox.convert import convert
from megatron_terapipe.neox.settings_files import read_settings

TRAINING = "llama/train_config.yml"
"""File with the optimizer, the batch and the length of the training, for models whose files have none."""

PLACES = "local_setup.yml"
"""File with the places of data, tokenizer and checkpoints."""


def attempts(checkout: Path, folder: Path) -> Iterator[Attempt]:
    """Yield every model, with the settings that its file leaves open from NeoX's own files for these.

    The number of processes is that of one replica of the model.
    """
    configs = checkout / "configs"
    training, places = (_settings_of(configs / name) for name in (TRAINING, PLACES))
    for path in sorted(configs.rglob("*.yml")):
        name = str(path.relative_to(configs))
        try:
            model = read_settings([str(path)])
            if "num_layers" not in model:
                continue
            settings = {**places, **({} if "train_iters" in model else training), **model}
            words = tuple(convert(settings, _ranks(settings)).words())
        except UserError as error:
            yield Attempt(origin="GPT-NeoX, models", name=name, directory=folder, refusal=str(error))
        else:
            yield Attempt(origin="GPT-NeoX, models", name=name, directory=folder, words=words)


def _settings_of(path: Path) -> dict[str, Any]:
    return read_settings([str(path)]) if path.exists() else {}


def _ranks(settings: Mapping[str, Any]) -> int:
    """Return the ranks of one replica; NeoX takes 0 for 1."""
    return max(1, settings.get("pipe_parallel_size") or 1) * max(1, settings.get("model_parallel_size") or 1)
