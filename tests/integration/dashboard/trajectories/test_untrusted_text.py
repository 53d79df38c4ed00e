"""Text that nobody should trust, on every page of trajectories and groups."""

import html
import re
from dataclasses import replace

import pytest
from helpers.page_texts import PART, page
from helpers.trajectories import a_span, a_step, a_trajectory

from art_core.store import Store
from art_core.store.browse import TrajectoryFilter, list_trajectories

ADDRESSES = ("/trajectories", "/groups", "/trajectories/{id}", "/groups/{group}", "/groups/{group}/tree")


@pytest.mark.parametrize("address", ADDRESSES)
def test_what_a_run_recorded_is_never_markup_nor_moves_what_is_around_it(
    hostile: Store, address: str
) -> None:
    nasty = 0
    for row in list_trajectories(hostile, TrajectoryFilter(), 500).items[::8]:
        text = page(hostile, address.format(id=row.id, group=row.group_id or "g-000000"))
        assert "<script>document" not in text
        assert "<img" not in text
        assert "49" not in re.findall(r"\{\{ 7 \* 7 \}\}|49 \{%", text)
        assert not set(text) & {"\x1b", "\u202e", "\x00", "\x07"}
        assert len(text) < 400_000
        nasty += "document.title" in text
        if "{" not in address:
            break
    assert nasty


def test_a_line_of_a_megabyte_is_cut_in_the_middle_and_fetched_whole_when_asked(empty: Store) -> None:
    long = "a" * 500_000 + "\u202e\x1b[31mMIDDLE" + "z" * 500_000
    step = a_step("huge", response={"role": "assistant", "content": long})
    span = a_span(1, outputs=long, namespace="player:1")
    empty.save_trajectory(replace(a_trajectory("huge"), steps=(step,), spans=(span,)))
    text = page(empty, "/trajectories/huge")
    assert len(text) < 60_000
    assert "MIDDLE" not in text
    links = [html.unescape(a) for a in re.findall(r'<a class="rest" href="([^"]+)"', text)]
    assert len(links) == 2
    for link in links:
        whole = page(empty, link, **PART)
        assert "U+202E" in whole
        assert "right-to-left override" in whole
        assert "[31mMIDDLE" in whole
        assert "\x1b" not in whole
        assert len(whole) > 1_000_000
    assert "MIDDLE" in page(empty, links[0])  # without a script: a page of its own
