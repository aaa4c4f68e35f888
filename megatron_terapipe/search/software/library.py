"""All descriptions by name, and descriptions that users write."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.inputs.documents import read_document, short, suggestion
from megatron_terapipe.search.inputs.entries import fault, place
from megatron_terapipe.search.software.deepspeed import DEEPSPEED
from megatron_terapipe.search.software.deepspeed_eager import DEEPSPEED_EAGER
from megatron_terapipe.search.software.description import Software
from megatron_terapipe.search.software.fsdp import FSDP
from megatron_terapipe.search.software.llm_foundry import LLM_FOUNDRY
from megatron_terapipe.search.software.megatron_core import MEGATRON_CORE
from megatron_terapipe.search.software.megatron_lm import MEGATRON_LM
from megatron_terapipe.search.software.terapipe import TERAPIPE

SOFTWARE: Mapping[str, Software] = MappingProxyType(
    {each.name: each for each in (TERAPIPE, MEGATRON_LM, DEEPSPEED, DEEPSPEED_EAGER, MEGATRON_CORE, FSDP, LLM_FOUNDRY)}
)
"""By name."""

LIKE = "like"
"""Field of a file: the name of the description that it changes."""


def find_software(name: str) -> Software:
    """Return a description by its name, or from a JSON or YAML file.

    A file names the description that it is `like`, and what differs: `{"like": "megatron-core", "name": "ours",
    "communication": {"tensor_parallel_overlap": 0.8}}`. Lists are replaced whole.

    Raises:
        ConfigError: if there is no such description, or the file has a field that is not known or not right.
    """
    if name in SOFTWARE:
        return SOFTWARE[name]
    if not Path(name).suffix:
        raise ConfigError(f"--software {name} is neither a file nor a known trainer: {suggestion(name, SOFTWARE)}")
    document = read_document(name)
    if not isinstance(document, dict):
        raise ConfigError(f"{name} is not an object: write one with the fields {LIKE} and what differs")
    like = document.pop(LIKE, None)
    if not isinstance(like, str) or like not in SOFTWARE:
        raise fault(place(name, LIKE), like, "is not a known trainer", suggestion(str(like), SOFTWARE))
    changed = _changed({**asdict(SOFTWARE[like]), "name": Path(name).stem}, document, name)
    try:
        software = TypeAdapter(Software).validate_python(changed)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = place(name, *(step for step in first["loc"]))
        raise ConfigError(f"{at} {short(first['input'])} is wrong ({first['msg']}): mend it") from None
    hidden = software.communication.tensor_parallel_overlap
    if hidden > 1:
        raise fault(
            place(name, "communication", "tensor_parallel_overlap"), hidden, "is not a share up to 1", "give one"
        )
    return software


def _changed(known: Any, given: Any, file: str, *way: str) -> Any:
    """Return known fields with those that are given, objects within objects likewise."""
    if isinstance(known, dict):
        if not isinstance(given, dict):
            raise fault(place(file, *way), given, "is not an object", f"give fields of it: {', '.join(known)}")
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            raise ConfigError(f"{place(file, *way, str(unknown))} is not known: {suggestion(str(unknown), known)}")
        return {
            name: _changed(value, given[name], file, *way, name) if name in given else value
            for name, value in known.items()
        }
    if isinstance(given, int | float) and not (math.isfinite(given) and given >= 0):
        raise fault(place(file, *way), given, "is not a number from 0", "give one")
    return given
