"""The folder beside a checkpoint file of Lightning, for the states of all ranks."""

from __future__ import annotations

import os

from gradwire.adapters.state_files import StateFolder


def folder_of(checkpoint: str | os.PathLike[str], index: int = 0) -> str:
    """Return the folder of a checkpoint file; ``index`` tells the models of one checkpoint apart."""
    path = os.fspath(checkpoint)
    # ModelCheckpoint(save_last="link") makes last.ckpt a link to the newest checkpoint.
    path = os.path.realpath(path) if os.path.islink(path) else path
    return f"{path}.gradwire" if index == 0 else f"{path}.gradwire_{index}"


def remove_folder(checkpoint: str | os.PathLike[str]) -> None:
    """Remove the folder of a checkpoint file, if there is one."""
    StateFolder(folder_of(checkpoint), "").remove()
