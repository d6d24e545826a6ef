"""Optimizer steps that overlap with the backward pass, bucket by bucket."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.ddp import Runner, SteppingRunner, Wire, ddp_attachment_of, step_parameters, unwrap
from gradwire.lanes import open_local_lane
from gradwire.peers import Group
from gradwire.torch_private import num_writes


class OverlappedOptimizer(Optimizer):
    """An optimizer that steps during ``backward()``; schedulers and checkpoints accept it like any other.

    `step` has nothing left to do. It raises if gradients were changed after they were used. When the wire
    has been detached, it steps as usual.

    >>> wire = gradwire.attach(model, "bf16")
    >>> optimizer = gradwire.overlap_optimizer(wire, torch.optim.SGD)
    >>> model(inputs).sum().backward()  # takes the step
    >>> optimizer.step()
    """

    # No `super().__init__()`: param groups and state are those of the inner optimizer.
    def __init__(self, optimizer: Optimizer, wire: Wire) -> None:
        self.optimizer = optimizer
        """The optimizer that takes the steps."""
        self._wire = wire
        self._used: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}
        """The gradients that steps have used, each with the number of writes to it so far."""
        self._awaits_step = False

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
        # GradScaler.step reads this first, so this is where a scaler is refused.
        if self._wire.attached:
            self._awaits_step = False  # what was missed is told here
            raise RuntimeError(
                "a GradScaler cannot be used with overlap_optimizer: gradients would have to be unscaled, "
                "and a step with infinite ones skipped, before the first bucket is stepped. Train in bf16, "
                "which needs no scaler, or step as usual"
            )
        return getattr(self.optimizer, "_step_supports_amp_scaling", False)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do nothing, since ``backward()`` has taken the step; RuntimeError for changed gradients."""
        if not self._wire.attached and not (closure is None and self._holds_used_gradients()):
            return self.optimizer.step(closure)
        if closure is not None:
            raise ValueError(
                "overlap_optimizer takes no closure, since backward() takes the step; leave it out"
            )
        self._refuse_changed_gradients()
        self._awaits_step = False
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, as any optimizer does; RuntimeError if they were changed after the step."""
        self._refuse_changed_gradients()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this or of an optimizer without overlap returned."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model that are not optimized yet; ValueError for others."""
        # Added first, then checked: torch itself turns iterators and named pairs into parameters.
        self.optimizer.add_param_group(param_group)
        try:
            _check(self.optimizer, self._wire)
        except ValueError:
            self.optimizer.param_groups.pop()
            raise

    def __repr__(self) -> str:
        return f"Overlapped {self.optimizer!r}"

    def note_gradients(self) -> None:
        """Remember the gradients that the steps have used, and that `step` is due."""
        self._awaits_step = True
        self._used = {
            parameter: (weakref.ref(parameter.grad), num_writes(parameter.grad))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }

    def refuse_missed_step(self) -> None:
        """Raise RuntimeError if `step` was not called after the last backward pass."""
        if self._awaits_step:
            raise RuntimeError(
                "backward() runs again before optimizer.step(), but with overlap_optimizer the last one has "
                "taken its step already. To accumulate gradients, run all backward passes but the last "
                "inside model.no_sync(). To skip steps, step as usual, without overlap_optimizer"
            )

    def _holds_used_gradients(self) -> bool:
        """Return True if the step with the present gradients was taken before the wire was detached."""
        is_due = self._awaits_step and self._wire.failure is None
        return is_due and any(p.grad is not None and p.grad is used() for p, (used, _) in self._used.items())

    def _refuse_changed_gradients(self) -> None:
        before, self._used = self._used, {}
        for parameter, (used, number) in before.items():
            grad = parameter.grad
            if grad is not None and grad is used() and num_writes(grad) != number:
                self._awaits_step = False  # what was missed is told here
                raise RuntimeError(
                    "gradients were changed after backward(), which had already taken the step with them: "
                    "clipping by the global norm, for one, needs every gradient before the first step. "
                    "Step as usual, without overlap_optimizer, or leave the change out"
                )


def overlap_optimizer(
    wire: Wire, optimizer_factory: Callable[[list[nn.Parameter]], Optimizer]
) -> OverlappedOptimizer:
    """Step each bucket's parameters as soon as the bucket is averaged, while others still travel.

    Args:
        wire: the result of `attach`.
        optimizer_factory: makes the optimizer from the model's trainable parameters. To make param groups,
            it may take the parameters from the model itself.

    The training loop stays as it is: ``optimizer.step()`` does nothing, since ``backward()`` has taken the
    step. Step hooks of the optimizer run once per bucket. If the averaging of a bucket fails, earlier
    buckets may have been stepped.

    Raises:
        TypeError: the factory makes no ``torch.optim.Optimizer``.
        ValueError: the optimizer needs a closure (LBFGS) or holds parameters that are not the model's, the
            model may leave parameters unused (``find_unused_parameters``), or the wire overlaps already.

    The optimizer raises RuntimeError when it is used with a ``GradScaler``, or when gradients change between
    ``backward()`` and ``step()``, as in clipping by the global norm. ``backward()`` raises it if ``step()``
    was not called since the last one: accumulate inside ``model.no_sync()``.

    >>> wire = gradwire.attach(model, "bf16")
    >>> optimizer = gradwire.overlap_optimizer(wire, lambda params: torch.optim.SGD(params, lr=0.1))
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    """
    _check_factory(optimizer_factory)
    ddp = unwrap(wire.model)
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
                before_backward=overlapped.refuse_missed_step,
                after_backward=overlapped.note_gradients,
            )

        ddp_attachment_of(wire).wrap_runner(wrap)
    return overlapped


def _step(
    optimizer: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor], group: Group
) -> None:
    step_parameters(optimizer, parameters, gradients)


def _check_factory(factory: object) -> None:
    if isinstance(factory, Optimizer):
        name = type(factory).__name__
        raise TypeError(
            f"overlap_optimizer takes a function that makes the optimizer, not the optimizer ({name}): pass "
            f"lambda params: torch.optim.{name}(params, lr=...)"
        )
    if not callable(factory):
        raise TypeError(
            "overlap_optimizer takes a function that makes the optimizer from a list of parameters, not "
            f"{type(factory).__name__}"
        )


def _check(optimizer: Optimizer, wire: Wire) -> None:
    ddp = unwrap(wire.model)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer_factory must make a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} needs a closure, so it cannot step bucket by bucket: step as usual"
        )
    if ddp_attachment_of(wire).checks_nonfinite:
        raise ValueError(
            "this wire was attached with on_nonfinite=, which checks all gradients before any step is "
            "taken; attach without it, or step as usual"
        )
    if ddp.find_unused_parameters:
        raise ValueError(
            "this model was made with find_unused_parameters=True: which parameters were used on any rank is "
            "known only after the backward pass, too late to step during it. Step as usual"
        )
    if ddp.mixed_precision is not None:
        raise ValueError(
            "this model was made with mixed_precision=: during the backward pass its parameters are the "
            "low-precision copies, not the ones to step. Step as usual"
        )
    own = set(map(id, ddp.module.parameters()))
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "the optimizer holds parameters that are not the model's, which no bucket would ever step; "
            "give those an optimizer of their own"
        )
