"""Read files that `torch.save` has written, which anybody may have changed since."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import torch


def read_saved(file: Path | IO[bytes], name: object) -> Any:
    """Return the tensors and numbers in a file, and run no code of it.

    Raises ValueError if it is damaged or holds anything else, and OSError if it cannot be opened.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # of any type, if bytes are wrong; and torch's text says how to run the code
        raise ValueError(
            f"{name} cannot be read: it is damaged, or holds more than tensors, numbers and text"
        ) from None
