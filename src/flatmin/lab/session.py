"""A session of a run: its clock, and the signals that may end it."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class Clock:
    """Measures the time of training, without that of evaluation and saving, and knows when to save again."""

    def __init__(self, checkpoint_seconds: float) -> None:
        self.checkpoint_seconds, self.saved_at = checkpoint_seconds, time.monotonic()
        self.num_examples, self.epoch_seconds, self.started_at = 0, 0.0, 0.0

    def start(self) -> None:
        """Begin an epoch."""
        self.num_examples, self.epoch_seconds, self.started_at = 0, 0.0, time.monotonic()

    def stop(self) -> float:
        """Return the seconds since the start or the last stop."""
        now = time.monotonic()
        seconds, self.started_at = now - self.started_at, now
        self.epoch_seconds += seconds
        return seconds

    def checkpoint_is_due(self) -> bool:
        """Return whether enough time went by since the last checkpoint."""
        return time.monotonic() - self.saved_at >= self.checkpoint_seconds

    def saved(self) -> None:
        """Note that a checkpoint was written, and go on."""
        self.saved_at = self.started_at = time.monotonic()

    @property
    def examples_per_second(self) -> float:
        """The speed of this session's part of the epoch."""
        return self.num_examples / self.epoch_seconds


@dataclass
class Interruption:
    """Which signal came, if any."""

    signal_number: int = 0


@contextmanager
def noted_signals() -> Iterator[Interruption]:
    """Take note of SIGTERM and Ctrl-C instead of dying from them; a second Ctrl-C is obeyed at once."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # only the main thread may ask for signals
        return

    def note(number: int, _: object) -> None:
        interruption.signal_number = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
