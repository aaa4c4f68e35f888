"""The directive `json-schema`: the schema of a kind of file as tables, and as a file beside the page.

    ```{json-schema} cluster
    ```

The schema is the one that `terapipe schema cluster` prints, made from the code when the site is built.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst.states import RSTState
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from megatron_terapipe.command.schema import FILE_FORMATS

_MARKS = {"minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}
_FOLDER = "schemas"
_COLUMNS = {"key": 22, "type": 28, "default": 16, "meaning": 34}
"""Columns of a table, and their widths in percent."""
_NAMES = tuple(_COLUMNS)


def type_words(schema: Mapping[str, Any]) -> str:
    """Return what a value may be, in words.

    Args:
        schema: JSON Schema of the value.
    """
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(json.dumps(each) for each in schema["enum"])
    if "anyOf" in schema:
        words = dict.fromkeys(type_words(each) for each in schema["anyOf"])
        return " or ".join(each for each in words if each != "null")
    kind = schema.get("type", "any value")
    if isinstance(kind, list):
        return " or ".join(each for each in kind if each != "null")
    if "prefixItems" in schema and not schema.get("items"):
        return f"[{', '.join(type_words(each) for each in schema['prefixItems'])}]"
    if kind == "array":
        items = schema.get("items")
        return f"array of {type_words(items)}" if items else "array"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {type_words(schema['additionalProperties'])}"
    bounds = [f"{words} {schema[mark]:,}" for mark, words in _MARKS.items() if abs(schema.get(mark, 1e15)) < 1e15]
    return ", ".join([kind, *bounds])


def meaning(schema: Mapping[str, Any]) -> str:
    """Return the description of a value, also where it is one of several forms.

    Args:
        schema: JSON Schema of the value.
    """
    own = schema.get("description")
    return own or " ".join(filter(None, (meaning(each) for each in schema.get("anyOf", []) if "$ref" not in each)))


def rows_of(schema: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the key, type, default and meaning of each property of an object.

    Args:
        schema: JSON Schema of the object.
    """
    needed = schema.get("required", [])
    return [
        (
            name,
            type_words(each),
            "required" if name in needed else json.dumps(each["default"]) if each.get("default") is not None else "",
            meaning(each),
        )
        for name, each in schema.get("properties", {}).items()
    ]


class JsonSchema(SphinxDirective):
    """Shows the schema of one kind of file."""

    required_arguments = 1
    has_content = False
    state: RSTState
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """Return a paragraph, and a table for each object in the file."""
        name = self.arguments[0]
        if name not in FILE_FORMATS:
            raise self.error(f"no file format is called {name}: it is one of {', '.join(FILE_FORMATS)}")
        schema = FILE_FORMATS[name].json_schema()
        return list(self._parts(name, schema))

    def _parts(self, name: str, schema: Mapping[str, Any]) -> Iterator[nodes.Node]:
        depth = self.env.docname.count("/")
        address = f"{'../' * depth}{_FOLDER}/{name}.schema.json"
        words, _ = self.parse_inline(FILE_FORMATS[name].summary)
        yield nodes.paragraph("", "", *words, nodes.Text(" "), nodes.reference("", "JSON Schema", refuri=address))
        objects = [each for each in schema.get("anyOf", [schema]) if "$ref" not in each]
        for each in objects:
            yield from self._object(each.get("title", name) if len(objects) > 1 else "", each)
        for title, each in sorted(schema.get("$defs", {}).items()):
            yield from self._object(title, each)

    def _object(self, title: str, schema: Mapping[str, Any]) -> Iterator[nodes.Node]:
        rows = rows_of(schema)
        if title:
            text = schema.get("description", "") if rows else f"{type_words(schema)}"
            words, _ = self.parse_inline(text)
            yield nodes.paragraph("", "", nodes.strong("", title), nodes.Text(": " if text else ""), *words)
        elif not rows:
            words, _ = self.parse_inline(schema.get("description", ""))
            yield nodes.paragraph("", "", *words)
        if rows:
            yield self._table(rows)

    def _table(self, rows: list[tuple[str, str, str, str]]) -> nodes.table:
        """Return the rows as a table without the columns that are empty."""
        shown = [column for column in range(len(_COLUMNS)) if any(row[column] for row in rows)]
        group = nodes.tgroup("", *(nodes.colspec(colwidth=_COLUMNS[_NAMES[each]]) for each in shown), cols=len(shown))
        head = nodes.row("", *(nodes.entry("", nodes.paragraph("", _NAMES[each])) for each in shown))
        body = nodes.tbody()
        for row in rows:
            key, kind, default, text = row
            words, _ = self.parse_inline(text)
            cells = ([nodes.literal("", key)], [nodes.Text(kind)], [nodes.Text(default)], words)
            body += nodes.row("", *(nodes.entry("", nodes.paragraph("", "", *cells[each])) for each in shown))
        group += [nodes.thead("", head), body]
        return nodes.table("", group, classes=["schema"])


def write_schemas(app: Sphinx, exception: Exception | None) -> None:
    """Write every schema into the site.

    Args:
        app: the application, when it has built.
        exception: why it did not, None if it did.
    """
    if exception is None and app.builder.format == "html":
        folder = Path(app.outdir, _FOLDER)
        folder.mkdir(exist_ok=True)
        for name, form in FILE_FORMATS.items():
            text = json.dumps(form.json_schema(), indent=1)
            (folder / f"{name}.schema.json").write_text(text + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Return that pages may be read and written in parallel, after adding the directive."""
    app.add_directive("json-schema", JsonSchema)
    app.connect("build-finished", write_schemas)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
