"""The trainer: turns scored groups into updates of a policy's adapter.

Invariant: a call either trains what it was given, or says what it did not train and why; when no
group has a spread of rewards, weights and optimizer stay as they were, bit for bit.

Groups become minibatches (`batch`), their trees become gradients piece by piece (`update`), a gradient that
passes the guardrails becomes one step of the optimizer.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from art_core.config import GuardrailConfig, TrainConfig
from art_core.errors import ConfigError
from art_core.selection import Train
from art_core.training.batch import Batch, Minibatch, minibatch, prepare, tree_metrics
from art_core.training.coefficients import Coefficients
from art_core.training.figures import memory_metrics, mix_metrics, update_metrics
from art_core.training.footprint import found_budget
from art_core.training.guardrails import Guardrails, TrainEvent
from art_core.training.keeping import Keeping
from art_core.training.memory import EFFICIENT, TokenBudget
from art_core.training.optimizer import Optimizer, scheduled_rate
from art_core.training.paths import PathChoice
from art_core.training.policy import BASE, TRAINING, Policy
from art_core.training.ranks import Alone, Ranks
from art_core.training.report import TrainReport
from art_core.training.samples import canonical
from art_core.training.sft import Supervised, check_options, supervised_samples
from art_core.training.trained import account
from art_core.training.untrained_tokens import UntrainedTokens
from art_core.training.update import (
    Passes,
    UpdateFigures,
    accumulate_policy_gradient,
    accumulate_sft_gradient,
    reads_ahead,
    reference_logprobs,
)
from art_core.types import TrajectoryGroup

Progress = Callable[[int, int], None]
"""Called as ``progress(done, total)`` after each forward pass."""


class Trainer:
    """Trains a policy's adapter.

    One optimizer serves every call of `train`; warm starts (`sft`) have their own, since the size of
    their gradients says nothing about those of a policy loss.

    When one call makes several updates (``epochs``, ``groups_per_update``), all of them are measured
    against the policy that the call began with: that one's log-probabilities are the *proximal* ones of
    `losses.policy_loss`.

    Args:
        policy: what is trained.
        config: how.
        seed: of what is shuffled.
        ranks: the processes that train together; None: this one alone.
    """

    def __init__(
        self, policy: Policy, config: TrainConfig, *, seed: int = 0, ranks: Ranks | None = None
    ) -> None:
        self.policy = policy
        self.config = config
        self.ranks: Ranks = ranks or Alone()
        self._keeping = Keeping(policy, self.ranks, config.gradient_checkpointing)
        self.budget = TokenBudget(
            self._token_budget(),
            self.ranks,
            policy.trainable_parameters(),
            lambda: policy.path,
            self._keeping.relieve,
            self._foresee,
        )
        self._paths = PathChoice(policy, config.path, self.ranks)
        self.generator = torch.Generator().manual_seed(seed)
        self.optimizer = self._new_optimizer()
        self.sft_optimizer = self._new_optimizer()
        self.coefficients = Coefficients.of(config)
        self.guardrails = Guardrails(config.guardrails)
        self._untrained = UntrainedTokens(policy)

    def _new_optimizer(self) -> Optimizer:
        return Optimizer(
            self.policy.trainable_parameters(),
            weight_decay=self.config.weight_decay,
            max_grad_norm=self.config.max_grad_norm,
            offload=self.config.optimizer_offload,
        )

    def _token_budget(self) -> int | Callable[[], int]:
        budget = self.config.token_budget
        if budget != "auto":
            return budget
        # Found when the first tree is cut; AdamW's state comes with its first step, after that.
        return self._found_budget

    def _found_budget(self) -> int:
        self._foresee(EFFICIENT)
        return found_budget(self.policy, self.ranks, self.optimizer.bytes_to_come)

    def _foresee(self, places: int) -> str | None:
        return self._keeping.foresee(places, self.optimizer.bytes_to_come)

    def _take_path(self, minibatches: Sequence[Minibatch]) -> None:
        """Let the policy take the path on which these go fastest."""
        if minibatches:
            self.policy.path = self._paths.of([m.tree for m in minibatches])

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on, beside the adapter and the configuration."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "sft_optimizer": self.sft_optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "coefficients": self.coefficients.state_dict(),
            "guardrails": self.guardrails.state_dict(),
        }

    def save_state(self, path: Path, generators: Mapping[str, Any]) -> None:
        """Write `state_dict`, and the random generators of whoever calls, for `checkpoints`."""
        with path.open("wb") as out:
            torch.save({"trainer": self.state_dict(), "generators": dict(generators)}, out)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` said."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.sft_optimizer.load_state_dict(state["sft_optimizer"])
        self.generator.set_state(state["generator"])
        self.coefficients = Coefficients(**state["coefficients"])
        self.guardrails.load_state_dict(state["guardrails"])

    def set_config(self, config: TrainConfig) -> None:
        """Train on with other settings, from the next call on. The optimizer goes on as it is."""
        before, self.config = self.config, config
        if config.token_budget != before.token_budget:
            self.budget.reset(self._token_budget())
        if config.path != before.path:
            self._paths = PathChoice(self.policy, config.path, self.ranks)
        self._keeping.want(config.gradient_checkpointing)
        self.guardrails.config = config.guardrails
        for optimizer in (self.optimizer, self.sft_optimizer):
            optimizer.reconfigure(weight_decay=config.weight_decay, max_grad_norm=config.max_grad_norm)

    def stop(self, why: str) -> TrainEvent:
        """End the training as a guardrail does; `resume` takes it back."""
        return self.guardrails.stop(why)

    def resume(self) -> None:
        """Train on after a guardrail's stop."""
        self.guardrails.resume()

    def forget_rewards(self) -> None:
        """Compare no later reward with earlier ones: they are on another scale."""
        self.guardrails.forget_rewards()

    def close(self) -> None:
        """Let go of what it holds open: nothing, in this process (see `launch.TrainerProcesses`)."""

    def train(
        self,
        groups: Sequence[TrajectoryGroup],
        *,
        train: Train = None,
        imitate: Sequence[Supervised] = (),
        progress: Progress | None = None,
    ) -> TrainReport:
        """Make the updates that a batch of groups is good for.

        Args:
            groups: with rewards. Failed and unscored members are left out of baselines and updates.
            train: which steps to train, as in ``Nodes("planner")``; None: every one that can be.
            imitate: a data set mixed in against forgetting: each update draws ``sft_batch`` of its items
                and adds ``sft_weight`` times their mean negative log-likelihood.
            progress: called after each forward pass.

        Raises:
            ConfigError: there is something to imitate and no ``sft_weight``, or the other way round.
            NothingToTrainError: no group, no reward, or no step that can be trained. Groups without a
                spread of rewards are no error: the report counts them.
            TrainingStoppedError: a guardrail ended the training earlier.
        """
        began = time.perf_counter()
        config = self.config
        _check_mix(config, imitate)
        self.guardrails.require_going()
        batch = prepare(
            groups, config, self.generator, train=train, context_length=self.policy.context_length
        )
        self._take_path(batch.minibatches)
        passes = self._passes(self._progress(batch, progress))
        several = config.epochs * len(batch.minibatches) > 1
        base = [
            reference_logprobs(passes, m.tree, BASE) if config.kl_coef else None for m in batch.minibatches
        ]
        # The first update sees the proximal policy itself; later minibatches must be read before it.
        proximal = [
            reference_logprobs(passes, m.tree, TRAINING) if i and several else None
            for i, m in enumerate(batch.minibatches)
        ]
        seen: list[UpdateFigures] = []
        last: dict[int, UpdateFigures] = {}  # by minibatch, of updates that were made
        imitated: list[float] = []
        norms: list[float] = []
        events: list[TrainEvent] = []
        rate = self._rate()
        used = Coefficients.of(config, self.coefficients)
        for _ in range(config.epochs):
            for i, m in enumerate(batch.minibatches):
                self.optimizer.zero_grad()
                used = Coefficients.of(config, self.coefficients)
                figures = accumulate_policy_gradient(
                    passes, m.tree, config, used, proximal=proximal[i], base=base[i]
                )
                if proximal[i] is None:
                    proximal[i] = figures.logprob
                seen.append(figures)
                losses, untrained = self._imitate(m, imitate)
                imitated += losses
                events += untrained
                rate = self._rate()
                norm, event = self._apply(self.optimizer, figures, rate, self.guardrails)
                norms.append(norm)
                events += [event] if event else []
                if event is None:
                    last[i] = figures
                    self.coefficients = used.after(
                        config, kl=figures.mean_kl_base, entropy=figures.mean_entropy
                    )
        events += self.budget.take_events()
        metrics = {
            **batch.metrics,
            **update_metrics(seen, norms, rate, skipped=_skipped(events)),
            **mix_metrics(config, used, imitated),
            **memory_metrics(self.policy.device),
            "seconds": time.perf_counter() - began,
        }
        events += self.guardrails.after(metrics)
        trained = [t for i, figures in last.items() for t in account(batch.minibatches[i].samples, figures)]
        return TrainReport(metrics, tuple(events), dict(batch.left_out), tuple(trained))

    def sft(
        self,
        data: Sequence[Supervised],
        *,
        batch_size: int = 32,
        steps: int | None = None,
        epochs: int = 1,
        learning_rate: float | None = None,
        progress: Progress | None = None,
    ) -> TrainReport:
        """Imitate: raise the likelihood of given answers, as a warm start.

        The loss is the mean negative log-likelihood of the answers' tokens (end token included).

        Args:
            data: conversations, trajectories (whose sampled tokens are imitated) or samples.
            batch_size: answers in one update.
            steps: updates; None: as many as ``epochs`` passes need.
            epochs: passes over the data, when ``steps`` does not say.
            learning_rate: constant; None: the configuration's.
            progress: called as ``progress(updates done, updates in all)``.

        Raises:
            ChatTemplateError: the chat template refuses a conversation.
            ConfigError: a number is out of range.
            NothingToTrainError: there is no answer to imitate.
        """
        began = time.perf_counter()
        rate = self.config.learning_rate if learning_rate is None else learning_rate
        check_options(batch_size, steps, epochs, rate)
        samples = canonical(supervised_samples(self.policy.tokenizer, data))
        events = [*self._untrained.among(samples, aloud=self.ranks.rank == 0)]
        per_epoch = -(-len(samples) // batch_size)
        total = epochs * per_epoch if steps is None else steps
        batches: list[Minibatch] = []
        seen: list[UpdateFigures] = []
        norms: list[float] = []
        order: list[int] = []
        imitating = Guardrails(GuardrailConfig(max_kl=None, max_norm_growth=None))
        for step in range(total):
            if step % per_epoch == 0:
                order = torch.randperm(len(samples), generator=self.generator).tolist()
            at = step % per_epoch * batch_size
            batch = minibatch([samples[i] for i in order[at : at + batch_size]], "token")
            self.sft_optimizer.zero_grad()
            self._take_path([batch])
            figures = accumulate_sft_gradient(self._passes(), batch.tree, seed=self._dropout_seed())
            norm, event = self._apply(self.sft_optimizer, figures, rate, imitating)
            batches.append(batch)
            seen.append(figures)
            norms.append(norm)
            events += [event] if event else []
            if progress is not None:
                progress(step + 1, total)
        events += self.budget.take_events()
        metrics = {
            **tree_metrics(batches, samples),
            **update_metrics(seen, norms, rate, skipped=_skipped(events)),
            **memory_metrics(self.policy.device),
            "seconds": time.perf_counter() - began,
        }
        return TrainReport(metrics, tuple(events))

    def _imitate(
        self, batch: Minibatch, data: Sequence[Supervised]
    ) -> tuple[list[float], Sequence[TrainEvent]]:
        """Add the gradient of what one update imitates; its mean negative log-likelihood, if anything."""
        config = self.config
        chosen = torch.randperm(len(data), generator=self.generator)[: config.sft_batch].tolist()
        samples = [*supervised_samples(self.policy.tokenizer, [data[i] for i in chosen])] if chosen else []
        events = self._untrained.among(samples, aloud=self.ranks.rank == 0)
        samples += batch.best
        if not samples:
            return [], events
        mixed = minibatch(samples, "token", scale=config.sft_weight)
        figures = accumulate_sft_gradient(self._passes(), mixed.tree, seed=self._dropout_seed())
        return [figures.loss / config.sft_weight], events

    def _passes(self, advance: Callable[[], None] = lambda: None) -> Passes:
        self.budget.forget()
        return Passes(self.policy, self.budget, self.ranks, advance)

    def _dropout_seed(self) -> int | None:
        """Of one update, from the generator that checkpoints keep; None where nothing is dropped."""
        lora = self.policy.lora
        if lora is None or not lora.dropout:
            return None
        return int(torch.randint(2**31, (), generator=self.generator))

    def _rate(self) -> float:
        return self.guardrails.rate_scale * scheduled_rate(
            self.config.learning_rate,
            self.optimizer.updates,
            warmup=self.config.warmup_updates,
            total=self.config.total_updates,
        )

    def _apply(
        self, optimizer: Optimizer, figures: UpdateFigures, rate: float, guardrails: Guardrails
    ) -> tuple[float, TrainEvent | None]:
        self.ranks.sum_gradients(optimizer.parameters)
        norm = optimizer.grad_norm()
        event = guardrails.check(
            update=optimizer.updates, loss=figures.loss, grad_norm=norm, kl_old_new=figures.kl_old_new
        )
        if event is None:
            with self.policy.lock:
                optimizer.step(rate, norm)
        optimizer.zero_grad()
        return norm, event

    def _progress(self, batch: Batch, progress: Progress | None) -> Callable[[], None]:
        if progress is None:
            return lambda: None
        pieces = [len(self.budget.share(m.tree).pieces) for m in batch.minibatches]
        config = self.config
        total = sum(pieces) * (config.epochs + (1 if config.kl_coef else 0)) + sum(pieces[1:])
        total += sum(pieces[:1]) * reads_ahead(config, first=True)
        total += (sum(pieces) * config.epochs - sum(pieces[:1])) * reads_ahead(config, first=False)
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            progress(done, max(done, total))  # there are more passes once the budget was lowered

        return advance


def _skipped(events: Sequence[TrainEvent]) -> int:
    return sum(event.kind == "update_skipped" for event in events)


def _check_mix(config: TrainConfig, imitate: Sequence[Supervised]) -> None:
    if imitate and not config.sft_weight:
        raise ConfigError(
            f"{len(imitate)} items to imitate were given, but sft_weight is 0: set it, 0.1 for example"
        )
    if config.sft_weight and not imitate and not config.sft_own_best:
        raise ConfigError(
            f"sft_weight={config.sft_weight:g}, but there is nothing to imitate: give train(imitate=...) a "
            "data set, or set sft_own_best"
        )
