"""Wrong words on the command line, told in one line."""

from __future__ import annotations

import difflib
import errno
import re
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from gradwire.cli.consoles import drop_stdout, open_console
from gradwire.cli.ending import FAILED, INTERRUPTED, WRONG_ARGUMENTS

# typer has had click inside and outside of itself; both derive BadParameter from it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
# A full disk or quota, a file that is too large, a device that fails, a reader that is gone.
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE}


class PlainErrors(TyperGroup):
    """A group of commands whose wrong arguments are told in one line, without a box."""

    def main(self, args: Any = None, *others: Any, **options: Any) -> Any:
        """Run a command; exit with 2 and one line if its words are wrong."""
        raising = {**options, "standalone_mode": False}
        if not options.get("standalone_mode", True):
            return super().main(args, *others, **raising)
        try:
            code = super().main(args, *others, **raising)
            if sys.stdout is not None:  # None if it is closed
                sys.stdout.flush()
        except UsageError as error:
            context = getattr(error, "ctx", None)
            words = sys.argv[1:] if args is None else args
            command = context.command_path if context is not None else self._command_of(words)
            wrong = self._describe(error)
            text = f"{command}: {wrong}{' See' if wrong.endswith('?') else '; see'} {command} --help"
            open_console(stderr=True).print(text, markup=False, soft_wrap=True)
            code = WRONG_ARGUMENTS
        except typer.Abort:
            code = INTERRUPTED
        except OSError as error:
            if error.errno not in _CANNOT_WRITE:
                raise
            if sys.stdout is not None:
                drop_stdout()
            if error.errno != errno.EPIPE:  # a reader that has seen enough is no news
                reason = f"gradwire: the output cannot be written: {error.strerror}. Give it another place"
                open_console(stderr=True).print(reason, markup=False, soft_wrap=True)
            code = FAILED
        sys.exit(code if isinstance(code, int) else 0)

    def _command_of(self, words: Sequence[str]) -> str:
        """Return the command that was meant; an option without its value does not tell."""
        name = next((word for word in words if word in self.commands), "")
        return f"gradwire {name}".rstrip()

    def _describe(self, error: Any) -> str:
        """Return what is wrong, and what was probably meant."""
        option, message = getattr(error, "option_name", None), str(error.format_message())
        if "No such option" in message and option:
            known = [name for each in error.ctx.command.params for name in each.opts] if error.ctx else []
            return f"there is no option {option}{_guess(option, known)}"
        if "No such command" in message:
            word = message.split("'")[1]
            return f"there is no command {word}{_guess(word, list(self.commands))}"
        message = re.sub(r"^Invalid value for '?([^':]+)'?:", r"\1:", message).removesuffix(".")
        message = re.sub(
            r"Got unexpected extra arguments? ?\(s?\)? ?\(?(.*?)\)?$", r"it does not take: \1", message
        )
        about = (getattr(getattr(error, "param", None), "help", None) or "").partition(". ")[0].rstrip(".")
        return message[:1].lower() + message[1:] + (f" ({about})" if about else "")


def _guess(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=2)
    return f"; did you mean {' or '.join(near)}?" if near else ""
