"""A run's text files: complete or absent, never written through a link, and each says whose it is.

A JSON file in the directory of a run carries the run's hash and seed (``run``) and a checksum of its content. So a
damaged file is recognized, and so is a file of another run, or the file of a run that was renamed.
"""

import errno
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from flatmin.lab.errors import CorruptFileError, StorageError
from flatmin.lab.spec.fields import finite

TEMPORARY_SUFFIX = ".part"
OTHER_RUN = "The directory was renamed, or the file was copied from there: restore the name or the file."
RUN_ID = re.compile(r"(?:.*-)?([0-9a-f]{10}-seed[0-9]+)")


@contextmanager
def storing(what: object, hint: str) -> Iterator[None]:
    """Turn an error of the file system into a StorageError that says what cannot be written, and what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what} cannot be written to: {error}. {hint}") from error


def run_id(path: Path) -> str | None:
    """Return the hash and the seed of the run that a path belongs to, by the name of its directory; None outside."""
    for name in (part for known in (path, path.resolve()) for part in reversed(known.parts)):
        if match := RUN_ID.fullmatch(name):
            return match[1]
    return None


def write_json(path: Path, content: dict[str, Any], *, indent: int | None = 2) -> None:
    """Write an object with its run and its checksum; numbers that JSON does not have become null."""
    run = run_id(path)
    content = finite(content) | ({} if run is None else {"run": run})
    write_atomic(path, json.dumps(content | {"checksum": _checksum(content)}, indent=indent) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote."""
    try:
        content = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(path, error) from None
    if not isinstance(content, dict):
        raise CorruptFileError(path, "it does not hold a JSON object")
    if content.pop("checksum", None) != _checksum(content):
        raise CorruptFileError(path, "its checksum differs")
    if content.pop("run", None) != run_id(path):
        raise CorruptFileError(path, "it belongs to another run", OTHER_RUN)
    return content


def read_file(path: Path) -> bytes:
    """Return the content of one of a run's files."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
    except PermissionError as error:
        raise CorruptFileError(path, error, "Make it readable.") from None
    except OSError as error:
        raise CorruptFileError(path, error) from None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file that is complete or absent; of several writers at the same time the last one counts."""
    temporary = path.with_name(f"{path.stem}-{threading.get_native_id()}{TEMPORARY_SUFFIX}")
    try:
        with open_own(temporary, "wb") as file:
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
            to_disk(file)
        temporary.replace(path)
    except OSError as error:
        if temporary.is_file():
            temporary.unlink()
        raise StorageError(f"{path} cannot be written: {error}. What was saved before is unchanged.") from error


def append(path: Path, line: str) -> None:
    """Add a line to a file, in one write that reaches the disk."""
    with storing(path, "What was saved before is unchanged."), open_own(path, "ab") as file:
        file.write(line.encode())
        to_disk(file)


def open_own(path: Path, mode: str) -> IO[Any]:
    """Open one of a run's files; a symbolic link in its place is an error, because it would lead elsewhere."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "It is a symbolic link", str(path))
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666))


def to_disk(file: IO[Any]) -> None:
    """Wait until what was written has reached the disk."""
    file.flush()
    os.fsync(file.fileno())


def remove_temporary_files(directory: Path) -> None:
    """Remove what a killed process left half-written."""
    for leftover in directory.glob(f"*{TEMPORARY_SUFFIX}"):
        leftover.unlink(missing_ok=True)


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
