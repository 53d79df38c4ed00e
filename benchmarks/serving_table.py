"""What `serving.py` found, as ratios, as tables on the terminal, and as tables in docs/performance.md."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- serving: written by benchmarks/serving.py --table -->", "<!-- serving: end -->"

Rates = Mapping[int, Mapping[str, Mapping[str, list[float]]]]
"""Tokens per second by concurrency, target and way; one for each repetition."""

BARS = {
    "recording_vs_plain_c256": ("at least", 0.85),
    "gateway_vs_direct_c256": ("at least", 0.95),
    "publish_seconds": ("at most", 0.5),
    "others_delayed_seconds": ("at most", 0.5),
}
"""What is promised."""


def ratios(rates: Rates, facts: Mapping[str, Any]) -> dict[str, float]:
    """The figures that are promised, and their relatives, as far as they are known."""
    found: dict[str, float] = {}
    for concurrency, by_target in rates.items():
        for target, by_way in by_target.items():
            ending = f"c{concurrency}" if target == "base" else f"c{concurrency}_{target.replace(', ', '_')}"
            for name, way, other in (
                ("recording_vs_plain", "packed", "plain"),
                ("stock_recording_vs_plain", "spelled", "plain"),
                ("gateway_vs_direct", "gateway", "packed"),
                ("gateway_vs_plain", "gateway", "plain"),
            ):
                pairs = list(zip(by_way.get(way, ()), by_way.get(other, ()), strict=False))
                if pairs:
                    found[f"{name}_{ending}"] = statistics.median(a / b for a, b in pairs)
    publishing = facts.get("publishing") or {}
    if publishing.get("seconds"):
        found["publish_seconds"] = max(publishing["seconds"])
    if publishing.get("slowest_other_request_later_by"):
        found["others_delayed_seconds"] = max(publishing["slowest_other_request_later_by"])
    return found


def show(console: Console, rates: Rates, found: Mapping[str, float]) -> None:
    """Tables on the terminal."""
    ways = list(dict.fromkeys(way for by in rates.values() for ways in by.values() for way in ways))
    table = Table(title="Tokens per second", title_justify="left")
    for column in ("at once", "model", *ways):
        table.add_column(column, justify="right")
    for concurrency in sorted(rates):
        for target, by_way in rates[concurrency].items():
            cells = [f"{statistics.median(by_way[w]):,.0f}" if by_way.get(w) else "" for w in ways]
            table.add_row(f"{concurrency:,}", target, *cells)
    console.print(table)
    bars = Table(title="Bars", title_justify="left")
    for column in ("", "measured", "bar", ""):
        bars.add_column(column)
    for name, value in found.items():
        if name in BARS:
            kind, bar = BARS[name]
            held = value <= bar if kind == "at most" else value >= bar
            bars.add_row(name, f"{value:.3f}", f"{kind} {bar:g}", "[green]held" if held else "[red]missed")
    console.print(bars)


def join(results: Path, other: Path) -> Path:
    """Add the rates and facts of another result file to one; what both have, the first keeps."""
    into, more = (json.loads(path.read_text()) for path in (results, other))
    raw, rates = into["raw"], into["raw"]["tokens_per_second"]
    for concurrency, by_target in more["raw"]["tokens_per_second"].items():
        mine = rates.setdefault(concurrency, {})
        mine |= {target: by_way for target, by_way in by_target.items() if target not in mine}
    into["raw"] = {**more["raw"], **raw}
    into["ratios"] = ratios({int(c): by for c, by in rates.items()}, into["raw"])
    results.write_text(json.dumps(into, indent=1) + "\n")
    return results


# -- the page ----------------------------------------------------------------------------------------------

_HEADS = {
    "plain": "no recording",
    "spelled": "stock recording",
    "packed": "our recording",
    "gateway": "through the gateway",
}


def markdown(result: Mapping[str, Any]) -> str:
    """The tables of a result file."""
    raw = result["raw"]
    rates: Rates = {int(c): by for c, by in raw["tokens_per_second"].items()}
    lines = [_where(result), "", "Tokens per second:", ""]
    lines += [_row("at once", "model", *_HEADS.values()), _row(*["---:", "---"], *["---:"] * len(_HEADS))]
    for concurrency in sorted(rates):
        for target, by_way in rates[concurrency].items():
            cells = [f"{statistics.median(by_way[w]):,.0f}" if by_way.get(w) else "" for w in _HEADS]
            lines.append(_row(f"{concurrency:,}", target, *cells))
    lines += ["", _row("promised", "measured", "bar"), _row("---", "---:", "---")]
    for name, (kind, bar) in BARS.items():
        if name in result["ratios"]:
            lines.append(_row(f"`{name}`", f"{result['ratios'][name]:.3f}", f"{kind} {bar:g}"))
    lines += _acts(raw)
    return "\n".join(lines)


def _where(result: Mapping[str, Any]) -> str:
    raw = result["raw"]
    gpu = raw["gpus"][0]["name"] if raw.get("gpus") else result["hardware"]["processor"]
    answer = f"{raw['tokens']} tokens in each answer" if "tokens" in raw else ""
    server = raw.get("server", {})
    return f"On {', '.join(filter(None, (gpu, server.get('vllm'), server.get('model'), answer)))}."


def _acts(raw: Mapping[str, Any]) -> list[str]:
    rows: list[str] = []
    if "seconds_to_ready" in raw.get("server", {}):
        rows.append(_row("start until it answers", f"{raw['server']['seconds_to_ready']:.0f} s"))
    if "seconds_to_publish" in raw.get("merged_server", {}):
        took = f"{raw['merged_server']['seconds_to_publish']:.1f} s"
        rows.append(_row("merging a version, and reloading in place", took))
    publishing = raw.get("publishing") or {}
    if publishing.get("seconds"):
        rows.append(_row("adapter on disk to its first token", _seconds(publishing["seconds"])))
        rows.append(_row("of which loading", _seconds(publishing["loading_seconds"])))
    sleeping = raw.get("sleeping") or {}
    if sleeping.get("sleep_seconds"):
        rows.append(_row("falling asleep (level 1)", _seconds(sleeping["sleep_seconds"])))
        rows.append(_row("waking up", _seconds(sleeping["wake_seconds"])))
        awake, asleep, after = sleeping["mib"][0]
        if awake is not None:
            rows.append(_row("GPU memory awake, asleep, awake again", f"{awake}, {asleep}, {after} MiB"))
        for model in sleeping["logprobs_changed_by"][0]:
            change = max(by_model[model] for by_model in sleeping["logprobs_changed_by"])
            what = "base model" if model.endswith("@0") else "adapter that was not loaded again"
            rows.append(_row(f"largest change of a logprob by sleep, {what}", f"{change:.4f}"))
    return ["", _row("act", "measured"), _row("---", "---:"), *rows] if rows else []


def _seconds(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} s (at most {max(values):.2f})"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def into_docs(results: Path, page: Path = PAGE) -> Path:
    """Write the tables of a result file between the page's markers; returns the page."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} has no place for these tables: {BEGIN} ... {END}")
    tables = markdown(json.loads(results.read_text()))
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}")
    return page
