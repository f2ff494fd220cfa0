"""Errors as one line that says what to do next."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping

# The extra of the package that installs each optional library.
_EXTRAS = {
    "PIL": "images",
    "kornia": "images",
    "open_clip": "models",
    "timm": "models",
    "torchvision": "models",
    "transformers": "models",
    "matplotlib": "figures",
    "captum": "baselines",
}
_LONGEST = 600  # characters; some libraries print whole state dictionaries


class Problem(ValueError):
    """Something wrong with the command itself; the message names options as they are typed."""


def line_of(error: BaseException, options: Mapping[str, str] | None = None) -> str:
    """The error as one printable line; `options` are those of the command, by the names of its parameters."""
    message = _message(error)
    return one_line(message if isinstance(error, Problem) else with_options_named(message, options or {}))


def lost_another(error: BaseException) -> bool:
    """Whether torch lost the connection to another process; gloo's errors have no type of their own."""
    by_type = type(error).__name__ in ("DistBackendError", "DistNetworkError")
    return by_type or (type(error) is RuntimeError and "gloo" in str(error))


def one_line(text: object) -> str:
    """No line breaks, and no escape sequences from file or class names."""
    clean = visible(" ".join(str(text).split()))
    return clean if len(clean) <= _LONGEST else clean[:_LONGEST] + " …"


def visible(text: str) -> str:
    return "".join(c if c.isprintable() else "�" for c in text)


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
        missing = (error.name or "").partition(".")[0]
        extra = _EXTRAS.get(missing)
        return f"{error}; install it with: pip install 'pace-xai[{extra}]'" if extra else str(error)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not worth importing torch for
        return "the GPU is out of memory; try a smaller --batch-size, or --device cpu"
    if lost_another(error):
        return "another process ended; if it was killed, torchrun --max-restarts 3 resumes from the checkpoint of --out"
    if isinstance(error, MemoryError):
        return "out of memory; use fewer images (--limit), or keep observations on disk with pace extract"
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        hint = "; make room, then run the same command again" if error.errno == errno.ENOSPC else ""
        return f"{error.strerror}{where}{hint}"
    if type(error).__name__ == "UnreadableImageError":
        return f"{error}; --skip-unreadable leaves such files out"
    if isinstance(error, (ValueError, OSError, ImportError)):  # what the library raises for bad input
        return str(error) or type(error).__name__
    return f"unexpected {type(error).__name__}: {error} (--debug shows where)"
