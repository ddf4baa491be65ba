"""The finished points of a landscape on disk: a text file that grows by one line a point.

The first line says what was measured. It is written to another file and renamed, so a cache either has it or does not
exist; every other line is one write, with a checksum of the point and the first line. A point whose line was left half
written by a killed process, was edited, or belongs to another landscape is measured again.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

FORMAT = "flatmin landscape 2"
Index = tuple[int, ...]


class PointCache:
    """Reads the points in the file, and appends new ones.

    Args:
        path: the file; created with its directories if it does not exist.
        header: what is measured, in JSON: another header is another landscape.

    Raises:
        ValueError: if the file holds something else; it is not changed.
    """

    def __init__(self, path: str | os.PathLike[str], header: dict[str, Any]) -> None:
        self.path = Path(path)
        self._header = json.loads(json.dumps({"format": FORMAT, **header}))
        self.points: dict[Index, tuple[float, float]] = {}
        if self.path.exists():
            self._read()
        else:
            self._create()
        self._file: BinaryIO = self.path.open("ab")
        if self.path.read_bytes()[-1:] != b"\n":
            self._file.write(b"\n")

    def _create(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        with draft.open("wb") as file:
            file.write(json.dumps(self._header).encode() + b"\n")
            _to_disk(file)
        draft.replace(self.path)

    def _read(self) -> None:
        if not self.path.is_file():
            raise ValueError(f"cache must be a file, {self.path} is a directory.")
        first, *lines = self.path.read_bytes().split(b"\n")
        try:
            stored = json.loads(first)
        except ValueError:
            stored = None
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise ValueError(f"{self.path} is not a landscape's cache; it was not changed. Choose another file.")
        other = [key for key in self._header if stored.get(key) != self._header[key]]
        if other:
            raise ValueError(
                f"The cache {self.path} belongs to another landscape (it differs in: {', '.join(other)}); it was not "
                "changed. Choose another file, or the model, data and settings it was made with."
            )
        for line in lines:
            try:
                *index, loss, accuracy, checksum = json.loads(line)
                if checksum == self._checksum(tuple(index), loss, accuracy):
                    self.points[tuple(index)] = (float(loss), float(accuracy))
            except (ValueError, TypeError, RecursionError):
                continue

    def add(self, index: Index, loss: float, accuracy: float) -> None:
        """Put a finished point on disk."""
        self.points[index] = (loss, accuracy)
        line = json.dumps([*index, loss, accuracy, self._checksum(index, loss, accuracy)])
        self._file.write(line.encode() + b"\n")
        _to_disk(self._file)

    def _checksum(self, index: Index, loss: float, accuracy: float) -> int:
        return zlib.crc32(json.dumps([self._header, *index, loss, accuracy]).encode())

    def __enter__(self) -> "PointCache":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
