"""What keeps pages harmless: text that nobody should trust, scripts and names of others, and caches."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from helpers.page_documents import Document, finished_audit, page
from helpers.synthetic_store import fill
from starlette.testclient import TestClient

from art_core.observe.dashboard.app import create_app
from art_core.observe.dashboard.page import plotly_url
from art_core.store import Store


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open("hostile", tmp_path_factory.mktemp("hostile")) as opened:
        fill(opened, run_count=6, rollouts=96, scenario_count=6, hostile=True)
        opened.log_metrics("r-0000", 1, {"<img src=x onerror=alert(1)>": 1.0, "'\"><b>": 2.0})
        yield opened


PAGES_OF_HOSTILE = (
    "/",
    *(f"/runs/r-{n:04}" for n in range(6)),
    "/compare?run=r-0000&run=r-0001&run=r-0002",
    "/runs/r-0000/audit",
    "/trajectories",
    "/groups",
    "/runs/%3Cscript%3Ealert(1)%3C%2Fscript%3E",
    "/%3Cscript%3Ealert(1)%3C%2Fscript%3E",
)


@pytest.mark.parametrize("path", PAGES_OF_HOSTILE)
def test_what_a_run_recorded_is_text_on_every_page_whatever_it_says(hostile: Store, path: str) -> None:
    client = TestClient(create_app(hostile))
    answer = client.get(path)
    if path.endswith("/audit"):
        finished_audit(client, path)
        answer = client.get(path)
    document = Document(answer.text)
    assert len(answer.text) < 400_000  # although there are lines of a million characters
    assert not {"img", "iframe", "object", "b"} & {tag for tag, _ in document.elements}
    for script in document.all("script"):
        assert script.get("src", "").startswith(("/static/", "/vendor/")), script
    for tag, attributes in document.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert not value.lower().startswith("javascript:"), (tag, name)
    assert not any(c in answer.text for c in "\u202a\u202b\u202d\u202e\u2066\u2067\x1b\x07\x00")


@pytest.mark.parametrize(
    "path", ["/", "/runs/r-0000", "/compare?run=r-0000", "/runs/r-0000/audit", "/nowhere"]
)
def test_pages_load_nothing_from_elsewhere(client: TestClient, path: str) -> None:
    document = Document(client.get(path).text)
    for tag, attributes in document.elements:
        for name in ("src", "href", "action", "poster", "data"):
            if value := attributes.get(name):
                assert urlsplit(value).netloc == "", (tag, value)
                assert urlsplit(value).scheme == "", (tag, value)


@pytest.mark.parametrize("path", ["/", "/runs/r-0000", "/nowhere", "/static/page.css", "/runs/r-0000/series"])
def test_every_answer_forbids_inline_scripts_and_those_of_others(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["script-src"] == "'self'"
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"


def test_a_name_that_is_not_this_machine_is_refused_against_dns_rebinding(store: Store) -> None:
    app = create_app(store, hosts=("127.0.0.1", "localhost"))
    assert TestClient(app, base_url="http://127.0.0.1").get("/").status_code == 200
    refused = TestClient(app, base_url="http://evil.example").get("/")
    assert refused.status_code == 400
    assert "agent" not in refused.text


def test_files_whose_address_names_their_version_are_kept_and_pages_are_asked_for_again(
    client: TestClient,
) -> None:
    script = client.get(plotly_url())
    assert script.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert len(script.content) > 1_000_000
    style = page(client, "/").all("link")[1]["href"]
    assert "immutable" in client.get(style).headers["cache-control"]
    assert client.get("/").headers["cache-control"] == "no-cache"
    again = client.get("/static/charts.js")
    assert (
        client.get("/static/charts.js", headers={"if-none-match": again.headers["etag"]}).status_code == 304
    )
