"""Recipes: names and options for exchanges, composition by step and by parameter, plans of bytes.

Protocols do not belong here but to `exchanges`, and encodings to `codecs`.
"""

from gradwire.recipes import fingerprint
from gradwire.recipes.composed import recipe, route, schedule
from gradwire.recipes.factories import (
    acp,
    bf16,
    fp8,
    fp16,
    fp32,
    int2,
    int3,
    int4,
    int8,
    noop,
    powersgd,
    sign,
    topk,
)
from gradwire.recipes.halves import can_scatter, gathered, recipes_without_residuals, scattered
from gradwire.recipes.nodes import (
    agree_on_nodes,
    common_node_size,
    detect_node_size,
    kernels_of,
    placed,
    require_nodes,
    with_node_size,
)
from gradwire.recipes.plan import WirePlan, make_plan
from gradwire.recipes.registry import RECIPES, auto
from gradwire.recipes.resolution import require_averaging, require_fixed, resolve_for_module
from gradwire.recipes.spelling import is_factory
from gradwire.recipes.tables import for_others, route_module_tables, route_tables, table_names
from gradwire.recipes.tuning import ENCODINGS, Encoding, Tuning
from gradwire.recipes.value import Recipe, Reduction

__all__ = [
    "ENCODINGS",
    "RECIPES",
    "Encoding",
    "Recipe",
    "Reduction",
    "Tuning",
    "WirePlan",
    "acp",
    "agree_on_nodes",
    "auto",
    "bf16",
    "can_scatter",
    "common_node_size",
    "detect_node_size",
    "fingerprint",
    "for_others",
    "fp8",
    "fp16",
    "fp32",
    "gathered",
    "int2",
    "int3",
    "int4",
    "int8",
    "is_factory",
    "kernels_of",
    "make_plan",
    "noop",
    "placed",
    "powersgd",
    "recipe",
    "recipes_without_residuals",
    "require_averaging",
    "require_fixed",
    "require_nodes",
    "resolve_for_module",
    "route",
    "route_module_tables",
    "route_tables",
    "scattered",
    "schedule",
    "sign",
    "table_names",
    "topk",
    "with_node_size",
]
