"""A run's metrics as TensorBoard's event files."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatmin.lab.errors import StorageError
from flatmin.lab.runs.directory import Metrics


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
    try:
        writer = EventWriter(run / "tensorboard", purge_step=epoch + 1)
    except OSError as error:
        raise _storage_error(run / "tensorboard", error) from error
    try:
        yield writer
    finally:
        try:
            writer.close()
        except OSError as error:
            raise _storage_error(writer.directory, error) from error


def write_events(writer: EventWriter, line: Metrics) -> None:
    """Write an epoch's numbers.

    Raises:
        StorageError: they cannot be written.
    """
    values = {name: value for name, value in line.items() if name not in ("epoch", "step") and value is not None}
    try:
        writer.add_scalars(values, int(line["epoch"] or 0))
    except OSError as error:
        raise _storage_error(writer.directory, error) from error


def _storage_error(directory: Path, error: OSError) -> StorageError:
    return StorageError(f"{directory} cannot be written to: {error}. Checkpoints are unchanged.")
