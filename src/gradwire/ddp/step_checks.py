"""The checks and records that follow each backward pass."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from gradwire.ddp.nonfinite import NonfinitePolicy
from gradwire.ddp.runner import Runner
from gradwire.ddp.verification import Verification
from gradwire.errors import Place, WireError
from gradwire.peers import Group
from gradwire.telemetry import ParameterStats, Recorder

log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class StepChecks:
    """The checks and records of a wire; None for each that was not asked for."""

    policy: NonfinitePolicy | None = None
    verification: Verification | None = None
    recorder: Recorder | None = None

    @property
    def num_skipped(self) -> int:
        """The number of steps that ``on_nonfinite="skip"`` has skipped."""
        return 0 if self.policy is None else self.policy.num_skipped

    @property
    def parameters(self) -> tuple[ParameterStats, ...]:
        """The errors of the last step that telemetry measured, parameter by parameter."""
        return () if self.recorder is None else self.recorder.parameters

    def finish_step(
        self, runner: Runner, place: Place, device: torch.device, *, is_verified: bool = False
    ) -> None:
        """Check the gradients that a backward pass has averaged, and record the step.

        With ``is_verified``, `verify` has been called before.
        """
        try:
            if not is_verified:
                self.verify(runner, place, device, shadow=False)
            if self.policy is not None:
                self.policy.look(place.step)
        except (FloatingPointError, WireError) as error:
            self.record_failure(place.step, error)
            raise
        if self.recorder is not None:
            self.recorder.end_step(place.step, runner.stats, self.num_skipped)

    def verifies(self, step: int) -> bool:
        """Return True if gradients are compared with other ranks' after this step."""
        return self.verification is not None and self.verification.is_due(step)

    def verify(self, runner: Runner, place: Place, device: torch.device, *, shadow: bool) -> None:
        """Compare gradients and parameters with the other ranks', if this step is due."""
        verification = self.verification
        if verification is None:
            return
        verification.conclude()
        if not verification.is_due(place.step):
            return
        own, found = verification.hashes(shadow=shadow), []

        def work(group: Group, device: torch.device) -> None:
            try:
                verification.compare(own, place.step, place.rank, group, device)
            except WireError as error:
                found.append(error)  # no failure of the wire, which goes on

        runner.run_collective(work, place, device)
        if runner.failure is not None:
            self.record_failure(place.step, runner.failure)
            raise runner.failure.with_traceback(None)
        if found:
            raise found[0]

    def record_event(self, event: str, step: int, **details: object) -> None:
        """Record an event."""
        if self.recorder is not None:
            self.recorder.write_event(event, step, **details)

    def record_failure(self, step: int, error: Exception) -> None:
        """Record an error, once."""
        if self.recorder is not None:
            self.recorder.write_failure(step, error)

    def close(self, *, has_failed: bool = False) -> None:
        """Close the recorder's file; log what the last step on CUDA has left to find.

        After a failure nothing is looked for: the device may wait for a rank that is gone.
        """
        for check in (self.verification, self.policy):
            if check is not None and not has_failed:
                _conclude(check)
        if self.recorder is not None:
            self.recorder.close()


def _conclude(check: Verification | NonfinitePolicy) -> None:
    try:
        check.conclude()
    except (FloatingPointError, WireError) as error:
        log.error("%s", error)
