"""What goes over the wire: plain recipes by name, and those composed of them, by step and by parameter."""

from gradwire.recipes.composed import apart, placed, recipe, route, schedule
from gradwire.recipes.plain import (
    RECIPES,
    Recipe,
    Reduction,
    acp,
    bf16,
    fp8,
    fp16,
    fp32,
    int4,
    int8,
    noop,
    powersgd,
    sign,
)
from gradwire.recipes.spelling import is_factory

__all__ = [
    "RECIPES",
    "Recipe",
    "Reduction",
    "acp",
    "apart",
    "bf16",
    "fp8",
    "fp16",
    "fp32",
    "int4",
    "int8",
    "is_factory",
    "noop",
    "placed",
    "powersgd",
    "recipe",
    "route",
    "schedule",
    "sign",
]
