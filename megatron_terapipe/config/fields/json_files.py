"""Reading the JSON files that flags name."""

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.text import json_text
from deepspeed_ext.plan.text.text_files import read_text
from megatron_terapipe.errors import ConfigError


def read_json(path: str, flag: str, *, unbounded: bool = False) -> object:
    """Read a JSON file.

    Args:
        unbounded: whether whole numbers may have any size.

    Raises:
        UserError: if it cannot be read, is not JSON, or has a key twice.
    """
    return parse_json(read_text(path, flag), f"{flag} {path}".lstrip(), unbounded=unbounded)


def parse_json(text: str, described: str, *, infinite: bool = False, unbounded: bool = False) -> object:
    """Parse JSON text; see `deepspeed_ext.plan.text.json_text.parse_json`.

    Args:
        infinite: whether numbers may be infinite.
        unbounded: whether whole numbers may have any size.

    Raises:
        ConfigError: if it is not JSON, is nested too deeply, has a key twice, or a number that is not finite.
    """
    try:
        return json_text.parse_json(text, described, infinite=infinite, unbounded=unbounded)
    except PlanError as error:
        raise ConfigError(str(error)) from None
