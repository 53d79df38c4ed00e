"""Whatever a model, a tool, a user or a configuration wrote, on every page: text, and nothing else."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from helpers.dashboard_server import Server
from helpers.tab import DESK, PHONE, Tab
from playwright.sync_api import Browser, expect

from art_core.store import Store
from art_core.training.trained import TRAINED, StepTraining
from art_core.types import (
    Failure,
    PolicyVersion,
    RolloutStatus,
    Scenario,
    Span,
    Step,
    StepIdentity,
    StepTokens,
    Trajectory,
    TrajectoryGroup,
)

MARKUP = (
    "</pre></script></style></textarea></title>"
    "<script>document.title='owned';alert(1)</script>"
    "<img src=x onerror=\"document.title='owned';alert(2)\">"
    "<svg/onload=alert(3)><iframe srcdoc='<script>alert(4)</script>'></iframe>"
    "<form action='https://elsewhere.example/'><input name=x></form>"
    "<meta http-equiv=refresh content='0;url=https://elsewhere.example/'>"
    "<base href='https://elsewhere.example/'>"
)
QUOTES = "\"' autofocus onfocus=alert(5) x=\"' --> ]]> {{ 7 * 7 }} ${7*7} javascript:alert(6)"
ANSI = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b]8;;https://elsewhere.example/\x07link \x00\x08\x7f"
RIGHT_TO_LEFT = "\u202egnp.exe\u202c \u2066\u2067\u2068 \u200f\u200e \u05d0\u05d1 \u0627\u0644"
LONG = "x" * 1_000_000
EVIL = " ".join((MARKUP, QUOTES, ANSI, RIGHT_TO_LEFT))
NAME = "<script>alert(7)</script>\"'>\u202e/../%2e?a=b&c#d"


def call_of(rollout: str, n: int) -> Step:
    call = {"id": NAME, "type": "function", "function": {"name": NAME, "arguments": json.dumps({EVIL: EVIL})}}
    content = EVIL if n == 0 else EVIL + LONG
    return Step(
        id=f"s-{rollout}-{n}",
        rollout_id=rollout,
        messages=(
            {"role": "system", "content": EVIL},
            {"role": "user", "content": content, "name": NAME},
            {"role": NAME, "content": [{"type": EVIL, EVIL: EVIL}]},
            {"role": "tool", "tool_call_id": NAME, "content": content},
        ),
        model=NAME,
        started_at=1_000.0 + n,
        duration=1.0,
        tools=({"function": {"name": NAME, "description": EVIL, "parameters": {EVIL: EVIL}}},),
        sampling={EVIL: EVIL},
        response={"role": "assistant", "content": content, "reasoning_content": EVIL, "tool_calls": [call]},
        finish_reason=EVIL,
        tokens=StepTokens((1, 2, 3), (4, 5, 6), (-0.1, -2.0, -0.5)),
        policy=PolicyVersion(NAME, 1),
        identity=StepIdentity(node=NAME, namespace=f"{NAME}:{n}|{NAME}", graph_step=n + 1),
        error=EVIL if n == 1 else None,
    )


def trajectory(name: str, reward: float | None) -> Trajectory:
    failed = reward is None
    span = Span(
        id=f"p-{name}",
        kind="tool",
        name=NAME,
        node=NAME,
        namespace=NAME,
        started_at=1_000.0,
        duration=1.0,
        inputs={EVIL: EVIL},
        outputs=EVIL + LONG,
        error=EVIL if failed else None,
    )
    return Trajectory(
        id=name,
        scenario=Scenario(NAME, {EVIL: EVIL, "long": LONG}, {EVIL: EVIL}),
        steps=tuple(call_of(name, n) for n in range(2)),
        spans=(span,),
        status=RolloutStatus.FAILED if failed else RolloutStatus.FINISHED,
        reward=reward,
        components={} if failed else {EVIL: 0.5},
        metrics={EVIL: 1.0},
        metadata={EVIL: EVIL},
        failure=Failure(EVIL, EVIL, EVIL) if failed else None,
        started_at=1_000.0,
        duration=2.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def store(root: Path) -> Iterator[Store]:
    with Store.open("hostile", root) as opened:
        yield opened


@pytest.fixture(scope="module")
def paths(store: Store) -> dict[str, str]:
    """Pages of two runs in which every field that can say something says something evil."""
    config = {EVIL: EVIL, "base_model": EVIL, "checkpoints": EVIL, "long": LONG}
    run, other = (store.begin_run(EVIL, config) for _ in range(2))
    for step in (1, 2):
        figures = {"reward_mean": 0.5, "loss": float("nan"), NAME: 1.0, f"reward/component/{NAME}": 0.1}
        store.log_metrics(run, step, {**figures, f"node/{NAME}/calls": 1.0, f"failures/{NAME}": 1.0})
        store.log_metrics(other, step, {"reward_mean": float("inf")})
    for message in (EVIL, LONG):
        store.add_event(run, NAME, message, {EVIL: message})
        store.add_event(run, "update_skipped", message, {EVIL: message})
    store.add_event(run, "knob_turned", EVIL, {"name": NAME, "before": EVIL, "after": EVIL})
    sink = store.sink(run)
    sink.graph({"nodes": [NAME, EVIL], "edges": [[NAME, EVIL, EVIL]]}).result(20)
    groups = []
    for n in range(2):
        members = [trajectory(f"t-{n}{k}-{NAME}", reward) for k, reward in enumerate((1.0, 0.0, None))]
        groups.append(store.save_group(TrajectoryGroup(members[0].scenario, tuple(members)), run_id=run))
        for member in members[:2]:
            store.score(
                member.id, member.reward or 0.0, components={EVIL: 0.5}, author=EVIL, explanation=EVIL + LONG
            )
            store.add_feedback(member.id, kind="thumb", value=-1, author=NAME[:50], comment=EVIL)
    evil = quote(f"t-00-{NAME}", safe="")
    step = quote(f"s-t-00-{NAME}-1", safe="")
    store.log_trained(run, 1, [StepTraining(f"s-t-00-{NAME}-0", 0.5, b"\0\0\x80?" * 3, bytes([TRAINED] * 3))])
    name = quote(NAME, safe="")
    return {
        "runs": "/",
        "run": f"/runs/{run}",
        "compare": f"/compare?run={run}&run={other}",
        "audit": f"/runs/{run}/audit",
        "groups": f"/groups?run_id={run}",
        "group": f"/groups/{groups[0]}",
        "token tree": f"/groups/{groups[0]}/tree",
        "trajectories": "/trajectories",
        "filtered": f"/trajectories?node={name}&scenario_id={name}",
        "trajectory": f"/trajectories/{evil}",
        "failed": f"/trajectories/{quote(f't-02-{NAME}', safe='')}",
        "tokens": f"/trajectories/{evil}/tokens?step={step}",
        "request": f"/trajectories/{evil}/request?step={step}",
        "text": f"/trajectories/{evil}/text?step={step}&block=1",
        "span": f"/trajectories/{evil}/text?span={quote(f'p-t-00-{NAME}', safe='')}",
        "scenario": f"/scenarios?scenario_id={name}",
        "unknown run": f"/runs/{name}",
        "unknown page": f"/{name}",
        "unknown step": f"/runs/{run}/step?step={name}&show={name}",
    }


@pytest.fixture(scope="module")
def server(store: Store, paths: dict[str, str], root: Path) -> Iterator[Server]:
    started = Server(root, project="hostile", control=True)
    yield started
    started.kill()


def check_harmless(tab: Tab, name: str) -> None:
    """Nothing that a text asked for is there, nothing ran, and the page can still be used."""
    page = tab.page
    assert "owned" not in page.title(), name
    assert page.url.startswith(tab.url), name
    foreign = "img, iframe, object, embed, base, meta[http-equiv], [onerror], [onload], [onfocus], [src='x']"
    assert page.locator(f"main :is({foreign})").count() == 0, name
    assert (
        page.locator("a[href^='javascript:' i], a[href*='//elsewhere'], form[action*='//']").count() == 0
    ), name
    for character in "\u202e\u2066\u2067\x1b\x07":
        assert character not in page.locator("body").inner_text(), (name, character)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


@pytest.mark.parametrize("window", [DESK, PHONE], ids=["desk", "phone"])
def test_what_was_recorded_does_nothing_on_any_page(
    chromium: Browser, server: Server, paths: dict[str, str], screenshots: Path, window: dict[str, int]
) -> None:
    tab = Tab(chromium, server.url, viewport=window)
    for name, path in paths.items():
        tab.page.goto(path)
        tab.settle()
        check_harmless(tab, name)
        assert tab.overflow() <= 0, name
        tab.picture(screenshots, f"hostile {name} {window['width']}")
        tab.note_refusals()
        assert [c for c in tab.complaints if not re.search(r"status of (404|422)", c)] == [], name
    tab.close()


def test_opening_everything_that_is_folded_does_nothing_either(
    chromium: Browser, server: Server, paths: dict[str, str]
) -> None:
    """Parts that a page's script fetches and puts in, too."""
    for name in ("run", "trajectory", "failed", "group", "audit"):
        tab = Tab(chromium, server.url)
        tab.page.goto(paths[name])
        tab.settle()
        for folded in tab.page.locator("main details > summary").all():
            if folded.is_visible():
                folded.click()
        tab.page.locator("main a[data-part]").evaluate_all("all => all.slice(0, 6).forEach((a) => a.click())")
        tab.page.wait_for_load_state("networkidle")
        check_harmless(tab, name)
        assert tab.close() == [], name


def test_evil_that_arrives_while_a_page_is_open_is_text(
    chromium: Browser, server: Server, store: Store
) -> None:
    run = store.begin_run("agent")
    tab = Tab(chromium, server.url)
    tab.page.goto(f"/runs/{run}")
    store.add_event(run, NAME, EVIL)
    store.add_event(run, "update_skipped", EVIL, {EVIL: EVIL})
    store.log_metrics(run, 1, {"reward_mean": 0.5, NAME: 1.0})
    expect(tab.page.locator("#events li")).to_have_count(2)
    expect(tab.page.locator("figure .main-svg").first).to_be_visible()
    check_harmless(tab, "run")
    assert tab.close() == []


def test_evil_that_a_person_writes_in_a_form_comes_back_as_text(
    chromium: Browser, server: Server, paths: dict[str, str]
) -> None:
    tab = Tab(chromium, server.url)
    page = tab.page
    page.goto(paths["trajectory"])
    page.get_by_label("Your name").fill("<img src=x onerror=alert(9)>")
    page.get_by_label("Comment").fill(MARKUP + QUOTES)
    page.get_by_role("button", name="Thumb up").click()
    expect(page.locator(".feedback .said")).to_contain_text("Kept: thumb up by <img src=x")
    page.reload()
    expect(page.locator("[data-feedback-list]")).to_contain_text("<img src=x onerror=alert(9)>")
    check_harmless(tab, "trajectory")
    assert tab.close() == []
