"""Reading the JSON files that flags name."""

import json
from pathlib import Path

from megatron_terapipe.errors import ConfigError


def read_json(path: str, flag: str) -> object:
    """Read a JSON file.

    Args:
        path: the file.
        flag: flag that named it, for the error.

    Raises:
        ConfigError: if it cannot be read, is not JSON, or has a key twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read ({error.strerror}): give a file that can") from None
    except ValueError as error:
        raise ConfigError(f"{flag} {path} is not text ({error}): mend the file") from None
    return parse_json(text, f"{flag} {path}")


def parse_json(text: str, described: str) -> object:
    """Parse JSON text.

    Args:
        text: the text.
        described: where it stands, for the error.

    Raises:
        ConfigError: if it is not JSON, or has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise ConfigError(f"{described} is not JSON ({error}): mend it") from None


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {repeated!r} stands twice")
    return document
