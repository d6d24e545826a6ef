"""`gradwire.Averager`: means of all kinds of tensors by every recipe."""

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.loops.choices import keeps_state
from gradwire.loops.packing import Packings
from tests.averaged import SHAPES, draw, exact, require_identical, require_near
from tests.rows import ROWS

AVERAGING = [row for row in ROWS if row.expect != "local"]


def states(averager, kind, expect):
    """Return what ranks hold together of each tensor, such as residuals; zeros if that is nothing."""
    (memory,) = averager.state_dict()["memory"].values()
    found = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for key, own in memory.items():
        for name, tensor in own.items() if key.startswith(f"{kind}:") else ():
            found[name] += tensor
    for total in found.values():
        dist.all_reduce(total)
        total.div_(dist.get_world_size() if expect == "mean" else 1)
    return found


def check_recipe(rank, spec, expect):
    """Average a few times; with feedback, what results leave out is held back."""
    size, momentum = dist.get_world_size(), gradwire.recipe(spec).momentum
    with gradwire.Averager(spec) as averager:
        sent, due = dict.fromkeys(SHAPES, 0.0), dict.fromkeys(SHAPES, 0.0)
        for step in range(4):
            tensors, velocities = draw(rank, step), states(averager, "velocity", expect)
            averager.average_(tensors)
            require_identical(tensors)
            for name, mean in exact(step).items():
                due[name] = due[name] + (mean if expect == "mean" else mean * size)
                due[name] = due[name] + momentum * velocities[name]
                sent[name] = sent[name] + tensors[name].double()
        for name, left in states(averager, "residual", expect).items():
            sent[name] = sent[name] + left
        assert averager.stats().num_steps == 4
        assert averager.stats().bytes_sent >= 4 * averager.plan(step=0).bytes_sent > 0
        assert averager.failure is None
    return sent, due


def check_recipe_is_right(rank, spec, expect, tolerance):
    sent, due = check_recipe(rank, spec, expect)
    require_near(sent, due, tolerance)
    have, want = (torch.cat([each[name].flatten() for name in SHAPES]) for each in (sent, due))
    assert torch.cosine_similarity(have, want, dim=0) > 0.5, "zeros would not pass"


@pytest.mark.parametrize("row", AVERAGING, ids=lambda row: row.spec)
def test_every_recipe_averages_on_two_ranks(row, two_ranks):
    two_ranks.run(check_recipe_is_right, row.spec, row.expect, tolerance_of(row))


@pytest.mark.parametrize(
    "row", [r for r in AVERAGING if "local_size" not in r.spec], ids=lambda row: row.spec
)
def test_every_recipe_averages_on_three_ranks(row, three_ranks):
    three_ranks.run(check_recipe_is_right, row.spec, row.expect, tolerance_of(row))


def tolerance_of(row):
    """Return the largest error of a sum over four calls; values are at most about 4."""
    return 1e-4 if keeps_state(gradwire.recipe(row.spec)) else 4 * 8 * row.tolerance + 1e-5


def check_forms(rank):
    want = exact()
    with gradwire.Averager() as averager:
        for given in (
            draw(rank),
            list(draw(rank).values()),
            iter(draw(rank).values()),
        ):
            tensors = given if isinstance(given, dict) else dict(zip(SHAPES, given, strict=True))
            averager.average_(tensors if isinstance(given, dict) else list(tensors.values()))
            require_near(tensors, want, 1e-6)
        alone = draw(rank)["weight"]
        averager.average_(alone)
        require_near({"weight": alone}, want, 1e-6)
        parameter = torch.nn.Parameter(draw(rank)["weight"])
        averager.average_([parameter])
        require_near({"weight": parameter.detach()}, want, 1e-6)
        assert parameter.requires_grad
        averager.average_(torch.nn.Linear(2, 2).requires_grad_(False).parameters())


def test_a_tensor_a_list_and_a_dict_are_averaged_in_place(two_ranks):
    two_ranks.run(check_forms)


def check_layouts(rank):
    with gradwire.Averager() as averager:
        base = draw(rank)["weight"]
        want = exact()["weight"]
        # Strides may differ between ranks; offsets and gaps stay as they are.
        channels = draw(rank)["conv"]
        if rank:
            channels = channels.to(memory_format=torch.channels_last)
        transposed, gaps, offset = base.t().clone().t(), torch.zeros(40, 66), torch.zeros(40 * 33 + 1)
        gaps[:, ::2] = base
        offset[1:] = base.flatten()
        averager.average_([channels, transposed, gaps[:, ::2]])
        averager.average_(offset[1:])
        averager.average_(strided := base.t().clone().t())
        require_near({"conv": channels}, exact(), 1e-6)
        for have in (transposed, gaps[:, ::2], offset[1:].view(40, 33), strided):
            require_near({"w": have}, {"w": want}, 1e-6)
        assert not gaps[:, 1::2].any()
        assert offset[0] == 0
        assert channels.is_contiguous() == (rank == 0)


def test_strides_offsets_and_gaps_are_kept(two_ranks):
    two_ranks.run(check_layouts)


DTYPES = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
    torch.float8_e4m3fn: 0.3,
    torch.float8_e5m2: 0.6,
    torch.complex64: 1e-6,
    torch.complex128: 1e-12,
    torch.complex32: 3e-3,
}


def check_dtype(rank, dtype, tolerance):
    with gradwire.Averager() as averager:
        tensors = draw(rank, dtype=dtype)
        averager.average_(tensors)
        require_near(
            {n: t.to(torch.complex128 if dtype.is_complex else torch.float64) for n, t in tensors.items()},
            exact(dtype=dtype),
            tolerance,
        )
        require_identical(tensors)
        assert all(tensor.dtype == dtype for tensor in tensors.values())
    for spec in ("bf16", "int8", "int4", "powersgd:rank=2"):
        with gradwire.Averager(spec) as averager:
            averager.average_(tensors := draw(rank, dtype=dtype))
            require_identical(tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_floating_and_complex_dtype_is_averaged(dtype, two_ranks):
    two_ranks.run(check_dtype, dtype, DTYPES[dtype])


def check_mixed(rank):
    with gradwire.Averager("bf16") as averager:
        mixed = {
            f"{dtype} {name}": tensor
            for dtype in (torch.float32, torch.complex64, torch.bfloat16)
            for name, tensor in draw(rank, dtype=dtype).items()
        }
        averager.average_(mixed)
        require_identical(mixed)
        assert len(averager.stats().steps[0].buckets) == 3


def test_tensors_of_several_dtypes_go_in_a_bucket_each(two_ranks):
    two_ranks.run(check_mixed)


def check_conjugate(rank):
    base = draw(rank, dtype=torch.complex64)["weight"]
    with gradwire.Averager() as averager:
        averager.average_(base.conj())
        averager.average_(negated := torch._neg_view(draw(rank)["weight"]))
    require_near({"weight": base}, exact(dtype=torch.complex64), 1e-6)
    require_near({"weight": -negated}, exact(), 1e-6)


def test_conjugate_and_negative_views_are_averaged(two_ranks):
    two_ranks.run(check_conjugate)


def test_buckets_hold_25_megabytes_and_a_tensor_alone_is_no_copy():
    tensors = {
        "big": torch.zeros(7 << 20),
        "a": torch.zeros(6 << 20),
        "b": torch.zeros(1 << 18),
        "c": torch.zeros(1 << 19),
    }
    packing, is_new = Packings().of(tensors)
    assert is_new
    assert [[slot.name for slot in layout.slots] for layout in packing.layouts] == [
        ["big"],
        ["a", "b"],
        ["c"],
    ]
    flats = packing.pack(tensors)
    assert flats[0].data_ptr() == tensors["big"].data_ptr()
    assert flats[2].data_ptr() == tensors["c"].data_ptr()
