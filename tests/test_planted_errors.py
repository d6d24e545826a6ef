"""The invariant matrix can fail for every recipe: it finds errors that are planted into results."""

from dataclasses import replace

import pytest
import torch

import gradwire
from gradwire.testing import Case, check_hook
from tests.rows import ROWS


def zero(result, previous):
    return torch.zeros_like(result)


def negated(result, previous):
    return -result


def halved(result, previous):
    return result / 2


def doubled(result, previous):
    return result * 2


def stale(result, previous):
    """Return the result of the step before; the first step and a rebuilt bucket have none."""
    return result if previous is None or previous.shape != result.shape else previous


def unchanged(result, previous):
    return result


class Planted:
    """An exchange whose results are replaced without its knowledge."""

    communicates = True  # also where the sound one does not: it would not be called

    def __init__(self, sound, error):
        self.sound, self.error = sound, error
        self.kernels, self.sees_parameters, self.starts = sound.kernels, sound.sees_parameters, sound.starts
        # What the matrix derives its bounds from.
        self.codec = getattr(sound, "codec", None)
        self.feedback = getattr(sound, "feedback", None)
        self.momentum = getattr(sound, "momentum", 0.0)
        self._previous = {}

    def __repr__(self):
        return f"Planted({self.sound!r}, {self.error.__name__})"

    def shared_bytes(self, layout, step):
        return self.sound.shared_bytes(layout, step)

    def rounds(self, flat, context):
        yield from self.sound.rounds(flat, context)
        result, index = flat.clone(), context.layout.index
        flat.copy_(self.error(result, self._previous.get(index)))
        self._previous[index] = result


def check_planted(row, error, world_size):
    sound = gradwire.recipe(row.spec)
    recipe = replace(sound, name=f"{error.__name__} {row.spec}", exchange=Planted(sound.exchange, error))
    bounds = {"tolerance": 1e-6} if row.expect == "local" else row.in_training
    return check_hook(recipe, world_size=world_size, cases=[Case()], expect=row.expect, **bounds)


def runs():
    """Return every recipe on the fewest ranks; for `make test-full` also on the most: bounds are widest."""
    found = []
    for row in ROWS:
        fewest = min(row.world_sizes)
        for world_size in sorted({fewest, max(row.world_sizes)}):
            is_rare = world_size > fewest or row.world_size is None
            marks = pytest.mark.full if is_rare else ()
            found.append(pytest.param(row, world_size, id=f"{row.spec}-{world_size}", marks=marks))
    return found


# A halved result is wrong in size like a doubled one, and a stale one in direction like a negated one.
ERRORS = [zero, halved, stale, *(pytest.param(error, marks=pytest.mark.full) for error in (negated, doubled))]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize(("row", "world_size"), runs())
def test_the_matrix_finds_a_planted_error(row, world_size, error):
    report = check_planted(row, error, world_size)
    assert not report.ok, f"results of {row.spec} that are {error.__name__} pass"
    assert "AssertionError: step " in report.results[0].error, report


@pytest.mark.parametrize(("row", "world_size"), runs())
def test_nothing_is_found_where_nothing_is_planted(row, world_size):
    report = check_planted(row, unchanged, world_size)
    assert report.ok, report
