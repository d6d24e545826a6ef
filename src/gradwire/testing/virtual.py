"""Many data-parallel workers that share one copy of the model."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.averaging import Grid, Grouping, Timeline, checkpoint, grouping_of
from gradwire.buckets import BucketLayout, Memory, dtype_named, trainable_parameters
from gradwire.ddp import DDPBuckets, is_ddp
from gradwire.exchanges import Context, Scratch, average
from gradwire.peers import Group, Traffic
from gradwire.recipes import Recipe, require_averaging, resolve_for_module
from gradwire.recipes import recipe as parse_recipe
from gradwire.testing.virtual_group import run_virtual_ranks
from gradwire.testing.virtual_recordings import VirtualRecordings
from gradwire.tuning import Decision, Tuner, read_state


class VirtualRanks:
    """Data-parallel workers that share one model in one process, with a recipe between them.

    Each worker has its own gradients, residuals and other states of the recipe. All else is the same on all
    workers, since all step with the same bits, and exists once. Gradients lie in the buckets that
    ``DistributedDataParallel`` would make, in the first steps and later. The averaging is the code that real
    ranks run, and ends with the same bits.

    Args:
        model: a model of parameters on one device, not wrapped.
        recipe: as for `gradwire.attach`. All ranks are on one node, unless it has ``local_size=``.
        world_size: number of workers.
        bucket_cap_mb: size of a bucket in MiB, as for ``DistributedDataParallel``.
        find_unused_parameters: as for ``DistributedDataParallel``: a parameter that no worker has used in a
            step has no gradient. Without it, its gradient is zero.
        arrival: the names of parameters in the order in which gradients arrive, to have the same buckets from
            the first step on. By default it is observed in the first backward pass; a CUDA graph hides it.

    Raises ValueError for a recipe that does not average or does not fit, for gradients that are sparse, or
    if there is nothing to average; TypeError for a model that is wrapped.

    >>> model = nn.Linear(4, 1)
    >>> ranks = VirtualRanks(model, "int8", world_size=16)
    >>> for rank in range(16):
    ...     with ranks.backward_of(rank):  # on this worker's part of the batch
    ...         model(torch.randn(2, 4)).mean().backward()
    >>> ranks.average()  # from here on, as in any training loop: clip, step
    >>> torch.equal(ranks.gradients(0)["weight"], ranks.gradients(15)["weight"])
    True
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: str | Recipe,
        world_size: int,
        *,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        arrival: Sequence[str] | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {world_size}")
        self.world_size = world_size
        self._parameters = _averaged(model)
        self.recipe = resolve_for_module(parse_recipe(recipe), model, self._parameters, world_size)
        require_averaging(self.recipe, "virtual ranks, which share one model, do not work with it")
        self._finds_unused = find_unused_parameters
        self._ddp = DDPBuckets(model, bucket_cap_mb)
        self._is_fixed = find_unused_parameters or arrival is not None
        if arrival is not None:
            if unknown := [name for name in arrival if name not in self._parameters]:
                raise ValueError(f"arrival has {unknown[0]!r}, which is no parameter that is averaged")
            self._arriving = self._ddp.rebuilt(self._parameters[name] for name in arrival)
        else:
            self._arriving = self._ddp.declared() if find_unused_parameters else self._ddp.one()
        self._arrived: list[nn.Parameter] = []
        self._timeline = Timeline(num_transient=0 if self._is_fixed else 1)
        self.memories = [Memory() for _ in range(world_size)]
        """The recipe's states by rank: ``memories[3].named()["residual"]["fc.weight"]``."""
        self.traffic = [Traffic() for _ in range(world_size)]
        """The bytes and messages that each rank has sent."""
        self.num_steps = 0
        self._scratches = [Scratch() for _ in range(world_size)]
        self._recordings = VirtualRecordings()
        self._tuners: list[Tuner] = []
        if self.recipe.tuning is not None:
            tuning = self.recipe.tuning
            self._tuners = [Tuner(tuning, rank, world_size, is_timed=False) for rank in range(world_size)]
        self._ready: set[int] = set()
        self._used: set[str] = set()
        self._lay_out(self._arriving)

    @contextmanager
    def backward_of(self, rank: int) -> Iterator[None]:
        """Add the gradients of backward passes inside to those of ``rank``, which start at zero."""
        if not self._ready:
            self._begin_step()
        for bucket in self._buckets[rank]:
            bucket.zero_()
        for name, parameter in self._parameters.items():
            parameter.grad = None if self._finds_unused else self._views[rank][name]
        watched = self._parameters.values() if rank == 0 and not (self._is_fixed or self._arrived) else ()
        hooks = [p.register_post_accumulate_grad_hook(self._arrived.append) for p in watched]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._collect(rank)
        self._ready.add(rank)

    def take_gradients(self) -> None:
        """Take what `gradients` of each rank holds as its gradients in this step, in place of `backward_of`.

        A CUDA graph can write there the gradients of all ranks. Raises ValueError if buckets lie elsewhere
        now; with ``arrival`` they stay where they are.
        """
        before = self._buckets
        self._begin_step()
        if self._buckets is not before:
            raise ValueError(
                "gradients have been laid out anew in this step: give arrival= to keep their place"
            )
        self._used.update(self._parameters)
        self._ready.update(range(self.world_size))

    def average(self) -> None:
        """Average the ranks' gradients; each parameter's ``grad`` is then the mean.

        Raises ValueError if a rank has had no `backward_of` in this step, `RanksFailed` if averaging fails.
        """
        missing = sorted(set(range(self.world_size)) - self._ready)
        if missing:
            raise ValueError(f"rank(s) {', '.join(map(str, missing))} have no gradients in this step")
        traffic = self._recordings.run(self._work(), self.num_steps, self._average_all)
        self._use_choice()
        for total, sent in zip(self.traffic, traffic, strict=True):
            total.bytes_sent += sent.bytes_sent
            total.num_messages += sent.num_messages
        self._timeline.arrived(self.num_steps, grouping_of(self._arriving))
        if not self._is_fixed:
            self._arriving = self._ddp.rebuilt(self._arrived)
        self.num_steps += 1
        self._ready.clear()
        for name, parameter in self._parameters.items():
            parameter.grad = self._views[0][name] if name in self._used else None

    def decisions(self) -> tuple[Decision, ...]:
        """Return the decisions of recipe ``auto`` so far; virtual ranks decide as if only bytes counted."""
        return self._tuners[0].decisions if self._tuners else ()

    def gradients(self, rank: int) -> dict[str, Tensor]:
        """Return the gradients of ``rank`` by parameter, as views; after `average`, the mean."""
        return dict(self._views[rank])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks between steps, for `load_state_dict` to go on from bit for bit.

        It is what `gradwire.merge_state_dicts` makes of the states of as many real ranks, and
        `Wire.load_state_dict` takes it.
        """
        grid, timeline = Grid(self.world_size), self._timeline.save(self.num_steps)
        return checkpoint.merge_state_dicts(
            checkpoint.write(
                str(self.recipe),
                self.num_steps,
                timeline,
                memory.state_dict(),
                rank,
                grid,
                tuning=self._tuners[rank].save() if self._tuners else None,
            )
            for rank, memory in enumerate(self.memories)
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` or from the merged states of real ranks, also of more or fewer ranks.

        Raises ValueError, and changes nothing, when an entry is missing, unknown or of another shape.
        """
        parameters = self._parameters
        saved = [
            checkpoint.read(state, parameters, parameters, rank, Grid(self.world_size), self.recipe.reduction)
            for rank in range(self.world_size)
        ]
        policies = [read_state(each.tuning) if each.tuning and self._tuners else None for each in saved]
        device = self._buckets[0][0].device
        for memory, own in zip(self.memories, saved, strict=True):
            memory.load_state_dict(own.memory, device)
        self._timeline.load(saved[0].step, saved[0].timeline)
        self.num_steps = saved[0].step
        self._ready.clear()
        changed = saved[0].world_size != self.world_size
        for tuner, policy in zip(self._tuners, policies, strict=False):
            tuner.load(policy, self.num_steps, look_soon=changed)
        self._use_choice()

    def _begin_step(self) -> None:
        self._used.clear()
        grouping = self._timeline.at(self.num_steps)
        self._lay_out(self._arriving if grouping is None else self._grouped(grouping))

    def _work(self) -> Hashable | None:
        """Return what the work of this step on a GPU depends on; None if it cannot be recorded."""
        repeats = self.recipe.exchange.repeats_as(self.num_steps)
        if repeats is None or self._tuners or not self._buckets[0][0].is_cuda:
            return None
        return repeats, tuple(memory.version for memory in self.memories)

    def _average_all(self, step_on_device: Tensor | None) -> list[Traffic]:
        average = functools.partial(self._average, step_on_device=step_on_device)
        return run_virtual_ranks(average, self.world_size)

    def _average(self, group: Group, step_on_device: Tensor | None) -> Traffic:
        scale = 1.0 if self.recipe.reduction == "sum" else 1 / group.size
        scratch, memory = self._scratches[group.rank], self.memories[group.rank]
        tuner = self._tuners[group.rank] if self._tuners else None
        for layout, bucket in zip(self.layouts, self._buckets[group.rank], strict=True):
            if tuner is not None:
                tuner.arrive(layout, bucket, self.num_steps, is_last=layout is self.layouts[-1])
            context = Context(
                group,
                scratch,
                scale,
                layout,
                memory,
                self.num_steps,
                self._finds_unused,
                step_on_device,
            )
            average(bucket, self.recipe.exchange, context)
        traffic = group.traffic.copy()  # without that of the tuner, as in the statistics of a wire
        device = self._buckets[0][0].device
        if tuner is not None and tuner.is_due:
            tuner.work(group, device)
            assert tuner.report is not None
            tuner.conclude(tuner.report, device)
        return traffic

    def _use_choice(self) -> None:
        """Average by the encodings that ``auto`` has chosen by now, from the next step on."""
        if self._tuners:
            self.recipe = replace(self.recipe, exchange=self._tuners[0].exchange)

    @torch.no_grad()
    def _collect(self, rank: int) -> None:
        """Copy gradients that have replaced our views, as after ``zero_grad`` or with ``create_graph``."""
        for name, parameter in self._parameters.items():
            view, gradient = self._views[rank][name], parameter.grad
            if gradient is not None or not self._finds_unused:
                self._used.add(name)
            if gradient is not None and gradient is not view:
                view.copy_(gradient)

    def _lay_out(self, layouts: tuple[BucketLayout, ...]) -> None:
        """Lay gradients out in these buckets from now on."""
        if layouts == getattr(self, "layouts", None):
            return
        self.layouts = layouts
        """The layout of each bucket in this step."""
        device = next(iter(self._parameters.values())).device
        self._recordings.clear()
        self._buckets: list[list[Tensor]] = []  # frees the old ones first
        self._views: list[dict[str, Tensor]] = []
        for _ in range(self.world_size):
            own = [torch.zeros(layout.numel, dtype=layout.dtype, device=device) for layout in layouts]
            self._buckets.append(own)
            self._views.append(self._views_of(own))

    def _views_of(self, buckets: Sequence[Tensor]) -> dict[str, Tensor]:
        """Make views of the gradients, to be kept: a model has hundreds, and every step uses them."""
        return {
            name: torch.view_as_complex(view) if self._parameters[name].is_complex() else view
            for layout, bucket in zip(self.layouts, buckets, strict=True)
            for name, view in layout.views(bucket).items()
        }

    def _grouped(self, grouping: Grouping) -> tuple[BucketLayout, ...]:
        slots = {slot.name: slot for layout in self.layouts for slot in layout.slots}
        return tuple(
            BucketLayout.packed(index, dtype_named(dtype), (slots[name] for name in names))
            for index, (dtype, names) in enumerate(grouping)
        )


def _averaged(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients are averaged, by name. Raises if that cannot be done here."""
    if is_ddp(model):
        raise TypeError("virtual ranks take a model that is not wrapped; give them its .module")
    found = trainable_parameters(model)
    if not found:
        raise ValueError("the model has no parameter that requires a gradient: nothing to average")
    if len(devices := {str(p.device) for p in found.values()}) > 1:
        raise ValueError(f"the model has parameters on {' and '.join(sorted(devices))}, not on one device")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"the gradients of {name or 'the model'} are sparse, and sparse ones are not compressed: "
                "make it with sparse=False"
            )
    return found
