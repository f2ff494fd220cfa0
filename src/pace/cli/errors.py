"""Errors as one line that says what to do next."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping

from pace.terminal import one_line


class Problem(ValueError):
    """Something wrong with the command itself; the message names options as they are typed."""


def line_of(error: BaseException, options: Mapping[str, str] | None = None) -> str:
    """The error as one printable line; `options` are those of the command, by the names of its parameters."""
    message = _message(error)
    return one_line(message if isinstance(error, Problem) else with_options_named(message, options or {}))


def with_options_named(text: str, options: Mapping[str, str]) -> str:
    """The library's message with its parameters called by their options: at the beginning, as in "seed: expected …", and
    elsewhere if the name has an underscore and so is no English word."""
    name, colon, rest = text.partition(":")
    if colon and name in options:
        text = f"{options[name]}:{rest}"
    return re.sub(r"(?<![\w./-])\w+_\w+(?![\w./-])", lambda found: options.get(found[0], found[0]), text)


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; install what is missing with: pip install 'pace-xai[all]'"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not worth importing torch for
        return "the GPU is out of memory; try a smaller --batch-size, or --device cpu"
    if type(error).__name__.startswith("Dist") or (type(error) is RuntimeError and "gloo" in str(error)):
        return "another process ended; if it was killed, torchrun --max-restarts 3 resumes from the checkpoint of --out"
    if isinstance(error, MemoryError):
        return "out of memory; use fewer images (--limit), or keep observations on disk with pace extract"
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        hint = "; make room, then run the same command again" if error.errno == errno.ENOSPC else ""
        return f"{error.strerror}{where}{hint}"
    if type(error).__name__ == "UnreadableImageError":
        text = str(error).replace("PIL.Image.MAX_IMAGE_PIXELS", "--max-pixels")
        return text.replace('leave such files out with on_error="skip"', "--skip-unreadable leaves such files out")
    if isinstance(error, (ValueError, OSError, ImportError)):  # what the library raises for bad input
        return str(error) or type(error).__name__
    return f"unexpected {type(error).__name__}: {error} (--debug shows where)"
