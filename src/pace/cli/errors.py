"""What went wrong, in one line that says what to do next."""

from __future__ import annotations

import errno
import re

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
# The library's parameters by the option that sets them, and what it says of those that no option sets.
_OPTIONS = {
    "n_concepts": "--concepts",
    "max_concepts": "--max-concepts",
    "max_iter": "--epochs",
    "n_init": "--starts",
    "batch_size": "--batch-size",
    "data_root": "--data-root",
    **{name: f"--{name}" for name in ("alpha", "covariance", "device", "layer", "memory", "minibatch")},
    **{name: f"--{name}" for name in ("prune", "refine", "seed", "split", "updates")},
}
_PHRASES = {
    'on_error="skip"': "--skip-unreadable",
    "prune=False": "--no-prune",
    "prune=True": "--prune",
    "raise max_iter or tol": "raise max_iter",
    " and init='k-means++'": "",
}
_NAMES = "|".join(_OPTIONS)
# As `name=value`; before a colon at the beginning; and anywhere, if it has an underscore and so is no English word.
_PARAMETER = re.compile(rf"(?<![\w./-])(?:({_NAMES})=(['\"]?)([\w.+-]+)\2|^({_NAMES})(?=:)|(\w+_\w+)(?![\w=./-]))")
_LONGEST = 600  # characters of a message; libraries print whole state dictionaries


class Problem(ValueError):
    """Something about the command itself; its message names options as they are typed."""


def line_of(error: BaseException) -> str:
    """The error as one printable line."""
    return one_line(_message(error))


def lost_another(error: BaseException) -> bool:
    """Whether torch could not reach another process; gloo's errors have no type of their own."""
    by_type = type(error).__name__ in ("DistBackendError", "DistNetworkError")
    return by_type or (type(error) is RuntimeError and "gloo" in str(error))


def one_line(text: object) -> str:
    """No line breaks, and no escape sequences out of file or class names."""
    clean = visible(" ".join(str(text).split()))
    return clean if len(clean) <= _LONGEST else clean[:_LONGEST] + " …"


def as_typed(text: str) -> str:
    """What the library says of its parameters, said of the options."""
    for phrase, typed in _PHRASES.items():
        text = text.replace(phrase, typed)

    def option(found: re.Match[str]) -> str:
        name, _, value, first, word = found.groups()
        return f"{_OPTIONS[name]} {value}" if name else _OPTIONS.get(first or word, word)

    return _PARAMETER.sub(option, text)


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
    if lost_another(error):
        return "another process ended; if it was killed, torchrun --max-restarts 3 goes on from the checkpoint of --out"
    if isinstance(error, MemoryError):
        return "not enough memory; use fewer images (--limit), or keep observations on disk with pace extract"
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        hint = "; make room, then run the same command again" if error.errno == errno.ENOSPC else ""
        return f"{error.strerror}{where}{hint}"
    if type(error).__name__ == "UnreadableImageError":
        return f"{error}; --skip-unreadable leaves such files out"
    if isinstance(error, Problem):
        return str(error)
    if isinstance(error, (ValueError, OSError, ImportError)):  # what the library raises for bad input, meant to be read
        return as_typed(str(error)) or type(error).__name__
    return f"unexpected {type(error).__name__}: {error} (--debug shows where)"
