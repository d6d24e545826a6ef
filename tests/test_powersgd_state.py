"""The attributes of a `PowerSGDState`: torch's, or an error that says what to use instead."""

import pickle

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp_comm_hooks import powerSGD_hook as ours
from tests.drawn_buckets import Given, draw

ELSEWHERE = {
    "error_dict": r"\['memory'\].get\('residual', {}\)",
    "p_memory_dict": "from the right ones in state_dict",
    "q_memory_dict": r"\['memory'\].get\('Q', {}\)",
    "rng": "random_seed and iter",
}


def trained(module, rank, num_steps=5):
    """Return the state of a hook after some steps of a model with one bucket."""
    shapes = [(40, 30), (50, 40), (20,)]
    state = module.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, compression_stats_logging_frequency=2
    )
    model = DistributedDataParallel(Given(*shapes))
    model.register_comm_hook(state, module.powerSGD_hook)
    for step in range(num_steps):
        model(draw(10 * step + rank, *shapes)).backward()
    return state


def check_attributes(rank):
    own, other = trained(ours, rank), trained(theirs, rank)
    assert set(ELSEWHERE) < set(other.__slots__)
    for name in set(other.__slots__) - set(ELSEWHERE):
        assert getattr(own, name) == getattr(other, name), name
    # What torch keeps by bucket is kept by parameter.
    memory = own.state_dict()["memory"]
    sizes = {name: sum(each.numel() for each in values.values()) for name, values in memory.items()}
    assert sizes["Q"] == sum(each.numel() for each in other.q_memory_dict.values())
    assert sizes["residual"] == 40 * 30 + 50 * 40, "and not of the vector, which is sent as it is"
    assert sizes.keys() == {"Q", "residual"}


def test_a_state_has_the_attributes_of_torchs_with_its_values_after_the_same_steps(two_ranks):
    two_ranks.run(check_attributes)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_attribute_that_only_torchs_state_has_names_its_replacement(name):
    assert hasattr(theirs.PowerSGDState(None), name)
    state = ours.PowerSGDState(None)
    for each in (state, pickle.loads(pickle.dumps(state))):
        assert not hasattr(each, name)
        with pytest.raises(AttributeError, match=f"PowerSGDState has no {name}, .*{ELSEWHERE[name]}"):
            getattr(each, name)
        with pytest.raises(AttributeError, match=ELSEWHERE[name]):
            setattr(each, name, {})
