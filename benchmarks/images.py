"""Images that are made, and a residual network that tells their shapes apart.

An image shows one of ten shapes, turned, scaled, moved and coloured at random, on waves of other colours and
under noise. All is drawn from one seed, so that every machine has the same images.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

NUM_CLASSES = 10
NUM_IMAGES = 16384
NUM_HELD_OUT = 2048
NOISE = 0.1
CHUNK = 1024


def _signed_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return, for each shape, about how far points are outside of it; negative inside."""
    radius, angle = torch.hypot(x, y), torch.atan2(y, x)
    square, wide, tall = (
        torch.maximum(x.abs() - a, y.abs() - b) for a, b in ((0.7, 0.7), (0.9, 0.25), (0.25, 0.9))
    )
    turns = [math.pi * part for part in (1 / 2, 7 / 6, 11 / 6)]
    sides = [math.cos(turn) * x + math.sin(turn) * y for turn in turns]
    shapes = [
        radius - 0.8,  # disc
        (radius - 0.65).abs() - 0.17,  # ring
        square,
        (square + 0.1).abs() - 0.17,  # frame
        torch.stack(sides).amax(0) - 0.45,  # triangle
        torch.minimum(wide, tall),  # cross
        radius - 0.6 - 0.25 * torch.cos(3 * angle),
        radius - 0.6 - 0.25 * torch.cos(5 * angle),
        torch.maximum(radius - 0.85, y),  # half of a disc
        wide,
    ]
    return torch.stack(shapes)


def _render(count: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images of ``side`` pixels as bytes, and their classes."""

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    classes = torch.randint(NUM_CLASSES, (count,), generator=generator)
    grid = torch.linspace(-1, 1, side)
    turn, size = between(0, 2 * math.pi, 1, 1), between(0.6, 0.95, 1, 1)
    dx = (grid[None, :] - between(-0.15, 0.15, 1, 1)) / size
    dy = (grid[:, None] - between(-0.15, 0.15, 1, 1)) / size
    x, y = turn.cos() * dx + turn.sin() * dy, turn.cos() * dy - turn.sin() * dx
    distance = _signed_distances(x, y)[classes, torch.arange(count)]
    inside = torch.sigmoid(-distance * size * side / 2)[:, None]
    waves = torch.zeros_like(x)
    for _ in range(3):
        along_x, along_y, phase = (between(-6, 6, 1, 1) for _ in range(3))
        waves = waves + torch.sin(along_x * grid[None, :] + along_y * grid[:, None] + phase)
    ground = between(0.1, 0.35, 3, 1, 1) + between(-0.08, 0.08, 3, 1, 1) * waves[:, None]
    image = ground + inside * (between(0.6, 1.0, 3, 1, 1) - ground)
    image = image + NOISE * torch.randn(image.shape, generator=generator)
    return (image.clamp(0, 1) * 255).to(torch.uint8), classes


class Images:
    """Images with their classes."""

    def __init__(self, images: Tensor, classes: Tensor) -> None:
        self._images, self._classes = images, classes
        self.device = images.device

    @classmethod
    def make(cls, side: int) -> tuple["Images", "Images"]:
        """Return images to train on, and others that are held out."""
        generator = torch.Generator().manual_seed(0)

        def chunks() -> Iterator[tuple[Tensor, Tensor]]:
            for _ in range((NUM_IMAGES + NUM_HELD_OUT) // CHUNK):
                yield _render(CHUNK, side, generator)

        images, classes = map(torch.cat, zip(*chunks(), strict=True))
        return cls(images[:NUM_IMAGES], classes[:NUM_IMAGES]), cls(images[NUM_IMAGES:], classes[NUM_IMAGES:])

    def to(self, device: torch.device) -> "Images":
        return Images(self._images.to(device), self._classes.to(device))

    def draw(self, shape: tuple[int, ...], seed: int) -> Tensor:
        """Draw images by their numbers."""
        found = torch.randint(len(self._images), shape, generator=torch.Generator().manual_seed(seed))
        return found.to(self.device)

    def batch(self, places: Tensor) -> tuple[Tensor, Tensor]:
        return self._images[places].float() / 128 - 1, self._classes[places]


class Block(nn.Module):
    """Two convolutions beside a shortcut; the first may halve the image."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(2))
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.relu(self.norms[0](self.first(x)))
        result: Tensor = torch.relu(self.norms[1](self.second(found)) + self.shortcut(x))
        return result


class ConvNet(nn.Module):
    """A residual network with group norms (He et al., arXiv:1512.03385; Wu and He, arXiv:1803.08494).

    It has three stages of ``layers`` blocks each. The second and the third stage halve the image and double
    the width.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        blocks, before = [], width
        for stage in range(3):
            for layer in range(layers):
                after = width << stage
                blocks.append(Block(before, after, 2 if stage and layer == 0 else 1))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, NUM_CLASSES)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Return the mean loss, in nats per image."""
        found = self.blocks(torch.relu(self.stem(images))).mean((2, 3))
        return cross_entropy(self.head(found).float(), classes)
