"""The optimizer of one kind of training: AdamW with clipping and a learning-rate schedule.

Invariant: parameters and state move in ``step`` alone, all of them together or none.
"""

from collections.abc import Sequence
from typing import Any

import torch

DECAY_TO = 0.1
"""Share of the peak learning rate that linear decay ends at."""


def scheduled_rate(peak: float, update: int, *, warmup: int = 0, total: int | None = None) -> float:
    """The learning rate of an update: linear warm-up, then constant, or linear decay to a tenth.

    Args:
        peak: the highest rate.
        update: updates made before this one.
        warmup: updates of warm-up; the first one uses ``peak / (warmup + 1)``.
        total: updates after which the decay has ended; None: no decay.
    """
    if update < warmup:
        return peak * (update + 1) / (warmup + 1)
    if total is None:
        return peak
    gone = min(1.0, (update - warmup) / max(1, total - warmup))
    return peak * (1 - (1 - DECAY_TO) * gone)


class Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over a policy's trainable parameters.

    Args:
        parameters: what is updated.
        weight_decay: decoupled weight decay.
        max_grad_norm: gradients whose norm is larger are scaled down to it.
        offload: keep the state, twice the parameters' size, in the host's memory and step there; gradients
            and new weights are copied over.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        weight_decay: float,
        max_grad_norm: float,
        offload: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self._hosts = [_on_host(p) for p in self.parameters] if offload else self.parameters
        self.max_grad_norm = max_grad_norm
        self.updates = 0
        # One kernel for all parameters where they lie on a GPU: hundreds of small ones take longer to launch.
        self._fused = all(p.device.type == "cuda" for p in self._hosts)
        self._adamw = torch.optim.AdamW(
            self._hosts, lr=0.0, weight_decay=weight_decay, fused=self._fused or None
        )

    @property
    def bytes_to_come(self) -> int:
        """What the state will take of the device's memory, as far as it is not there yet."""
        if self._hosts is not self.parameters:
            return 0
        missing = (p for p in self.parameters if p not in self._adamw.state)
        return sum(2 * p.numel() * p.element_size() for p in missing)

    def reconfigure(self, *, weight_decay: float, max_grad_norm: float) -> None:
        """Other settings from the next step on."""
        self.max_grad_norm = max_grad_norm
        for group in self._adamw.param_groups:
            group["weight_decay"] = weight_decay

    def zero_grad(self) -> None:
        """Forget gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def grad_norm(self) -> float:
        """Norm of all gradients together, as they are now; not finite when one of them is not."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    def step(self, learning_rate: float, grad_norm: float) -> None:
        """Make one update with the gradients that have been accumulated.

        Args:
            learning_rate: of this update.
            grad_norm: what `grad_norm` said.
        """
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, torch.tensor(grad_norm))
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        if self._hosts is self.parameters:
            self._adamw.step()
        else:
            self._step_on_host()
        self.updates += 1

    def _step_on_host(self) -> None:
        with torch.no_grad():
            for parameter, host in zip(self.parameters, self._hosts, strict=True):
                # The weights too: a checkpoint may have been loaded into the model since the last step.
                host.copy_(parameter)
                host.grad = None if parameter.grad is None else parameter.grad.to("cpu")
            self._adamw.step()
            for parameter, host in zip(self.parameters, self._hosts, strict=True):
                parameter.copy_(host)
                host.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on, beside the parameters."""
        return {"adamw": self._adamw.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: the state belongs to other parameters.
        """
        # How it is computed, and where it counts its steps, is this machine's affair; AdamW by itself would
        # take both over from the state.
        groups = [{**group, "fused": self._fused or None} for group in state["adamw"]["param_groups"]]
        moments = {n: {**each, "step": each["step"].cpu()} for n, each in state["adamw"]["state"].items()}
        self._adamw.load_state_dict({"param_groups": groups, "state": moments})
        self.updates = int(state["updates"])


def _on_host(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    copy = torch.empty_like(parameter, device="cpu", pin_memory=parameter.device.type == "cuda")
    return torch.nn.Parameter(copy.copy_(parameter.detach()))
