"""The texts below the fields of a class, as descriptions for schemas and messages."""

import ast
import inspect
from functools import cache
from itertools import pairwise
from textwrap import dedent


@cache
def field_texts(kind: type) -> dict[str, str]:
    """Return the string below each field of a class, on one line, by the name of the field; its bases are left out."""
    body = ast.parse(dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
