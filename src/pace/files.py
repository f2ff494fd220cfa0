"""Files that this package wrote, read with care: whatever is wrong with one is a `DamagedFile`, a single line that names the
file and says what to do.

JSON is compared with a pattern. Tensor files hold a checksum of all their bytes, so that not one bit can change unnoticed.
"""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any

from pace.atomic import write_atomically

# Of a run of `pace fit`.
CONCEPTS, GALLERY, HEAD, NAMES = "concepts.safetensors", "gallery.json", "head.safetensors", "names.json"

if TYPE_CHECKING:
    from torch import Tensor

LOCK = "lock"
_LARGEST_JSON = 64 << 20  # bytes; what Python makes of them may take twenty times as many
_BLANK = "0" * 8  # stands in a file's header while its checksum is computed


class DamagedFile(ValueError):
    """A file that cannot be used."""


@contextmanager
def reading(file: Path, remedy: str) -> Iterator[None]:
    """Whatever is wrong with the content of `file` becomes a `DamagedFile`; an error of the system stays what it is."""
    try:
        yield
    except (DamagedFile, MemoryError, ImportError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and (error.errno or type(error) is not OSError):  # what a decoder raises has none
            raise
        why = {KeyError: f"{error} is missing", RecursionError: "too deeply nested"}.get(type(error), str(error))
        why = " ".join(why.split())[:200] or type(error).__name__
        raise DamagedFile(f"{file} cannot be used: {why}; {remedy}") from error


def read_json(file: Path, pattern: Any, remedy: str) -> Any:
    with reading(file, remedy):
        if (size := file.stat().st_size) > _LARGEST_JSON:
            raise ValueError(f"it has {size >> 20} MB, more than any file of this kind")
        found = json.loads(file.read_bytes(), parse_constant=_no_number)
        expect(found, pattern)
        return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def expect(found: Any, pattern: Any, where: str = "content") -> None:
    """A ValueError unless it has this form: a type, a value, [each item], {key: value} or {str: every value}."""
    if isinstance(pattern, dict):
        expect(found, dict, where)
        for key, each in pattern.items():
            for name in found if key is str else [key]:
                if name not in found:
                    raise ValueError(f"{where} lacks {name!r}")
                expect(found[name], each, name)
    elif isinstance(pattern, list):
        expect(found, list, where)
        for item in found:
            expect(item, pattern[0], where)
    elif not (isinstance(found, pattern) if isinstance(pattern, type | UnionType) else found == pattern):
        expected = pattern.__name__ if isinstance(pattern, type) else str(pattern)
        raise ValueError(f"{where}: expected {expected}; found {found!r:.60}")


def save_tensors(file: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """As safetensors, with the header as JSON, written whole or not at all."""
    from safetensors.torch import save

    text = json.dumps({"crc32": _BLANK, **header}, allow_nan=False)  # one entry: several would be shuffled
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, {"pace": text})
    write_atomically(file, content.replace(_BLANK.encode(), _checksum(content, _BLANK).encode(), 1))


def read_tensors(file: Path, pattern: Any, remedy: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file that `save_tensors` wrote."""
    from safetensors.torch import load

    with reading(file, remedy):
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        if not 8 + size <= len(content) or not content:
            raise ValueError("it is no safetensors file, or its end is missing")
        header = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["pace"])
        expect(header, {"crc32": str}, "header")
        if (written := header.pop("crc32")) != _checksum(content, written):
            raise ValueError("its checksum is wrong")
        expect(header, pattern, "header")
        tensors = load(content)
        if any(tensor.is_complex() for tensor in tensors.values()):  # torch would drop the imaginary part
            raise ValueError("it has complex numbers")
        return tensors, header


def _checksum(content: bytes, written: str) -> str:
    """Of everything in the file but the checksum itself."""
    at = content.index(written.encode())
    before = zlib.crc32(_BLANK.encode(), zlib.crc32(content[:at]))
    return f"{zlib.crc32(memoryview(content)[at + len(written) :], before):08x}"


def fingerprint_of(file: Path) -> str:
    return blake2b(file.read_bytes(), digest_size=8).hexdigest()


@contextmanager
def locked(folder: Path, what: str, wait: float = 0) -> Iterator[None]:
    """Only one process at a time; the lock ends with the process, however that ends. `what` tells the others who is there.

    They wait so many seconds.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, timeout=wait)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(
            errno.EAGAIN, f"{what}; wait for it to finish, or choose another folder", str(folder)
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # while it is held, so that nobody gets it in between; Windows removes it by itself
            (folder / LOCK).unlink()
        lock.release()
