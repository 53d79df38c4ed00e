"""An HTML document taken apart by a parser: elements, attributes, words."""

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """What a document is made of."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "line", "rect", "circle", "polyline", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle", "rect"):
            assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def check_harmless(self) -> None:
        """Nothing runs, nothing is loaded, every element is closed."""
        assert not self.open, self.open
        harmful = {
            "script",
            "img",
            "iframe",
            "object",
            "embed",
            "link",
            "form",
            "input",
            "base",
            "audio",
            "video",
        }
        assert not self.tags & harmful, self.tags & harmful
        for tag, name, value in self.attributes:
            assert not name.startswith("on"), (tag, name)
            assert name not in ("srcset", "srcdoc", "formaction", "xlink:href"), (tag, name)
            if name in ("href", "src", "action"):
                assert re.fullmatch(r"#[a-z]+", value), value
            if name == "style":
                assert "url(" not in value, value
