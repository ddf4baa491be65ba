"""A run's metrics as TensorBoard's event files."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatmin.lab.runs.directory import Metrics
from flatmin.lab.runs.json_files import storing

UNCHANGED = "Checkpoints are unchanged."


class EventWriter:
    """Writes events at once: torch's writer does it in a thread, whose errors nobody can catch."""

    def __init__(self, directory: Path, purge_step: int) -> None:
        from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]  # slow to import
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self.directory, self._protocol = directory, event_pb2
        directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter((directory / name).open("wb", buffering=0))
        self._write(file_version="brain.Event:2")
        # Events of epochs that a killed session had started are not shown twice.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=purge_step, session_log=start)

    def add_scalars(self, values: dict[str, float], step: int) -> None:
        """Write several numbers of one step."""
        self._write(step=step, summary={"value": [{"tag": n, "simple_value": v} for n, v in values.items()]})
        self._records.flush()

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _write(self, **fields: Any) -> None:
        event = self._protocol.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())


@contextmanager
def tensorboard(run: Path, epoch: int) -> Iterator[EventWriter]:
    """Give a writer of events for a run that resumes after an epoch.

    Raises:
        StorageError: events cannot be written.
    """
    with storing(run / "tensorboard", UNCHANGED):
        writer = EventWriter(run / "tensorboard", purge_step=epoch + 1)
    try:
        yield writer
    finally:
        with storing(writer.directory, UNCHANGED):
            writer.close()


def write_events(writer: EventWriter, line: Metrics) -> None:
    """Write an epoch's numbers.

    Raises:
        StorageError: they cannot be written.
    """
    values = {name: value for name, value in line.items() if name not in ("epoch", "step") and value is not None}
    with storing(writer.directory, UNCHANGED):
        writer.add_scalars(values, int(line["epoch"] or 0))
