"""Parsing the YAML files that flags name."""

from functools import cache
from typing import Any

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.text.json_text import MOST_LEVELS, check_values
from megatron_terapipe.errors import ConfigError


def parse_yaml(text: str, described: str) -> object:
    """Parse YAML text. A date stays the text that it is.

    Raises:
        ConfigError: if it is not YAML, has a key twice, is nested too deeply, or holds a number that is not finite.
    """
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{described} is YAML, and the package for it is missing: pip install pyyaml") from None
    try:
        document = yaml.load(text, Loader=_loader())  # noqa: S506 - a subclass of SafeLoader
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{described} is not YAML ({problem}{line}): mend it") from None
    try:
        check_values(document, described, len(text))
    except PlanError as error:
        raise ConfigError(str(error)) from None
    return document


@cache
def _loader() -> type[Any]:
    """Return the safe loader, with three differences.

    PyYAML keeps the last of two equal keys, makes dates, and takes a time that grows with the square of the nesting.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Loads plain values alone."""

        levels = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Read a value, and all values in it."""
            self.levels += 1
            if self.levels > MOST_LEVELS:
                problem = f"it is nested more than {MOST_LEVELS} levels deep"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
            node = super().compose_node(parent, index)
            self.levels -= 1
            return node

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        pairs = [(loader.construct_object(key, deep=True), value) for key, value in node.value]
        found: dict[Any, Any] = {}
        for key, value in pairs:
            if key in found:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} stands twice", problem_mark=node.start_mark)
            found[key] = loader.construct_object(value, deep=True)
        return found

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)
    return Loader
