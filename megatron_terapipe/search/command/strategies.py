"""Strategies in files: one, or one a line."""

import json
from collections.abc import Mapping
from pathlib import Path

from megatron_terapipe.config.json_files import read_json
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.strategy import Strategy


def read_one_strategy(path: str) -> Strategy:
    """Read a strategy file, or an entry of a ranking, which has one under `strategy`.

    Raises:
        ConfigError: if it cannot be read, or is no strategy.
    """
    try:
        return _strategy(read_json(path, "STRATEGY.json"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_strategies(path: str) -> list[Strategy]:
    """Read a file with a strategy on each line; or one strategy, or a list of them, over as many lines as it takes.

    Empty lines are nothing. So the files that `rank` writes can be read, `strategy.json` and `ranking.json`.

    Raises:
        ConfigError: if it cannot be read, or a line is no strategy; it names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--strategies {path} cannot be read ({error.strerror}): give a file that can") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--strategies {path} is not text ({error}): give JSON lines") from None
    whole = _whole(text)
    if whole is not None:
        return _strategies_of(whole, path)
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(_strategy(json.loads(line)))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} line {number} is not JSON ({error}): write one object a line") from None
        except ConfigError as error:
            raise ConfigError(f"{path} line {number}: {error}") from None
    if not found:
        raise ConfigError(f"--strategies {path} holds no strategy: write one JSON object a line")
    return found


def _whole(text: str) -> object:
    """The document, if the text is one over several lines; None if it is a document a line."""
    if text.lstrip()[:1] not in ("{", "[") or len(text.strip().splitlines()) == 1:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _strategies_of(document: object, path: str) -> list[Strategy]:
    if not isinstance(document, list):
        document = [document]
    found = []
    for number, each in enumerate(document, start=1):
        try:
            found.append(_strategy(each))
        except ConfigError as error:
            raise ConfigError(f"{path} entry {number}: {error}") from None
    if not found:
        raise ConfigError(f"--strategies {path} holds no strategy: write one JSON object a line")
    return found


def _strategy(document: object) -> Strategy:
    if isinstance(document, Mapping) and isinstance(document.get("strategy"), Mapping):
        document = document["strategy"]
    return Strategy.from_json(document)
