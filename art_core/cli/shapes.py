"""What ``--json`` says: the keys of each command's document, which stay; new ones may come.

Invariant: a test runs every command and finds just these keys.
"""

_SAID = ("trajectory_id", "kind", "value", "author", "comment", "over")
_RUN = ("id", "model", "state", "started_at", "ended_at", "continues")

SHAPES: dict[str, tuple[str, ...]] = {
    "runs": ("project", "runs[]"),
    "runs RUN": ("run", "steps", "signs[]", "outcomes", "metrics", "events[]"),
    "trajectories list": ("trajectories[]", "next"),
    "trajectories show": ("trajectory", "scores[]", "feedback[]"),
    "trajectories compare": ("same_scenario", "common_messages[]", "trajectories[]"),
    "trajectories export": ("path", "trajectories", "lines"),
    "report": ("path", "run", "bytes"),
    "audit": (
        "run",
        "groups",
        "trajectories",
        "scored",
        "findings[]",
        "checks[]",
        "reward_calls",
        "judge_calls",
    ),
    "feedback thumb": _SAID,
    "feedback score": _SAID,
    "feedback prefer": _SAID,
    "feedback list": ("feedback[]",),
    "feedback export": ("path", "lines"),
    "doctor": ("ok", "checks[]", "can[]", "environment"),
}
"""Keys of the document; ``[]`` marks a list, whose members `MEMBERS` describes."""

MEMBERS: dict[str, tuple[str, ...]] = {
    "runs: runs[]": (*_RUN, "steps", "trajectories", "reward_mean", "sparkline"),
    "runs RUN: signs[]": ("tone", "title", "message", "about"),
    "runs RUN: events[]": ("kind", "message", "data", "created_at"),
    "trajectories list: trajectories[]": (
        "id",
        "run_id",
        "group_id",
        "scenario_id",
        "status",
        "cause",
        "failure",
        "reward",
        "components",
        "policy_number",
        "started_at",
        "duration",
        "calls",
        "nodes",
    ),
    "trajectories show: scores[]": (
        "trajectory_id",
        "reward",
        "author",
        "created_at",
        "components",
        "explanation",
    ),
    "trajectories compare: trajectories[]": (
        "id",
        "scenario_id",
        "status",
        "reward",
        "components",
        "policies",
        "calls",
        "tokens",
        "duration",
        "messages",
    ),
    "audit: findings[]": ("name", "severity", "message", "fix", "trajectories", "figures"),
    "audit: checks[]": ("name", "question", "figures", "skipped"),
    "feedback list: feedback[]": (*_SAID, "created_at"),
    "doctor: checks[]": ("name", "status", "found", "fix"),
    "doctor: can[]": ("what", "possible", "why"),
}
"""Keys of the members of lists."""

NOTES: dict[str, str] = {
    "runs RUN": "`metrics` has `[step, value]` pairs by name; `outcomes` counts trajectories by status; "
    "`signs` are what stands out, `about` the metric that tells most of it.",
    "trajectories list": "`next` is what `--after` takes for the page that follows, or null.",
    "trajectories show": "`trajectory` is as in a line of `trajectories export`.",
    "trajectories compare": "`messages` of each are those after the common ones.",
    "trajectories export": "Only with `--to`: without it, the lines themselves are the output.",
    "dashboard": 'Once it listens, `{"url", "store", "project", "control"}`; it goes on serving.',
    "watch": (
        'One document a line: `{"type": "run", "run", "outcomes"}` at the beginning, at a change of run and '
        'at the end; `{"type": "metrics", "step", "values", "created_at"}` for each training step; '
        '`{"type": "event", "kind", "message", "data", "created_at"}`.'
    ),
    "doctor": "`status` is `ok`, `missing` (can be installed: `fix` says how), or `broken` (exit code 1).",
}
"""What the keys do not say by themselves."""
