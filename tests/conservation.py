"""The law of error feedback: what is sent and what is held back add up to what was there."""

import torch.distributed as dist

from tests.models import backward, small_model

NUM_STEPS = 9


def check_nothing_is_lost(wire, model, swaps):
    """Train with these recipes by first step and check the law; return what this rank holds back.

    The sum of all results and of what ranks hold back at the end is the sum of all means. With momentum, it
    is the sum of all velocities: a step's mean, and the momentum times the mean velocity before the step.
    """
    plain = small_model()
    sent, wanted = {}, {}
    for step in range(NUM_STEPS):
        if step in swaps:
            wire.swap(swaps[step])
        for name, velocity in mean_states(wire, "velocity").items():
            wanted[name] = wanted.get(name, 0) + wire.recipe.momentum * velocity
        backward(plain, step)
        backward(model, step)
        for totals, each in ((sent, model), (wanted, plain)):
            for name, p in each.module.named_parameters():
                totals[name] = totals.get(name, 0) + p.grad.double()
    held = mean_states(wire, "residual")
    for name, total in wanted.items():
        error = (sent[name] + held.get(name, 0) - total).abs().max() / total.abs().max()
        assert error < (0.02 if any("bf16" in str(each) for each in swaps.values()) else 1e-5), name
    (memory,) = wire.state_dict()["memory"].values()
    return memory


def mean_states(wire, kind):
    """Return the mean over ranks of all residuals or velocities, by parameter."""
    (memory,) = wire.state_dict()["memory"].values()
    means = {}
    for key, tensors in sorted(memory.items()):
        for name, tensor in sorted(tensors.items()) if key.startswith(f"{kind}:") else ():
            means[name] = means.get(name, 0) + tensor.double()
    for mean in means.values():
        dist.all_reduce(mean)
        mean.div_(dist.get_world_size())
    return means
