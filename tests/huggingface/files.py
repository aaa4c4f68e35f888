"""Settings of `config.json` files that tests read; needs no transformers."""

from typing import Any

_NEEDED: dict[str, dict[str, Any]] = {"nemotron_h": {"hybrid_override_pattern": "M-M*-"}}


def least_settings(name: str) -> dict[str, Any]:
    """Return a file of a family, with its default sizes where the defaults of transformers can be trained here."""
    return {"model_type": name, **_NEEDED.get(name, {})}
