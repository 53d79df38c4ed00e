"""Pages of a dashboard, got over HTTP and taken apart: elements, attributes, words."""

from html.parser import HTMLParser

from starlette.testclient import TestClient


class Document(HTMLParser):
    """A page taken apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for found, attributes in self.elements if found == tag]


def page(client: TestClient, path: str, status: int = 200) -> Document:
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("text/html")
    return Document(answer.text)


def finished_audit(client: TestClient, path: str) -> Document:
    for _ in range(100):
        document = page(client, path)
        waiting = [a["data-working"] for _, a in document.elements if "data-working" in a]
        if not waiting:
            return document
        path = path.partition("?")[0] + waiting[0]
    raise AssertionError("the audit never ended")
