"""The membership of a site: all that connects it with the sites that it averages with."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta

from gradwire.averaging import Engine, LayoutCheck, RunState, open_engine
from gradwire.peers import timeout_or_own
from gradwire.recipes import Recipe, agree_on_nodes, noop
from gradwire.training.gradient_wire import GradientWire
from gradwire.training.inner_optimizer import InnerOptimizer
from gradwire.training.local_choices import LocalOptions
from gradwire.training.newest_state import Newest, Position, meet
from gradwire.training.outer_loop import Members
from gradwire.training.site_call import SitesCall
from gradwire.training.sites import Site


@dataclass(frozen=True)
class Membership:
    """A site in a group of sites. When sites come or go, a new membership replaces it."""

    site: Site
    name: str
    """A name that the members share, and no others ever have."""
    recipe: Recipe
    """The recipe for parameters, the same on all sites."""
    timeout: timedelta
    engine: Engine
    """Averages parameters; with GRADWIRE_DISABLE, nothing."""
    gradients: GradientWire
    """Averages gradients during warm-up."""

    @property
    def is_disabled(self) -> bool:
        """True if GRADWIRE_DISABLE leaves the model to DDP or to torch's sharding."""
        return self.gradients.is_disabled

    @property
    def members(self) -> Members:
        """The members as an outer loop sees them."""
        return Members(self.engine, self.site.ranks, self.name)

    def call(self, method: str) -> SitesCall:
        """Return a collective call of a method of `LocalSGD` by all ranks of all sites."""
        return self.site.call(self.timeout, f"LocalSGD.{method}")

    def close(self) -> None:
        """Leave the others: end the lane, and return the model to plain averaging of gradients."""
        self.gradients.detach()
        self.engine.close()


def join(
    site: Site, options: LocalOptions, inner: InnerOptimizer, own: Position, state: RunState
) -> tuple[Membership, Newest | None]:
    """Meet the ranks of all sites, and connect with them; collective.

    Args:
        site: this site among those that it is to average with.
        options: the arguments of `LocalSGD`, which must be the same on all sites.
        inner: the inner optimizer.
        own: the place of this site's state.
        state: the state of averagings on this rank.

    Returns the membership, and the newest state of all sites; None if no site has one.
    """
    timeout = timeout_or_own(options.timeout, site.group)
    with site.call(timeout, "gradwire.LocalSGD") as call:
        chosen, for_gradients = options.choose(site, inner)
        recipe = agree_on_nodes(chosen, call, options.claim(site, chosen))
    with site.call(timeout, "gradwire.LocalSGD") as positions:
        name, found = meet(positions, own, options.warmup_steps)
    num_steps = 0 if found is None else found.position.num_steps
    gradients = GradientWire(site, for_gradients, options.warmup_steps, timeout, num_steps)
    with contextlib.ExitStack() as undo:
        undo.callback(gradients.detach)
        if num_steps:
            gradients.go_on_at(num_steps)
        if gradients.is_disabled:
            engine = Engine(noop(), None, state)
        else:
            check = LayoutCheck()
            engine = open_engine(recipe, site.group, site.device, call.rendezvous, state, layout_check=check)
        undo.pop_all()
    return Membership(site, name, recipe, timeout, engine, gradients), found
