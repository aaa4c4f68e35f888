"""Input files of the search as plain objects: JSON, or YAML by the ending of the name."""

from pathlib import Path
from typing import Any

from megatron_terapipe.config.json_files import parse_json
from megatron_terapipe.errors import ConfigError

YAML_ENDINGS = (".yaml", ".yml")


def read_document(path: str) -> object:
    """Read a JSON or YAML file.

    Raises:
        ConfigError: if it cannot be read, or is not what its name says.
    """
    return parse_text(read_text(path), path)


def read_text(path: str) -> str:
    """Read a text file.

    Raises:
        ConfigError: if it cannot be read, or is not text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give a file that can") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not text ({error}): mend the file") from None


def parse_text(text: str, path: str) -> object:
    """Parse the text of a JSON or YAML file, by the ending of its name."""
    return parse_yaml(text, path) if path.lower().endswith(YAML_ENDINGS) else parse_json(text, path)


def parse_yaml(text: str, path: str) -> object:
    """Parse YAML.

    Raises:
        ConfigError: if it is not YAML, or has a key twice.
    """
    import yaml

    class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
        """PyYAML keeps the last of two equal keys and says nothing."""

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        pairs = [(loader.construct_object(key, deep=True), value) for key, value in node.value]
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} stands twice", problem_mark=node.start_mark)
        return {key: loader.construct_object(value, deep=True) for key, value in pairs}

    UniqueKeys.add_constructor("tag:yaml.org,2002:map", mapping)
    try:
        return yaml.load(text, Loader=UniqueKeys)
    except (yaml.YAMLError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{path} is not YAML ({problem}{line}): mend it") from None
