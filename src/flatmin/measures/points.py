"""The points of a landscape: the finished ones on disk, and the time that the others will take.

The file is text and grows by one line a point. The first line says what was measured. It is written to another file and
renamed, so a cache either has it or does not exist; every other line is one write, with a checksum of the point and the
first line. A point whose line was left half written by a killed process, was edited, or belongs to another landscape is
measured again.
"""

import json
import os
import sys
import time
import zlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

FORMAT = "flatmin landscape 2"
Index = tuple[int, ...]


class PointCache(AbstractContextManager["PointCache"]):
    """Reads the points in the file, and appends new ones; a file with another header is left as it is."""

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

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


class Progress:
    """Counts finished pieces of work and writes a line with the time left.

    Pieces that were ``done`` before say nothing about the speed. If ``show`` is None, only a terminal is written to.
    """

    def __init__(
        self, label: str, total: int, *, done: int = 0, show: bool | None = None, stream: TextIO | None = None
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._show = self._terminal if show is None else show
        self._label, self._total, self._before, self._done = label, total, done, done
        self._start = time.monotonic()
        self._next = 0.0

    def advance(self) -> None:
        """Count one piece, and write a line if the last one is old."""
        self._done += 1
        now = time.monotonic()
        finished = self._done == self._total
        if not self._show or (now < self._next and not finished):
            return
        self._next = now + (0.2 if self._terminal else 10.0)
        left = (now - self._start) / (self._done - self._before) * (self._total - self._done)
        line = f"{self._label}: {self._done}/{self._total} ({self._done / self._total:.0%}), {clock(left)} left"
        self._stream.write(f"\r{line}\033[K" if self._terminal else f"{line}\n")
        if finished and self._terminal:
            self._stream.write("\n")
        self._stream.flush()


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds.

    Example:
        >>> clock(75), clock(3725)
        ('1:15', '1:02:05')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
