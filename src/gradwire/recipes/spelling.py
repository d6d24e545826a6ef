"""Errors for values that are not recipes, with suggestions of what was meant."""

from __future__ import annotations

import difflib
import enum
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from gradwire.buckets import dtype_name
from gradwire.recipes.registry import RECIPES

_COMPOSED = {"schedule": "schedule(0=fp32; 1000=int8)", "route": "route(ndim<2=fp32; *=int4)"}
# What papers, other libraries and other tools call that which a recipe does, or comes nearest to.
_CALLED_ELSEWHERE = {
    **dict.fromkeys(("allreduce", "allreducehook", "ddp", "none"), "fp32"),
    **dict.fromkeys(("half", "float16"), "fp16"),
    **dict.fromkeys(("8bit", "qint8", "quantize"), "int8"),
    "qsgd": "int8:rounding=stochastic",
    **dict.fromkeys(("4bit", "fp4", "nf4", "mxfp4", "nvfp4"), "int4"),
    **dict.fromkeys(("2bit", "terngrad"), "int2"),
    **dict.fromkeys(("1bit", "onebit", "int1", "signsgd", "efsignsgd"), "sign"),
    **dict.fromkeys(("dgc", "sparse", "sparsify"), "topk"),
}
_POSSIBLE = f"Recipes: {', '.join(RECIPES)}; composed of these, {' and '.join(_COMPOSED.values())}"


class InvalidRecipeText(ValueError):
    """A text, or the ``part`` of one, that is no recipe."""

    def __init__(self, what: str, part: str) -> None:
        super().__init__(what)
        self.part = part

    def explain(self, spec: str, parse: Callable[[str], object]) -> ValueError:
        """Return the error for a user who gave ``spec``, with the nearest texts that ``parse`` accepts."""

        def parses(text: str) -> bool:
            try:
                parse(text)
            except ValueError:
                return False
            return True

        near = list(filter(parses, (*_respell(spec), *_respell(self.part))))
        near = near or list(filter(parses, _named_in(self.part)))
        return ValueError(f"{self}{_did_you_mean(near) or '.'} {_POSSIBLE}")


def is_factory(given: object) -> bool:
    """Return True if calling ``given`` returns a recipe."""
    # A function made by exec may have None for its module.
    return callable(given) and str(getattr(given, "__module__", "")).startswith(f"{__package__}.")


def recipe_type_error(given: object) -> TypeError:
    """Return the error for a user who gave neither text nor a recipe."""
    if given is None:
        shown = "None"
    elif isinstance(given, nn.Module):
        shown = f"a model, {type(given).__name__}"
    elif callable(given):
        shown = f"{'a class' if isinstance(given, type) else 'a function'}, {_name_of(given)}"
    else:
        value = str(given) if isinstance(given, enum.Enum) else reprlib.repr(given)
        shown = f"{type(given).__name__}, {value}"
    what = "a recipe is text, such as 'int4' or 'int4:block=64', or a gradwire.Recipe"
    return TypeError(f"{what}, not {shown}{_hint(given)}")


def _hint(given: object) -> str:
    """Return the end of an error's text that names what to give instead, or an empty text."""
    if given is None:
        return "; 'fp32' averages as DDP does by itself"
    if isinstance(given, Mapping):
        makers = [
            m for m, kind in (("schedule", int), ("route", str)) if all(isinstance(k, kind) for k in given)
        ]
        calls = " or ".join(f"gradwire.{maker}({reprlib.repr(given)})" for maker in makers)
        return f"; a recipe by step or by parameter is {calls}" if calls else ""
    if isinstance(given, enum.Enum):
        near = _did_you_mean(_near(given.name)) or ";"
        return f"{near} register_ddp_comm_hook of gradwire.ddp_comm_hooks takes its DDPCommHookType"
    if isinstance(given, torch.dtype):
        return _did_you_mean(_near(dtype_name(given)))
    return f"; call it: {_name_of(given)}(...)" if is_factory(given) else ""


def _name_of(given: object) -> str:
    return str(getattr(given, "__name__", type(given).__name__))


def _did_you_mean(near: list[str]) -> str:
    texts = list(dict.fromkeys(near))[:2]
    return f"; did you mean {' or '.join(map(repr, texts))}?" if texts else ""


def _respell(spec: str) -> Iterator[str]:
    """Yield near texts: with a known name, and with colons, semicolons and parentheses where they belong."""
    word, rest = re.fullmatch(r"\s*(\w*)\s*(.*)", spec, re.DOTALL).groups()  # type: ignore[union-attr]
    inside = (rest[1:] if rest[:1] in {*":([{,;"} else rest).lstrip().rstrip(")]} ")
    inside += ")" * (inside.count("(") - inside.count(")"))
    if set(spec) & {*"- "} and (joined := re.sub(r"[-\s]", "", spec).lower()) in {
        *RECIPES,
        *_CALLED_ELSEWHERE,
    }:
        yield from _near(joined)
    for name in _near(word):
        if name in _COMPOSED:
            yield f"{name}({inside})"
            yield f"{name}({inside.replace(',', ';')})"
        else:
            yield f"{name}:{inside}" if inside else name


def _named_in(text: str) -> list[str]:
    """Return the names near each word of a text without parentheses: ``"int8,int4"``, ``"topk-1%"``."""
    words = [] if set(text) & {*"()"} else re.findall(r"\w+", text)
    return [name for word in words for name in _near(word)]


def _near(word: str) -> list[str]:
    """Return the known names that ``word`` begins with or, if there are none, up to two similar ones.

    A name that others use stands for one of ours alone.
    """
    lower, names = word.lower().replace("_", ""), [*RECIPES, *_COMPOSED]
    if lower in _CALLED_ELSEWHERE:
        return [_CALLED_ELSEWHERE[lower]]
    prefixes = [name for name in names if lower.startswith(name)]
    averaging = [name for name in names if name != "noop"]  # nobody averages nothing by a slip of the pen
    return prefixes or difflib.get_close_matches(lower, averaging, n=2, cutoff=0.5)
