"""`attach` for sharded models, and for all others."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler

from gradwire.averaging import (
    Engine,
    LayoutCheck,
    RunState,
    Timeline,
    disabling_claim,
    is_disabled,
    open_engine,
)
from gradwire.codecs import Codec
from gradwire.ddp import Choice, Hook, OnNonfinite, Options, Wire, watch_for_scaler
from gradwire.ddp import attach as attach_to_ddp
from gradwire.lanes import open_lane
from gradwire.ops import warm_up
from gradwire.peers import CollectiveCall, own_world_rank, require_timeout, timeout_or_own, uses_nccl
from gradwire.recipes import Recipe, agree_on_nodes, common_node_size, detect_node_size, kernels_of, noop
from gradwire.recipes import recipe as parse_recipe
from gradwire.sharded.attachment import ShardedAttachment
from gradwire.sharded.backward import Backward
from gradwire.sharded.checks import check
from gradwire.sharded.gathers import Gathers
from gradwire.sharded.model import ShardedGradients, ShardedModel
from gradwire.sharded.reduce_scatter import UnitReduceScatter
from gradwire.sharded.replicas import UnitReplicas
from gradwire.sharded.shard_group import plain_mean, sharing, true_on_all
from gradwire.sharded.unaveraged import warn_of_unaveraged
from gradwire.sharded.units import Unit, is_sharded
from gradwire.sharded.watched import WatchedShards
from gradwire.sharded.weights import UnitAllGather, weights_codec
from gradwire.telemetry import Telemetry
from gradwire.torch_private import fsdp, uncompiled

log = logging.getLogger("gradwire")


def attach(
    model: nn.Module,
    recipe: str | Recipe | Hook = "fp32",
    *,
    replicas: object = None,
    weights: str | Recipe | None = None,
    state: object = None,
    timeout: timedelta | None = None,
    on_nonfinite: OnNonfinite = "propagate",
    verify_every: int = 0,
    grad_scaler: GradScaler | None = None,
    telemetry: Telemetry | None = None,
) -> Wire:
    """Average the model's gradients by ``recipe`` from the next backward pass on.

    Collective: every rank of the model's process group calls it, with the same recipe.

    Args:
        model: a ``DistributedDataParallel``, a model that ``fully_shard`` has sharded, or ``torch.compile``
            of one of these.
        recipe: a name (``"bf16"``), a name with options (``"fp16:reduction=sum"``), a `Recipe`, or any
            DDP communication hook: anything that can be called with ``(state, bucket)``.
        replicas: for a sharded model, the ranks that hold the same shard: a process group, or a
            ``DeviceMesh`` of one dimension. Gradients are then averaged over them by ``recipe``, and over
            shards by torch. A model that was sharded over a mesh of two dimensions knows its replicas. If it
            was sharded over a part of a mesh, and nobody averages over the rest, a warning says so.
        weights: for a sharded model, the encoding in which parameters are gathered: ``"fp32"`` (as they are),
            ``"bf16"``, ``"fp16"``, ``"int8"``, ``"fp8"`` or ``"int4"``. All ranks compute with the decoded
            weights; optimizers step the shards as they are. None, the default, leaves gathers to torch.
        state: the first argument of a hook; not for recipes.
        timeout: how long this, `Wire.swap` and `Wire.load_state_dict` wait for the other ranks; by default
            as long as the group does. Averages always wait as long as the group.
        on_nonfinite: what to do when an averaged gradient is infinite or NaN. ``"propagate"`` passes it to
            every rank, as torch does. ``"skip"`` sets every ``.grad`` to None on every rank, so that no
            optimizer moves, and counts the step in `Wire.stats`. ``"raise"`` raises FloatingPointError from
            ``backward()`` on every rank; on CUDA from the next one, and `Wire.detach` logs the last.
        verify_every: compare averaged gradients and parameters over the ranks, bit for bit, every so many
            steps; 0, the default, compares never. If they differ, ``backward()`` raises `WireError` on every
            rank, with the step, the ranks and the first parameter; on CUDA the next one. Not done inside
            ``join()`` of a model with ``find_unused_parameters``; refused for shards without replicas.
        grad_scaler: the ``torch.amp.GradScaler`` that scales the loss, if there is one. Residuals are in
            units of the scaled loss, and follow each change of its scale.
        telemetry: what to record, see `Telemetry`; None, the default, records nothing.

    Raises:
        TypeError: the model is of another kind, or an argument is of the wrong type.
        ValueError: there is no such recipe or option, the model is attached already or has another
            hook, or ranks differ in gradwire's version, the recipe, the options or the parameters. The
            text names the ranks and the difference.
        OSError: the file of ``telemetry`` cannot be written.
        RuntimeError: a rank did not attach in time.

    With the environment variable ``GRADWIRE_DISABLE=1`` the model is left to torch's own averaging.

    >>> wire = gradwire.attach(model, "bf16")
    >>> model(inputs).sum().backward()  # train as before
    >>> wire.stats().num_steps
    1
    """
    root = uncompiled(model)
    if not is_sharded(root):
        for name, given in (("replicas", replicas), ("weights", weights)):
            if given is not None:
                raise TypeError(f"{name}= goes with a model that fully_shard has sharded; leave it out")
        return attach_to_ddp(
            model,
            recipe,
            state=state,
            timeout=timeout,
            on_nonfinite=on_nonfinite,
            verify_every=verify_every,
            grad_scaler=grad_scaler,
            telemetry=telemetry,
        )
    sharded = ShardedModel(root, replicas)
    make_options = functools.partial(Options, on_nonfinite, verify_every, grad_scaler, telemetry)
    agreed = _agree(sharded, recipe, state, weights, timeout, make_options)
    attachment = _leave_to_torch(sharded, agreed) if is_disabled() else _open(sharded, agreed)
    warn_of_unaveraged(sharded)
    return Wire(attachment)


@dataclass(frozen=True)
class _Gathering:
    """The way in which parameters are gathered."""

    encoding: str
    codec: Codec
    rendezvous: str
    """A name for a lane, shared by the ranks that hold the shards."""
    node_size: int


@dataclass(frozen=True)
class _Agreement:
    """The things that all ranks have agreed to attach."""

    choice: Choice
    options: Options
    timeout: timedelta
    rendezvous: str
    """A name for a lane, shared by the ranks that average."""
    gathering: _Gathering | None
    """None if torch gathers parameters."""


def _agree(
    sharded: ShardedModel,
    recipe: str | Recipe | Hook,
    state: object,
    weights: str | Recipe | None,
    timeout: timedelta | None,
    make_options: Callable[[], Options],
) -> _Agreement:
    """Check the arguments of `attach`, and agree on them with all ranks; collective.

    Replicas of one shard meet, and each replica's shards. So an error of any rank reaches all.
    """
    limit = timeout_or_own(timeout, sharded.group)
    with contextlib.ExitStack() as calls:
        around: CollectiveCall | None = None
        if sharded.has_replicas:
            around = calls.enter_context(CollectiveCall(sharded.shards, limit, "gradwire.attach"))
        with CollectiveCall(sharded.group, limit, "gradwire.attach") as call:
            require_timeout(timeout)
            options = make_options()
            choice = Choice(sharded.resolve(_parse(recipe, state)))
            assert choice.recipe is not None
            encoding = None if weights is None else parse_recipe(weights)
            check(sharded, options, choice.recipe, has_weights=encoding is not None)
            codec = None if encoding is None else weights_codec(encoding)
            if not is_disabled():
                options.check_file(sharded.recorded_rank, is_first=sharded.rank == 0)
                kernels = kernels_of(choice.recipe, sharded.group) | getattr(codec, "kernels", frozenset())
                warm_up(sharded.device, kernels)
            claim = {
                **disabling_claim(),
                "weights": str(encoding),
                **options.claim(),
                **sharded.claim(choice.fingerprint),
            }
            node_size = 1
            if sharded.has_replicas:
                placed = agree_on_nodes(choice.recipe, call, {**claim, **sharded.shard_claim()})
                choice = choice.with_recipe(placed)
            else:
                node_size = common_node_size(call.agree(claim, note=str(detect_node_size(call.group))))
        if around is not None:
            around.agree({**claim, **sharded.replica_claim()})
    gathering = None
    if codec is not None:
        gathering = _Gathering(str(encoding), codec, f"{(around or call).rendezvous}/weights", node_size)
    return _Agreement(choice, options, limit, call.rendezvous, gathering)


def _leave_to_torch(sharded: ShardedModel, agreed: _Agreement) -> ShardedAttachment:
    """Let torch average, over replicas that it does not know as well."""
    choice = agreed.choice
    log.warning("GRADWIRE_DISABLE is set: %s is not attached, and torch averages as usual", choice.name)
    backward = Backward(Engine(noop(), None), own_world_rank(sharded.shards), sharded.device)
    undo = contextlib.ExitStack()
    if sharded.has_replicas and not sharded.is_native_hsdp:
        for unit in sharded.units:
            unit.module.set_all_reduce_hook(plain_mean(unit, sharded.group))
            undo.callback(_remove_all_reduce_hook, unit)
    return ShardedAttachment(sharded, backward, choice, agreed.timeout, undo, is_disabled=True)


def _open(sharded: ShardedModel, agreed: _Agreement) -> ShardedAttachment:
    """Open what averages the model's gradients, and put it in place of torch's; undo all if it fails."""
    choice, options, gathering = agreed.choice, agreed.options, agreed.gathering
    assert choice.recipe is not None
    meter, is_nccl = options.meter(), uses_nccl(sharded.group, sharded.device)
    with contextlib.ExitStack() as undo:
        engine = open_engine(
            choice.recipe,
            sharded.group,
            sharded.device,
            agreed.rendezvous,
            RunState(timeline=Timeline(None), loss_scale=options.loss_scale()),
            may_wait=sharded.has_replicas,
            in_steps=sharded.has_replicas,
            meter=meter,
            layout_check=LayoutCheck() if is_nccl else None,  # on CPU, ranks compare at each call
            may_have_unused=False,
        )
        undo.callback(engine.close)
        share = sharing(sharded) if sharded.has_replicas else None
        backward = Backward(engine, own_world_rank(sharded.shards), sharded.device, share_failure=share)
        agree = None
        if sharded.num_shards > 1:
            agree = functools.partial(true_on_all, group=sharded.shards)
        gradients, rank = ShardedGradients(sharded), sharded.recorded_rank
        checks = options.checks(gradients, rank, backward, meter, is_first=sharded.rank == 0, agree=agree)
        backward.checks = checks
        undo.callback(checks.close)
        installed = contextlib.ExitStack()
        undo.callback(installed.close)
        for unit in sharded.units:
            _install(unit, backward, installed, sharded.group.size() if sharded.has_replicas else None)
        if gathering is not None:
            _install_gathers(sharded, backward, gathering, installed)
        if sharded.has_replicas:
            watched = WatchedShards(sharded, backward)
            installed.callback(watched.leave)
            watch_for_scaler(watched, options.grad_scaler)
        undo.pop_all()
    details = {"recipe": choice.name, "world_size": sharded.world_size, "device": str(sharded.device)}
    checks.record_event("attach", 0, **details)
    codec = None if gathering is None else gathering.codec
    return ShardedAttachment(sharded, backward, choice, agreed.timeout, installed, codec)


def _install(unit: Unit, backward: Backward, undo: contextlib.ExitStack, num_replicas: int | None) -> None:
    """Average one unit's gradients over replicas, or reduce them over shards if there are None."""
    if num_replicas is None:
        before = unit.reduce_scatter
        unit.module.set_custom_reduce_scatter(UnitReduceScatter(unit, backward))
        undo.callback(_restore, unit, before)
        return
    if unit.replicate_group is not None:
        undo.callback(fsdp.take_over_replicas(unit.group))
    hooks = UnitReplicas(unit, backward, num_replicas)
    undo.callback(hooks.remove)


def _install_gathers(
    sharded: ShardedModel, backward: Backward, gathering: _Gathering, undo: contextlib.ExitStack
) -> None:
    gathers = None
    if sharded.device.type == "cpu":
        # One in flight: a gather is asked for when the one before it is used.
        lane = open_lane(sharded.shards, sharded.device, gathering.rendezvous, num_in_flight=1)
        undo.callback(lane.close)
        rank = own_world_rank(sharded.shards)
        gathers = Gathers(lane, backward, rank, gathering.encoding, gathering.node_size)
        undo.callback(gathers.follow(sharded.root))
    for unit in sharded.units:
        undo.callback(_restore_gather, unit, unit.all_gather)
        unit.module.set_custom_all_gather(UnitAllGather(unit, gathering.codec, gathers))


def _restore_gather(unit: Unit, comm: Any) -> None:
    unit.module.set_custom_all_gather(comm)
    fsdp.forget_gather(unit.group)


def _remove_all_reduce_hook(unit: Unit) -> None:
    unit.module.set_all_reduce_hook(None)


def _restore(unit: Unit, comm: Any) -> None:
    unit.module.set_custom_reduce_scatter(comm)


def _parse(recipe: str | Recipe | Hook, state: object) -> Recipe:
    if not isinstance(recipe, str | Recipe):
        raise TypeError("a sharded model takes recipes only: communication hooks are DDP's")
    if state is not None:
        raise TypeError("state= goes with a hook of DDP's; leave it out")
    return parse_recipe(recipe)
