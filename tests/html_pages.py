"""Pages of HTML: their elements, of which each is closed in order, their attributes and headings."""

from html.parser import HTMLParser

VOID = {"meta", "br", "input", "img", "link", "hr"}


class Page(HTMLParser):
    """A page that was read; raises for an element that is not closed, or not in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.headings: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "h2":
            self.headings.append(data)
