"""What went wrong, in one line that says what to do next."""

from __future__ import annotations

import errno

# Optional libraries by the extra of the package that brings them.
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
_LONGEST = 600  # characters of a message; libraries print whole state dictionaries


class Problem(ValueError):
    """Something about the command itself; its message names options as they are typed."""


def line_of(error: BaseException) -> str:
    """The error as one printable line."""
    return one_line(_message(error))


def one_line(text: object) -> str:
    """No line breaks, and no escape sequences out of file or class names."""
    clean = visible(" ".join(str(text).split()))
    return clean if len(clean) <= _LONGEST else clean[:_LONGEST] + " …"


def visible(text: str) -> str:
    return "".join(c if c.isprintable() else "�" for c in text)


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        extra = _EXTRAS.get(missing)
        return f"{error}; install it with: pip install 'pace-xai[{extra}]'" if extra else str(error)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not worth importing torch for
        return "the GPU has not enough memory; try a smaller --batch-size, or --device cpu"
    if isinstance(error, MemoryError):
        return "not enough memory; use fewer images (--limit), or keep observations on disk with pace extract"
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        hint = "; make room, then run the same command again" if error.errno == errno.ENOSPC else ""
        return f"{error.strerror}{where}{hint}"
    if type(error).__name__ == "UnreadableImageError":
        return f"{error}; --skip-unreadable leaves such files out"
    if isinstance(error, (ValueError, OSError, ImportError)):  # what the library raises for bad input, meant to be read
        return str(error).replace('on_error="skip"', "--skip-unreadable") or type(error).__name__
    return f"unexpected {type(error).__name__}: {error} (--debug shows where)"
