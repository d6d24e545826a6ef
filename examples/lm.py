"""A byte-level transformer language model, and its text: the source of Python's standard library."""

import hashlib
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

HEAD = 32


def corpus() -> tuple[Tensor, Tensor]:
    """Return the bytes of the standard library's files: those to train on, and about a twentieth held out."""
    root, train, held_out = Path(sysconfig.get_path("stdlib")), bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" not in name and "dist-packages" not in name:
            is_held_out = hashlib.sha256(name.encode()).digest()[0] % 20 == 0
            (held_out if is_held_out else train).extend(path.read_bytes())
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def starts(text: Tensor, shape: tuple[int, ...], length: int, seed: int) -> Tensor:
    """Draw places in the text at which pieces begin."""
    found = torch.randint(len(text) - length, shape, generator=torch.Generator().manual_seed(seed))
    return found.to(text.device)


def pieces(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return pieces of the text, and for each byte the one that follows it."""
    found = text[starts.unsqueeze(-1) + torch.arange(length + 1, device=text.device)].long()
    return found[:, :-1], found[:, 1:]


class LM(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        if width % HEAD:
            raise ValueError(f"the width must be a multiple of {HEAD}, the width of a head, not {width}")
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, width // HEAD, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_branch = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers if ends_branch else 1))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, in nats per byte."""
        x = self.bytes(inputs) + self.places.weight
        logits = self.head(self.blocks(x, mask=self.mask, is_causal=True))
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
