"""The catalogue of metrics: what each name means, in which unit, and what is healthy.

Invariant: every name that a run writes is here, by itself or by a pattern (a test trains and compares), and
a metric that could not be measured is absent, never 0.

`METRICS` is in the order in which a reader asks: does it learn, why not, what does it cost.
``docs/metrics.md`` is made from it.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """What a metric means.

    Attributes:
        name: as it is written; ``<...>`` stands for a name that the run brings along, of a node for example.
        unit: of the number.
        what: it measures.
        healthy: what a person should expect, and what should make them look; empty where any number may be
            right.
        group: the heading under which it is shown.
    """

    name: str
    unit: str
    what: str
    healthy: str
    group: str

    @property
    def is_pattern(self) -> bool:
        """Whether it stands for several metrics."""
        return "<" in self.name


REWARD, ROLLOUTS, DATA, POLICY, OPTIMIZER, NODES, JUDGE, TIME, SERVING = (
    "Reward",
    "Rollouts",
    "Training data",
    "Policy",
    "Optimizer",
    "Nodes",
    "Judge",
    "Time and memory",
    "Serving",
)
"""The groups."""

_CATALOGUE = (
    # -- does it learn?
    (
        "reward_mean", "reward", "Mean reward of the rollouts that have one.",
        "rises; flat for long: look at the spread and at groups_without_spread", REWARD,
    ),
    (
        "reward_mean_scored", "reward", "The same as it was scored; there while the knob reward_weights "
        "makes another reward of it.", "goes on where reward_mean was before the turn", REWARD,
    ),
    (
        "reward_std", "reward", "Standard deviation of all rewards of the step.",
        "above 0; it shrinks as the policy gets sure", REWARD,
    ),
    (
        "reward_group_std", "reward", "Mean over groups of the standard deviation within a group: what GRPO "
        "learns from.", "above 0; at 0 nothing can be learned", REWARD,
    ),
    (
        "success_rate", "share", "Share of rollouts that succeeded: by a component, metric or metadata entry "
        "named success, else by reward >= TrainConfig.success_reward; absent where neither is there.",
        "rises with the reward; reward up and success not: the reward is being gamed", REWARD,
    ),
    (
        "evaluation/reward_mean", "reward", "Mean reward of the trials of an evaluation (`learning_graph`), "
        "with the version that the step made.",
        "rises; not with reward_mean: the training scenarios are learned by heart", REWARD,
    ),
    ("evaluation/failed", "count", "Trials of an evaluation that failed; they have no reward.", "0", REWARD),
    (
        "reward/component/<name>", "reward", "Mean of a named part of the reward.",
        "no part rises at the cost of another", REWARD,
    ),
    (
        "reward/component_std/<name>", "reward", "Standard deviation of a named part of the reward.",
        "above 0, or the part teaches nothing", REWARD,
    ),
    # -- the rollouts
    ("trajectories", "count", "Rollouts that the step was given.", "", ROLLOUTS),
    (
        "trajectories_failed", "count", "Of these, those that failed; they have no reward.",
        "few: every failure is a rollout paid for in vain", ROLLOUTS,
    ),
    ("trajectories_unscored", "count", "Of these, those that ended without a reward.", "0", ROLLOUTS),
    (
        "failures/<cause>", "count", "Rollouts that failed since the step before, by cause (exception, "
        "timeout, cancelled, reward, judge, worker, no_policy_calls); those of groups that were dropped for "
        "it included.", "absent", ROLLOUTS,
    ),
    (
        "faults/<kind>", "count", "What capture could not do: calls that belong to no rollout, handlers that "
        "failed.", "absent", ROLLOUTS,
    ),
    ("calls", "count", "LLM calls that the rollouts made.", "", ROLLOUTS),
    (
        "temperature_mean", "temperature", "Mean of what the policy was sampled at; calls that name none "
        "count as 1.", "as configured, or as its schedule has it", ROLLOUTS,
    ),
    (
        "steps_truncated", "count", "Answers that max_tokens cut off.",
        "few; many: raise max_tokens, or reward brevity", ROLLOUTS,
    ),
    (
        "tokens_sampled", "tokens", "Tokens that the policy sampled.",
        "a jump without a better reward: answers grow for nothing", ROLLOUTS,
    ),
    ("tokens_prompt", "tokens", "Tokens of the policy's prompts, each time they were sent.", "", ROLLOUTS),
    ("rollout_seconds_mean", "seconds", "Mean duration of a rollout.", "", ROLLOUTS),
    ("rollout/metric/<name>", "as given", "Mean of a number that rollouts brought along.", "", ROLLOUTS),
    # -- what is trained
    ("groups", "count", "Groups that the step was given.", "", DATA),
    (
        "groups_without_spread", "count", "Groups whose rewards are equal: nothing can be learned from them.",
        "few; nearly all: scenarios are too easy or too hard", DATA,
    ),
    ("groups_replayed", "count", "Earlier groups that were trained again.", "", DATA),
    (
        "groups_reweighted", "count", "Groups that the knob reward_weights gave other rewards.",
        "all that have the component; an event says why not", DATA,
    ),
    ("steps_left_out", "count", "Steps that were not trained; the report says why.", "few", DATA),
    ("entries", "tokens", "Tokens trained: one entry for each sampled token that is trained.", "", DATA),
    ("tokens_total", "tokens", "Tokens of all rows, prompts included.", "", DATA),
    ("tree_nodes", "tokens", "Tokens of the trees: what is computed when shared ones are computed once.", "",
     DATA),
    (
        "unique_share", "share", "tree_nodes per tokens_total.",
        "the lower, the more the tree saves", DATA,
    ),
    (
        "fork_rate", "rows per trajectory", "Rows that a trajectory needs beyond its first: places where its "
        "history was changed.", "0 for an agent that only appends to its history", DATA,
    ),
    (
        "null_logprobs", "tokens", "Trained tokens whose probability the server did not tell.", "0", DATA,
    ),
    (
        "steps_greedy", "count", "Steps sampled at temperature 0: no draws from a distribution.",
        "0; sample above 0 where you collect", DATA,
    ),
    (
        "steps_reshaped", "count", "Steps sampled with top_p, top_k, min_p, penalties or logit_bias, which "
        "the policy in training knows nothing of.", "0; leave those settings out where you collect", DATA,
    ),
    (
        "steps_raw_logprobs", "count", "Steps sampled at other temperatures than 1 by a server whose "
        "log-probabilities are the model's own: the trainer's take their place.",
        "0; start the server with --logprobs-mode processed_logprobs", DATA,
    ),
    (
        "staleness_mean", "versions", "How many versions behind the policy the rollouts were sampled, on "
        "average.", "0 when gathering and training take turns, about 1 when they overlap", DATA,
    ),
    ("staleness_max", "versions", "The same of the oldest rollout.", "no more than max_staleness", DATA),
    # -- the policy
    (
        "kl_old_new", "nats", "KL divergence from the policy that sampled to the one that the update found.",
        "about 0 for fresh rollouts; more: stale samples, or server and trainer compute differently",
        POLICY,
    ),
    (
        "kl_base", "nats", "KL divergence of the policy to the base model; when it is part of the loss.",
        "grows slowly; runs away: lower the learning rate or raise kl_coef", POLICY,
    ),
    (
        "entropy", "nats", "Mean entropy of the policy over trained tokens.",
        "falls slowly; near 0 early: it stopped exploring", POLICY,
    ),
    (
        "clip_fraction", "share", "Share of trained tokens whose ratio the loss clipped.",
        "small; large: too many epochs or too high a learning rate", POLICY,
    ),
    ("ratio_mean", "ratio", "Mean of new / proximal probability.", "about 1", POLICY),
    ("ratio_max", "ratio", "Largest new / proximal probability.", "small: a few at most", POLICY),
    (
        "behaviour_ratio_p50", "ratio", "Median of new / behaviour probability (of the policy that the "
        "update found to the one that sampled), not truncated.", "about 1", POLICY,
    ),
    (
        "behaviour_ratio_p99", "ratio", "99th percentile of new / behaviour probability.",
        "near 1; far above: stale samples, or server and trainer compute differently", POLICY,
    ),
    (
        "effective_sample_size", "share", "Kish's effective sample size of new / behaviour as weights, "
        "(sum w)^2 / (n sum w^2).", "about 1; at 0.5 the weights are worth half of the samples", POLICY,
    ),
    ("importance_mean", "ratio", "Mean importance weight (proximal / behaviour, truncated).", "about 1",
     POLICY),
    ("importance_max", "ratio", "Largest importance weight.", "no more than importance_cap", POLICY),
    ("masked_fraction", "share", "Share of tokens that the importance weight left out.", "about 0", POLICY),
    # -- the optimizer
    ("policy_version", "number", "The version that is served after the step.", "", OPTIMIZER),
    ("loss", "loss", "Mean loss of the updates.", "says little by itself: look at the reward", OPTIMIZER),
    ("sft_loss", "nats", "Mean negative log-likelihood of what is imitated beside.", "falls", OPTIMIZER),
    (
        "grad_norm", "norm", "Mean gradient norm before clipping.",
        "steady; a jump comes before trouble", OPTIMIZER,
    ),
    ("learning_rate", "rate", "Learning rate of the last update.", "", OPTIMIZER),
    ("kl_coef", "factor", "Coefficient of the KL term in the last update.", "", OPTIMIZER),
    ("entropy_coef", "factor", "Coefficient of the entropy bonus in the last update.", "", OPTIMIZER),
    ("updates", "count", "Optimizer steps that were made.", "", OPTIMIZER),
    ("updates_skipped", "count", "Optimizer steps that a guardrail refused.", "0", OPTIMIZER),
    # -- nodes
    ("node/<name>/calls", "calls per rollout", "LLM calls that a node made.", "", NODES),
    ("node/<name>/tokens", "tokens per call", "Mean length of a node's answers.", "", NODES),
    ("node/<name>/latency", "seconds", "Mean duration of a node's calls.", "", NODES),
    (
        "node/<name>/reward", "reward", "Mean of the rewards that a node, or its steps, were given.",
        "rises", NODES,
    ),
    # -- the judge
    ("judge_calls", "count", "Calls of the judge for the step's groups.", "", JUDGE),
    ("judge_prompt_tokens", "tokens", "Tokens that the judge read.", "", JUDGE),
    ("judge_completion_tokens", "tokens", "Tokens that the judge wrote.", "", JUDGE),
    ("judge_cost", "currency", "What the judge cost, in the currency of Ruler(price=...).", "", JUDGE),
    # -- time
    ("time/step", "seconds", "From the end of the step before to the end of this one.", "", TIME),
    ("time/rollout", "seconds", "Of it, waiting for rollouts.", "most of it, in most runs", TIME),
    ("time/judge", "seconds", "Of it, waiting for the judge when no rollout ran.", "", TIME),
    ("time/train", "seconds", "Of it, training.", "", TIME),
    (
        "time/publish", "seconds", "Of it, handing the machine over between server and trainer, writing the "
        "checkpoint, serving the new version.", "little", TIME,
    ),
    ("time/wait", "seconds", "Of it, anything else: the caller's own code.", "little", TIME),
    (
        "tokens_per_second/rollout", "tokens/s", "Tokens sampled per second in which rollouts ran.", "steady",
        TIME,
    ),
    (
        "tokens_per_second/train", "tokens/s", "Tokens trained per second of training.", "steady", TIME,
    ),
    ("seconds", "seconds", "What the trainer itself took.", "", TIME),
    (
        "gpu_memory_peak", "bytes", "Most of the GPU's memory that the trainer's tensors took so far.",
        "below the GPU's", TIME,
    ),
    # -- vLLM's own
    ("serving/running_mean", "requests", "Requests in progress, mean over the samples.", "", SERVING),
    ("serving/running_max", "requests", "Requests in progress, most at a time.", "", SERVING),
    (
        "serving/waiting_mean", "requests", "Requests that wait for room, mean over the samples.",
        "about 0; more: fewer rollouts at a time, or more replicas", SERVING,
    ),
    ("serving/waiting_max", "requests", "Requests that wait for room, most at a time.", "", SERVING),
    (
        "serving/kv_cache_usage_mean", "share", "KV cache in use on the fullest replica, mean.",
        "below 1: when it is full, requests wait", SERVING,
    ),
    ("serving/kv_cache_usage_max", "share", "KV cache in use on the fullest replica, most.", "", SERVING),
    ("serving/prompt_tokens_per_second", "tokens/s", "Prompt tokens read per second.", "", SERVING),
    ("serving/generation_tokens_per_second", "tokens/s", "Tokens sampled per second.", "", SERVING),
    ("serving/preemptions", "count", "Requests that were thrown out for want of KV cache.", "0", SERVING),
    (
        "serving/prefix_cache_hit_rate", "share", "Prompt tokens found in the prefix cache.",
        "high when groups share their prompts", SERVING,
    ),
    ("serving/time_to_first_token_seconds_mean", "seconds", "Mean time to the first token.", "", SERVING),
    ("serving/inter_token_latency_seconds_mean", "seconds", "Mean time between tokens.", "", SERVING),
    ("serving/request_queue_time_seconds_mean", "seconds", "Mean time that a request waits.", "about 0",
     SERVING),
)  # fmt: skip

METRICS: Mapping[str, MetricSpec] = MappingProxyType(
    {name: MetricSpec(name, unit, what, healthy, group) for name, unit, what, healthy, group in _CATALOGUE}
)
"""Every metric by its name; patterns under their own."""


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], MetricSpec], ...]:
    def as_regex(name: str) -> str:
        # Names that a run brings along may hold a slash.
        return "".join("(.+)" if part.startswith("<") else re.escape(part) for part in _parts(name))

    return tuple((re.compile(as_regex(spec.name)), spec) for spec in METRICS.values() if spec.is_pattern)


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"(<[^>]*>)", name) if part]


def spec_of(name: str) -> MetricSpec | None:
    """What a metric means; None for one that nobody documented, as of a user's own."""
    found, _ = resolved(name)
    return found


def resolved(name: str) -> tuple[MetricSpec | None, str | None]:
    """A metric's meaning, and the name in it that the run brought along, of a node for example."""
    if name in METRICS and not METRICS[name].is_pattern:
        return METRICS[name], None
    for pattern, spec in _patterns():
        if matched := pattern.fullmatch(name):
            return spec, matched.group(1)
    return None, None


BEGIN, END = "<!-- metrics begin -->", "<!-- metrics end -->"
"""Marks around the table on its page."""


def metrics_table() -> str:
    """The catalogue as Markdown, a table under the heading of each group."""
    lines: list[str] = []
    for group in dict.fromkeys(spec.group for spec in METRICS.values()):
        lines += [f"### {group}", "", "| name | unit | what it is | healthy |", "|---|---|---|---|"]
        for spec in METRICS.values():
            if spec.group == group:
                lines.append(f"| `{spec.name}` | {spec.unit} | {spec.what} | {spec.healthy} |")
        lines.append("")
    return "\n".join(lines)


def _main() -> None:
    """Bring the table in ``docs/metrics.md`` up to date: ``python -m art_core.observe.metrics PATH``."""
    page = Path(sys.argv[1])
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{metrics_table()}{END}{after}")


if __name__ == "__main__":
    _main()
