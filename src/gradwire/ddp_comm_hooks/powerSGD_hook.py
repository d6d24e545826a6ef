"""PowerSGD, layer by layer and a whole bucket at a time (Vogels et al., arXiv:1905.13727)."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradwire.averaging import Engine, Grouping, LayoutCheck, RunState, Timeline, checkpoint
from gradwire.buckets import Layouts, Memory, dtype_name, dtype_named
from gradwire.ddp import (
    Bridge,
    BucketOrder,
    BucketPosition,
    num_bucketed,
    num_transient,
    open_raw_engine,
    queue_after_ddp,
)
from gradwire.ddp_comm_hooks._elsewhere import Elsewhere
from gradwire.ddp_comm_hooks._raw import group_or_world
from gradwire.exchanges import LowRank
from gradwire.peers import own_world_rank
from gradwire.recipes import Recipe, powersgd
from gradwire.torch_private import GradBucket

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

log = logging.getLogger("gradwire")

_OPTIONS = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "random_seed",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
)
# The most steps after which DDP rebuilds its buckets. A raw hook cannot know the exact number.
_MAX_TRANSIENT = 2
_COUNTERS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")
_PARTS = ("counters", "memory", "layouts", "by_name")
_BY_PARAMETER = "{} is in state_dict()['memory'].get('{}', {{}}); load_state_dict() sets it"
_NO_STATE = "this is no state_dict of a PowerSGDState"


class PowerSGDState:
    """The options of PowerSGD, and its state from step to step, by parameter.

    Args:
        process_group: the ranks to average over. None is the world, or with `gradwire.attach` the model's
            own group.
        matrix_approximation_rank: the rank of the factors.
        start_powerSGD_iter: the first step that compresses; earlier steps average uncompressed.
        min_compression_rate: compress a matrix if its factors are smaller by more than this rate.
        use_error_feedback: add what a step leaves out to the next one.
        warm_start: start from the factors of the step before, not from random ones.
        orthogonalization_epsilon: accepted and ignored: the orthogonalisation never divides by zero.
        random_seed: the seed of random factors; torch's global generators are left alone.
        compression_stats_logging_frequency: the number of steps between lines of statistics in the log.
        batch_tensors_with_same_shape: accepted and ignored: matrices of one shape are always batched.

    Raises ValueError if ``start_powerSGD_iter`` is below 2 with error feedback or warm start, as torch
    does; the recipe ``"powersgd"`` may start at step 0.

    Example::

        state = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=100)
        wire = gradwire.attach(model, powerSGD_hook, state=state)
    """

    # torch keeps these by bucket, and buckets change; ours belong to parameters.
    error_dict = Elsewhere(_BY_PARAMETER.format("what each parameter's gradients still lack", "residual"))
    p_memory_dict = Elsewhere("each step computes left factors anew, from the right ones in state_dict()")
    q_memory_dict = Elsewhere(_BY_PARAMETER.format("each parameter's right factor", "Q"))
    rng = Elsewhere("there is no generator to save, since random factors follow from random_seed and iter")

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        remembers = use_error_feedback or warm_start
        if remembers and start_powerSGD_iter < 2:
            raise ValueError(
                f"start_powerSGD_iter={start_powerSGD_iter} is too early: with residuals or a warm start, "
                "the first two steps must be plain, as in torch. Choose 2 or more, or attach the recipe "
                '"powersgd:start=0", which may compress from the first step on'
            )
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.iter = 0
        """The number of steps so far."""
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        """The step of the next line of statistics in the log."""
        self._reset()
        self._recipe(whole=False)  # raises ValueError for options that no recipe takes

    def _reset(self) -> None:
        """Forget everything but the options and the counters."""
        self._memory = Memory()
        self._layouts, self._has_names = Layouts(), False
        # True if the loaded state goes by parameters' names, False if by positions; None if none was loaded.
        self._loaded_names: bool | None = None
        # The one matrix of a bucket is averaged in the buckets it was saved in, until DDP has rebuilt them.
        self._loaded_layouts: list[tuple[int, Grouping]] = []
        self._num_transient = _MAX_TRANSIENT
        self._bridges: dict[tuple[Recipe, str, int], Bridge] = {}
        self._num_parameters: int | None = None
        self._order = BucketOrder()

    def gradwire_bind(self, ddp: DistributedDataParallel) -> None:
        """Use the names of the model's parameters; `gradwire.attach` calls this."""
        self._layouts, self._has_names = Layouts(ddp.module), True
        self._num_transient = num_transient(ddp)
        self._num_parameters = num_bucketed(ddp)
        self._order = BucketOrder(self._num_parameters)
        self._bridges.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to resume exactly: numbers and tensors that any ``torch.load`` reads.

        Residuals differ between ranks, so each rank saves its own state.
        """
        memory = {
            name: {parameter: value.clone() for parameter, value in values.items()}
            for name, values in self._memory.named().items()
        }
        layouts = checkpoint.write_layouts(self._timeline()) if memory else []
        counters = self._take(_COUNTERS)
        values = (counters, memory, layouts, self._has_names)
        return dict(zip(_PARTS, values, strict=True))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; before the first step, or between two steps.

        Raises ValueError, and loads nothing, if it is not the state of a PowerSGDState.
        """
        layouts = _read_layouts(state_dict)
        self._set(state_dict["counters"])
        self._memory.load(state_dict["memory"])
        self._loaded_names = state_dict["by_name"] if state_dict["memory"] else None
        self._loaded_layouts = layouts
        self._bridges.clear()

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the compression rate so far, and the numbers of values before and after compression."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after > 0 else 0, before, after)

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step if ``bucket`` is its last."""
        if bucket.is_last():
            self._increase_iter()

    def _increase_iter(self) -> None:
        self.iter += 1
        if self.iter == self.start_powerSGD_iter:
            log.info("PowerSGD starts after %s steps", self.iter)

    def __getstate__(self) -> dict[str, Any]:
        log.warning("process groups do not pickle: a PowerSGDState is saved without its own")
        return {**self._take(_OPTIONS), "state_dict": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        log.warning(
            "a restored PowerSGDState averages over the world; set its process_group if it was another"
        )
        self.process_group = dist.group.WORLD if dist.is_initialized() else None
        self._reset()
        self._set({name: value for name, value in state.items() if name != "state_dict"})
        self.load_state_dict(state["state_dict"])

    def _timeline(self) -> list[tuple[int, Grouping]]:
        """Return the groupings of the buckets whose factors the memory holds, if a bucket is one matrix."""
        for (recipe, *_), bridge in self._bridges.items():
            if _is_whole(recipe):
                assert isinstance(bridge.runner, Engine)
                return bridge.runner.state.timeline.save(self.iter)
        return self._loaded_layouts

    def _take(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _recipe(self, *, whole: bool) -> Recipe:
        return powersgd(
            self.matrix_approximation_rank,
            self.start_powerSGD_iter,
            self.min_compression_rate,
            self.use_error_feedback,
            self.warm_start,
            whole,
            self.random_seed,
        )

    def _run(self, bucket: GradBucket, *, whole: bool) -> Future[Tensor]:
        if self._loaded_names not in (None, self._has_names):
            wants = "gradwire.attach(model, hook, state=state)"
            raise ValueError(
                f"this PowerSGDState was saved {'from' if self._loaded_names else 'without'} {wants}, and "
                + (
                    "holds parameters by name: use that again"
                    if self._loaded_names
                    else "holds parameters by position: register the hook with DDP itself again"
                )
            )
        recipe, group = self._recipe(whole=whole), group_or_world(self.process_group)
        key = recipe, bucket.buffer().device.type, id(group)
        bridge = self._bridges.get(key)
        if bridge is None:
            # A raw hook cannot know if a parameter is unused; the one matrix of a bucket must check.
            engine = open_raw_engine(
                recipe,
                group,
                bucket,
                self._run_state(whole=whole),
                # Without names, parameters are counted as they are first seen, which may differ over ranks.
                layout_check=LayoutCheck() if self._has_names else None,
                may_have_unused=whole,
            )
            bridge = self._bridges[key] = Bridge(
                engine, self._layouts, own_world_rank(group), num_parameters=self._num_parameters
            )
        position = self._order.next(bucket)
        if position.index == 0:
            bridge.num_steps = self.iter
        self._count(recipe, bucket, position)
        future = bridge.run(bucket)
        if position.closes_pass and position.is_last:
            self._increase_iter()
        elif position.closes_pass:  # a delayed pass, of several buckets
            queue_after_ddp(self._increase_iter)
        return future

    def _run_state(self, *, whole: bool) -> RunState:
        # Only the one matrix of a bucket depends on the buckets, so only it needs the loaded timeline.
        num_transient = self._num_transient if whole and self._loaded_layouts else 0
        timeline = Timeline(num_transient)
        if num_transient:
            timeline.load(self.iter, self._loaded_layouts)
        return RunState(self._memory, timeline)

    def _count(self, recipe: Recipe, bucket: GradBucket, position: BucketPosition) -> None:
        if self.iter < self.start_powerSGD_iter or bucket.buffer().is_sparse:
            return
        assert isinstance(recipe.exchange, LowRank)
        flat, is_last = bucket.buffer(), position.is_last
        layout = self._layouts.of(position.index, flat.dtype, bucket.parameters(), is_last=is_last)
        plan, numel = recipe.exchange.plan(layout), flat.numel()
        self.total_numel_before_compression += numel
        self.total_numel_after_compression += plan.left.numel + plan.right.numel + plan.num_plain
        if is_last and self.iter >= self.next_stats_report:
            log.info(
                "PowerSGD, step %s: rate %s, values before %s, after %s", self.iter, *self.compression_stats()
            )
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency


torch.serialization.add_safe_globals([PowerSGDState])


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:  # noqa: N802
    """Average each matrix of gradients as two low-rank factors, and all else uncompressed."""
    return _checked(state)._run(bucket, whole=False)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:  # noqa: N802
    """Average a bucket as two low-rank factors of one square matrix: cheaper, and far less accurate."""
    return _checked(state)._run(bucket, whole=True)


def _read_layouts(state: Any) -> list[tuple[int, Grouping]]:
    """Check all parts of a state, and return its layouts; ValueError if a part is wrong."""
    _require_keys("it ", state, _PARTS)
    _require_keys("its 'counters' ", state["counters"], _COUNTERS)
    for name, value in state["counters"].items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{_NO_STATE}: its {name!r} must be a whole number, not {value!r:.80}")
    if not isinstance(state["memory"], dict) or not isinstance(state["by_name"], bool):
        raise ValueError(f"{_NO_STATE}: its 'memory' must be a dict, and its 'by_name' True or False")
    for name, tensors in state["memory"].items():
        for tensor in checkpoint.require_tensors(f"memory[{name!r:.80}]", tensors).values():
            dtype_named(dtype_name(tensor.dtype))
    return checkpoint.read_layouts(state["layouts"])


def _require_keys(what: str, part: object, wanted: tuple[str, ...]) -> None:
    has = set(part) if isinstance(part, dict) else set()
    for key in sorted(has.symmetric_difference(wanted)):
        raise ValueError(
            f"{_NO_STATE}: {what}" + (f"has no {key!r}" if key in wanted else f"has an unknown {key!r}")
        )


def _is_whole(recipe: Recipe) -> bool:
    return isinstance(recipe.exchange, LowRank) and recipe.exchange.whole


def _checked(state: object) -> PowerSGDState:
    if not isinstance(state, PowerSGDState):
        raise TypeError(
            "the state of this hook must be a gradwire.ddp_comm_hooks.powerSGD_hook.PowerSGDState, not "
            f"{type(state).__module__}.{type(state).__qualname__}"
        )
    return state
