"""Reading NeoX's YAML files."""

from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from deepspeed_ext.plan.text.text_files import read_text
from megatron_terapipe.config.fields.yaml_files import parse_yaml
from megatron_terapipe.errors import ConfigError


def paths_of(names: Iterable[str], directory: str | None = None) -> list[str]:
    """Return the paths of configuration files, which may be named without `.yml`, as NeoX's launcher takes them."""
    named = (name if name.endswith((".yml", ".yaml", ".json")) else f"{name}.yml" for name in names)
    return [str(PurePath(directory or "", name)) for name in named]


def read_settings(paths: Iterable[str]) -> dict[str, Any]:
    """Read files and put them together, as NeoX does: dashes are underscores, and no key may stand twice.

    Raises:
        UserError: if a file cannot be read, is no YAML mapping, or a key stands twice.
    """
    settings: dict[str, Any] = {}
    came_from: dict[str, str] = {}
    for path in paths:
        document = parse_yaml(read_text(path), path)
        if not isinstance(document, dict):
            raise ConfigError(f"{path} is not a mapping of settings to values: write one")
        for key, value in document.items():
            name = str(key).replace("-", "_")
            if came_from.get(name) == path:
                raise ConfigError(f"{path} sets {name} twice: remove one")
            if name in settings:
                raise ConfigError(f"{path} sets {name}, and so does {came_from[name]}: remove it from one of them")
            settings[name], came_from[name] = value, path
    return settings
