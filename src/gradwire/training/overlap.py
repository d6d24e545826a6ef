"""Optimizer steps that overlap with the backward pass: each bucket as it arrives."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.ddp import Runner, SteppingRunner, Wire, attachment_of, step_parameters
from gradwire.lanes import open_local_lane
from gradwire.peers import Group


class OverlappedOptimizer(Optimizer):
    """An optimizer whose steps are taken during ``backward()``; schedulers and checkpoints take it as it is.

    `step` has nothing left to do, and refuses what cannot be right any more. When the wire has been
    detached, it steps as usual.
    """

    # No `super().__init__()`: param groups and state are those of the optimizer inside.
    def __init__(self, optimizer: Optimizer, wire: Wire) -> None:
        self.optimizer = optimizer
        """The optimizer that takes the steps."""
        self._wire = wire
        self._versions: dict[nn.Parameter, tuple[int, int]] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # What GradScaler.step looks at first.
        if self._wire.attached:
            raise RuntimeError(
                "a GradScaler cannot be used with overlap_optimizer: gradients would have to be unscaled, "
                "and a step with infinite ones skipped, before the first bucket is stepped. Train in bf16, "
                "which needs no scaler, or step as usual"
            )
        return getattr(self.optimizer, "_step_supports_amp_scaling", False)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do nothing, since ``backward()`` has done it; raises RuntimeError for changed gradients."""
        if not self._wire.attached:
            return self.optimizer.step(closure)
        if closure is not None:
            raise ValueError("overlap_optimizer takes no closure: backward() itself takes the step")
        self._refuse_changed_gradients()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, as of any optimizer."""
        self._refuse_changed_gradients()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer inside, as without overlap."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` or an optimizer without overlap has saved."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model that have not been optimized so far; ValueError for others."""
        # What torch takes for params, iterators and named pairs too, it knows best itself.
        self.optimizer.add_param_group(param_group)
        try:
            _check(self.optimizer, self._wire)
        except ValueError:
            self.optimizer.param_groups.pop()
            raise

    def __repr__(self) -> str:
        return f"Overlapped {self.optimizer!r}"

    def note_gradients(self) -> None:
        """Remember the gradients that the steps were taken with."""
        self._versions = {
            parameter: (id(parameter.grad), parameter.grad._version)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }

    def _refuse_changed_gradients(self) -> None:
        versions, self._versions = self._versions, {}
        for parameter, version in versions.items():
            grad = parameter.grad
            if grad is not None and id(grad) == version[0] and grad._version != version[1]:
                raise RuntimeError(
                    "gradients were changed after backward(), which had already taken the step with them: "
                    "clipping by the global norm, for one, needs every gradient before the first step. "
                    "Step as usual, without overlap_optimizer, or leave the change out"
                )


def overlap_optimizer(
    wire: Wire, optimizer_factory: Callable[[list[nn.Parameter]], Optimizer]
) -> OverlappedOptimizer:
    """Step each bucket's parameters as soon as it has been averaged, while others still travel.

    Args:
        wire: what `attach` returned.
        optimizer_factory: makes the optimizer from the model's trainable parameters; to make param
            groups, it may take them from the model itself.

    The training loop stays as it is: ``optimizer.step()`` does nothing, since ``backward()`` has done it.
    Step hooks of the optimizer run once for each bucket. When an averaging fails, buckets before it may
    have been stepped.

    Raises:
        TypeError: the factory makes no ``torch.optim.Optimizer``.
        ValueError: the optimizer needs a closure (LBFGS) or holds parameters of something else, the model
            may leave parameters unused (``find_unused_parameters``), or it overlaps already.

    A ``GradScaler``, and gradients that change between ``backward()`` and ``step()`` (clipping by the
    global norm), are refused with RuntimeError when they are met.

    Example::

        wire = gradwire.attach(model, "bf16")
        optimizer = gradwire.overlap_optimizer(wire, lambda params: torch.optim.SGD(params, lr=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    """
    ddp = wire.model
    parameters = [p for p in ddp.module.parameters() if p.requires_grad]
    optimizer = optimizer_factory(parameters)
    _check(optimizer, wire)
    overlapped = OverlappedOptimizer(optimizer, wire)
    if wire.attached:
        device = parameters[0].device

        def wrap(runner: Runner) -> SteppingRunner:
            if isinstance(runner, SteppingRunner):
                raise ValueError("this wire steps an optimizer already; detach it and attach again")
            return SteppingRunner(
                runner,
                open_local_lane(device, f"step-{runner.name}"),
                functools.partial(_step, optimizer),
                after_backward=overlapped.note_gradients,
            )

        attachment_of(wire).wrap_runner(wrap)
    return overlapped


def _step(
    optimizer: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor], group: Group
) -> None:
    step_parameters(optimizer, parameters, gradients)


def _check(optimizer: Optimizer, wire: Wire) -> None:
    ddp = wire.model
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer_factory must make a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{type(optimizer).__name__} needs a closure: it cannot step bucket by bucket")
    if attachment_of(wire).looks_at_gradients:
        raise ValueError(
            "this wire was attached with on_nonfinite=, which looks at all gradients before any step is "
            "taken; attach it without, or step as usual"
        )
    if ddp.find_unused_parameters:
        raise ValueError(
            "this model was made with find_unused_parameters=True: whether a parameter was used on any rank "
            "is known after the backward pass alone, too late for a step in it. Step as usual"
        )
    if ddp.mixed_precision is not None:
        raise ValueError(
            "this model was made with mixed_precision=: during the backward pass its parameters are the "
            "low-precision copies, not those to be stepped. Step as usual"
        )
    own = set(map(id, ddp.module.parameters()))
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "the optimizer holds parameters that are not the model's: no bucket would ever step them"
        )
