"""What a trajectory was thought to be worth, by rules, judges and people, in a line each."""

from typing import TYPE_CHECKING

from rich.text import Text

from art_core.views.text import safe, shorten

if TYPE_CHECKING:
    from art_core.store.records import Feedback, Score

_LIMIT = 1000


def score_line(score: "Score") -> Text:
    """A reward: how much, by whom, and why."""
    line = Text(f"reward {score.reward:.3f}", style="green")
    line.append(f"  by {safe(shorten(score.author, 80))}", style="bold")
    for name, value in score.components.items():
        line.append(f"  {safe(shorten(name, 40))} {value:.3f}", style="")
    if score.explanation:
        line.append(f"\n  {safe(shorten(score.explanation, _LIMIT))}", style="dim")
    return line


def feedback_line(said: "Feedback") -> Text:
    """What a person said."""
    words = {
        "thumb": "thumb up" if said.value > 0 else "thumb down",
        "score": f"score {said.value:.2f}",
        "choice": f"{'as good as' if said.value == 0.5 else 'better than'} {safe(said.over or '?')}",
    }
    line = Text(words.get(said.kind, f"{safe(said.kind)} {said.value}"), style="magenta")
    line.append(f"  by {safe(shorten(said.author, 80))}", style="bold")
    if said.comment:
        line.append(f"\n  {safe(shorten(said.comment, _LIMIT))}", style="dim")
    return line
