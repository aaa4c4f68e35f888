"""Reading the JSON files that flags name."""

import json

from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.errors import ConfigError


def read_json(path: str, flag: str) -> object:
    """Read a JSON file.

    Args:
        path: the file.
        flag: flag that named it, for the error.

    Raises:
        UserError: if it cannot be read, is not JSON, or has a key twice.
    """
    return parse_json(read_text(path, flag), f"{flag} {path}")


def parse_json(text: str, described: str) -> object:
    """Parse JSON text.

    Args:
        text: the text.
        described: its place, for the error.

    Raises:
        ConfigError: if it is not JSON, is nested too deeply, or has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{described} is not JSON ({error}): mend it") from None


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {repeated!r} stands twice")
    return document
