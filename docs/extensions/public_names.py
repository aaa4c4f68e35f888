"""The directive `public-names`: what programs may import of a package, made from docstrings.

    ```{public-names} deepspeed_ext.plan
    ```

What may be imported is what `__all__` lists: of a package its modules, sub-packages and names, of a module its names.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst.states import RSTState
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def public_modules(name: str) -> Iterator[tuple[ModuleType, list[str]]]:
    """Yield each public module below a package or module, itself included, with its public names.

    Args:
        name: of the package or module.

    Raises:
        AttributeError: if one has no `__all__`.
    """
    module = import_module(name)
    is_package = hasattr(module, "__path__")
    below = [each for each in module.__all__ if is_package and find_spec(f"{name}.{each}") is not None]
    if names := [each for each in module.__all__ if each not in below]:
        yield module, names
    for each in below:
        yield from public_modules(f"{name}.{each}")


def public_names(name: str) -> Iterator[str]:
    """Yield the full name of all that may be imported of a package or module.

    Args:
        name: of the package or module.
    """
    for module, names in public_modules(name):
        yield from (f"{module.__name__}.{each}" for each in names)


class PublicNames(SphinxDirective):
    """Documents what may be imported of a package."""

    required_arguments = 1
    has_content = False
    state: RSTState
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """Return the documentation of each public module."""
        lines = ["```{eval-rst}"]
        for module, names in public_modules(self.arguments[0]):
            lines += [f".. automodule:: {module.__name__}", f"   :members: {', '.join(names)}"]
        found = nodes.container()
        self.state.nested_parse(StringList([*lines, "```"], source=self.env.docname), self.content_offset, found)
        return list(found.children)


def setup(app: Sphinx) -> dict[str, bool]:
    """Return that pages may be read and written in parallel, after adding the directive."""
    app.add_directive("public-names", PublicNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
