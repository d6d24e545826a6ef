"""A policy of recipe `auto` in a simulated run: a model of step times, a clock, and reports of them."""

import random
import statistics
from dataclasses import dataclass, field

import torch

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.recipes import ENCODINGS
from gradwire.tuning.choices import Chooser
from gradwire.tuning.errors import ErrorTable
from gradwire.tuning.policy import Policy
from gradwire.tuning.reports import StepReport
from gradwire.tuning.times import UNKNOWN, Times


@dataclass
class Conditions:
    """The time of a step: compute, encoding, and communication that is not hidden."""

    compute_s: float = 0.1
    link_s: float = 0.0
    """Time to send a step's bytes in 16 bits."""
    hidden_s: float = 0.0
    """The part of the communication that the backward pass hides."""
    work_s: dict[str, float] = field(default_factory=dict)
    """Time to encode, by the coarsest encoding in use."""
    noise: float = 0.0
    """Deviation of a step's time, as a part of it."""


class Simulated:
    """A policy with reports of a simulated run, step by step."""

    def __init__(self, spec="auto:budget=0.1,every=100", seed=0, **conditions):
        self.tuning = gradwire.recipe(spec).tuning
        self.policy = Policy(self.tuning)
        slots = [Slot(f"p{i}", 0, torch.Size([80_000]), (1,)) for i in range(2)]
        self.chooser = Chooser([BucketLayout.packed(0, torch.float32, slots)], self.tuning, 2)
        self.first = self.chooser.reassess(None, None)
        self.errors = {"fp32": 0.0, "bf16": 3e-6, "int8": 1e-4, "int4": 0.005, "int3": 0.03, "int2": 0.1}
        self.now = Conditions(**conditions)
        self.used = (True, True)
        self.looking = 0.0
        self.step = 0
        self.clock_s = 0.0
        self.lost = 0.0
        """Steps' time that trials have lost."""
        self.wanted = []
        self._random = random.Random(seed)
        self._steps = []

    @property
    def table(self):
        row = [self.errors[name] for name in self.tuning.names]
        return ErrorTable([1.0] * len(self.used), [row] * len(self.used))

    @property
    def encodings(self):
        return set(self.choice.encodings.values())

    @property
    def choice(self):
        choice = self.policy.state.choice or self.first
        is_allowed = set(choice.encodings.values()) <= set(self.tuning.names)
        return choice if is_allowed else self.chooser.reassess(choice, None)

    @property
    def last(self):
        return self.policy.state.decisions[-1]

    def times_with(self, choice):
        """Return the true times of a step with a choice."""
        now = self.now
        coarsest = max(choice.encodings.values(), key=ENCODINGS.index)
        link_s = now.link_s * choice.num_bytes / self.first.num_bytes
        exposed = max(0.0, link_s - now.hidden_s)
        return Times(now.compute_s + exposed + now.work_s.get(coarsest, 0.0), exposed, link_s)

    def best_s(self):
        """Return the time of a step with the best of all rungs."""
        choices = [self.chooser.best(self.table, n + 1) for n in range(len(self.tuning.names))]
        return min(self.times_with(each).step for each in choices)

    def run(self, num_steps):
        """Run some steps; return the steps of new decisions."""
        before = len(self.policy.state.decisions)
        for _ in range(num_steps):
            self._run_step()
        return [decision.step for decision in self.policy.state.decisions[before:]]

    def _run_step(self):
        policy, state = self.policy, self.policy.state
        now = self.times_with(self.choice)
        if state.trial is not None:
            kept = self.times_with(state.trial.kept.choice)
            self.lost += max(0.0, now.step / kept.step - 1)
        noise = 1 + self.now.noise * abs(self._random.gauss())
        self.clock_s += now.step * noise
        self._steps.append(now.step * noise)
        if policy.is_settling(self.step):
            self._steps.clear()
        want = policy.wants(self.step)
        if want != "nothing":
            self.wanted.append((self.step, want))
            kept = self._steps[-16:]
            seen = UNKNOWN
            if len(kept) >= 4:
                seen = Times(statistics.median(kept), now.exposed, now.averaging)
            report = StepReport(seen, self.used, self.table if want == "errors" else None, self.looking)
            policy.conclude(self.step, report, self.chooser)
            if policy.starts_anew(self.step):
                self._steps.clear()
        self.step += 1
