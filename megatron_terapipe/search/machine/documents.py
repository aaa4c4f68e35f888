"""Input files of the search as plain objects, and the parts of errors about their values."""

from collections.abc import Iterable

from deepspeed_ext.plan.terminal import nearest
from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.config.parsing import parse_json, parse_yaml
from megatron_terapipe.errors import ConfigError

YAML_ENDINGS = (".yaml", ".yml")


def read_document(path: str) -> object:
    """Read a JSON or YAML file."""
    return parse_text(read_text(path), path)


def parse_text(text: str, path: str) -> object:
    """Parse the text of a JSON or YAML file, by the ending of its name."""
    if path.lower().endswith(YAML_ENDINGS):
        return parse_yaml(text, path)
    try:
        return parse_json(text, path)
    except ConfigError as error:
        if text.lstrip()[:1] in ("{", "["):
            raise
        raise ConfigError(f"{error}, or give YAML the ending .yaml") from None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the most similar known name, or all of them."""
    lowered = {each.lower(): each for each in known}
    found = nearest(name, lowered)
    return f"did you mean {lowered[found]}?" if found else f"choose among {', '.join(lowered.values())}"
