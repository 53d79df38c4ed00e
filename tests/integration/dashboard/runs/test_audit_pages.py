"""The pages of audits: what is found, and when one is made again."""

from helpers.page_documents import finished_audit, page
from helpers.synthetic_store import fill
from starlette.testclient import TestClient

from art_core.observe.dashboard.app import create_app
from art_core.observe.dashboard.pages_audit import Audits
from art_core.store import Store


def test_an_audit_shows_its_findings_with_the_rollouts_to_read(client: TestClient, store: Store) -> None:
    document = finished_audit(client, "/runs/r-0000/audit?groups=5")
    assert "do rewards differ within groups?" in document.text
    read = [a["href"] for a in document.all("a") if a.get("href", "").startswith("/trajectories/")]
    assert read
    for path in read:
        store.trajectory(path.rpartition("/")[2])  # it is there
        assert client.get(path).status_code == 200


def test_an_audit_is_made_again_only_when_something_was_added(empty: Store) -> None:
    fill(empty, run_count=1, rollouts=40)
    app = create_app(empty)
    client = TestClient(app)
    finished_audit(client, "/runs/r-0000/audit")
    finished_audit(client, "/runs/r-0000/audit")
    assert len(app.state.audits._jobs) == 1
    empty.add_feedback("t-0000001", kind="thumb", value=1.0, author="ana")
    finished_audit(client, "/runs/r-0000/audit")
    assert len(app.state.audits._jobs) == 2


def test_a_page_that_waits_for_an_audit_gets_that_one_although_the_run_goes_on(empty: Store) -> None:
    fill(empty, run_count=1, rollouts=40)
    app = create_app(empty)
    client = TestClient(app)
    app.state.audits = Audits()
    with app.state.audits._turn:  # another audit is under way
        document = page(client, "/runs/r-0000/audit")
        (waiting,) = [a["data-working"] for _, a in document.elements if "data-working" in a]
        empty.add_feedback("t-0000001", kind="thumb", value=1.0, author="ana")
        page(client, f"/runs/r-0000/audit{waiting}")
    finished_audit(client, f"/runs/r-0000/audit{waiting}")
    assert len(app.state.audits._jobs) == 1
