"""Input files of the search: read, checked, and wrong ones explained."""

from megatron_terapipe.search.reading.documents import parse_text, read_document, read_text
from megatron_terapipe.search.reading.fields import MOST, Fields, short, suggestion

__all__ = ["MOST", "Fields", "parse_text", "read_document", "read_text", "short", "suggestion"]
