"""Reading NeoX's YAML files."""

from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.errors import ConfigError


def paths_of(names: Iterable[str], directory: str | None = None) -> list[str]:
    """Return the paths of configuration files, which may be named without `.yml`, as NeoX's launcher takes them.

    Args:
        names: names of the files.
        directory: what they are relative to.
    """
    named = (name if name.endswith((".yml", ".yaml", ".json")) else f"{name}.yml" for name in names)
    return [str(PurePath(directory or "", name)) for name in named]


def read_settings(paths: Iterable[str]) -> dict[str, Any]:
    """Read files and put them together, as NeoX does: dashes are underscores, and no key may stand twice.

    Raises:
        UserError: if a file cannot be read, is no YAML mapping, or a key stands twice.
    """
    try:
        import yaml
    except ImportError:
        raise ConfigError("NeoX's files are YAML, and the package for it is missing: pip install pyyaml") from None

    settings: dict[str, Any] = {}
    came_from: dict[str, str] = {}
    for path in paths:
        text = read_text(path)
        try:
            tree, document = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:
            # YAML's errors have many lines; the last says where.
            reason = " ".join(str(error).split())
            raise ConfigError(f"{path} is not YAML ({reason}): mend the file") from None
        _check_keys(tree, path)
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


def _check_keys(node: Any, path: str) -> None:
    """Look for keys that stand twice, which YAML's loader lets pass."""
    if node is None or isinstance(node.value, str):
        return
    children = [part for pair in node.value for part in pair] if node.id == "mapping" else node.value
    names = [key.value for key, _ in node.value if isinstance(key.value, str)] if node.id == "mapping" else []
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path} sets {name} twice: remove one")
    for child in children:
        _check_keys(child, path)
