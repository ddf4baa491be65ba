"""How far a long measurement is, and how long it will take."""

import sys
import time
from typing import TextIO


class Progress:
    """Counts finished pieces of work and writes a line with the time left.

    Args:
        label: what is being done.
        total: how many pieces there are.
        done: how many were finished before; they say nothing about the speed.
        show: whether to write; if None, only where the stream is a terminal.
        stream: standard error if None.
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
