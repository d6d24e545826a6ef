"""A proposal: the choice that ``auto`` would make for one step's gradients, whatever the times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout
from gradwire.peers import Group
from gradwire.recipes import Tuning
from gradwire.tuning.choices import Chooser, EncodingChoice
from gradwire.tuning.errors import measure_errors
from gradwire.tuning.sampling import Sample


def propose(
    gradients: Mapping[str, Tensor], layouts: Sequence[BucketLayout], tuning: Tuning, group: Group
) -> EncodingChoice:
    """Return the choice for this rank's own ``gradients``, which are not averaged; collective."""
    chooser = Chooser(layouts, tuning, group.size)
    sample = Sample(chooser.units, step=0)
    device = next(iter(gradients.values())).device
    for layout in layouts:
        flat = torch.zeros(layout.numel, dtype=layout.dtype, device=device)
        for name, view in layout.views(flat).items():
            if name in gradients:  # others were not used in this step
                own = gradients[name]
                # DDP's buckets hold complex gradients as pairs of real values.
                is_pair = own.is_complex() and not view.is_complex()
                view.copy_(torch.view_as_real(own) if is_pair else own)
        sample.take(layout.index, flat)
    table = measure_errors(sample.values, sample, chooser.codecs, group, 0)
    return chooser.best(table, chooser.num_encodings)
