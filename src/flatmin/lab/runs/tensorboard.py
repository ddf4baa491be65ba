"""A run's metrics as TensorBoard's event files."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatmin.lab.runs.history import Metrics
from flatmin.lab.runs.json_files import storing

UNCHANGED = "Checkpoints are unchanged."


@contextmanager
def tensorboard(run: Path, epoch: int) -> Iterator[Any]:
    """Give a writer of events for a run that resumes after an epoch; later events, of a killed session, are hidden.

    Raises:
        StorageError: events cannot be written.
    """
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    print_error = threading.excepthook

    def skip_writer(error: threading.ExceptHookArgs) -> None:
        if type(error.thread).__name__ != "_AsyncWriterThread":  # its errors are raised by the next call, too
            print_error(error)

    threading.excepthook = skip_writer
    try:
        with storing(run / "tensorboard", UNCHANGED):
            writer = SummaryWriter(run / "tensorboard", purge_step=epoch + 1)
        try:
            yield writer
        finally:
            with storing(run / "tensorboard", UNCHANGED):
                writer.close()
    finally:
        threading.excepthook = print_error


def write_events(writer: Any, line: Metrics) -> None:
    """Write an epoch's numbers.

    Raises:
        StorageError: they cannot be written.
    """
    with storing(writer.log_dir, UNCHANGED):
        for name, value in line.items():
            if name not in ("epoch", "step") and value is not None:
                writer.add_scalar(name, value, line["epoch"])
        writer.flush()
