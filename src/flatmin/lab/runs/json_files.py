"""JSON files of a run: complete or absent, without NaN, and with a checksum of what they hold."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatmin.lab.errors import CorruptFileError, StorageError
from flatmin.lab.spec.fields import finite

TEMPORARY_SUFFIX = ".part"


@contextmanager
def storing(what: object, hint: str) -> Iterator[None]:
    """Turn an error of the file system into a StorageError that says what cannot be written, and what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what} cannot be written to: {error}. {hint}") from error


def write_json(path: Path, content: dict[str, Any], *, indent: int | None = 2) -> None:
    """Write an object with its checksum; numbers that JSON does not have become null.

    Raises:
        StorageError: the file cannot be written; the previous one is unchanged.
    """
    content = finite(content)
    write_atomic(path, json.dumps(content | {"checksum": _checksum(content)}, indent=indent) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote. A file without a checksum (flatmin did not always write them) is taken as it is.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: the file cannot be read, is not a JSON object, or its checksum differs.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFileError(path, error) from None
    if not isinstance(content, dict):
        raise CorruptFileError(path, "it does not hold a JSON object")
    if content.get("checksum") != _checksum(content) and "checksum" in content:
        raise CorruptFileError(path, "its checksum differs")
    return {name: value for name, value in content.items() if name != "checksum"}


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file that is complete or absent.

    Raises:
        StorageError: the file cannot be written; the previous one is unchanged.
    """
    temporary = path.with_suffix(TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if temporary.is_file():
            temporary.unlink()
        raise StorageError(f"{path} cannot be written: {error}. What was saved before is unchanged.") from error


def remove_temporary_files(directory: Path) -> None:
    """Remove what a killed process left half-written."""
    for leftover in directory.glob(f"*{TEMPORARY_SUFFIX}"):
        leftover.unlink(missing_ok=True)


def _checksum(content: dict[str, Any]) -> str:
    content = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
