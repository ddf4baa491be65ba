"""A run's curves as TensorBoard's event files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatmin.lab.errors import StorageError
from flatmin.lab.runs.directory import Metrics


@contextmanager
def tensorboard(run: Path, epoch: int) -> Iterator[Any]:
    """Give a writer of events for a run that goes on after an epoch."""
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    # Events of epochs that a killed session had begun are not shown twice.
    writer = SummaryWriter(str(run / "tensorboard"), purge_step=epoch + 1)
    try:
        yield writer
    finally:
        writer.close()


def write_events(writer: Any, line: Metrics) -> None:
    """Write an epoch's numbers.

    Raises:
        StorageError: they cannot be written.
    """
    try:
        for name, value in line.items():
            if name not in ("epoch", "step") and value is not None:
                writer.add_scalar(name, value, line["epoch"])
        writer.flush()
    except OSError as error:
        raise StorageError(f"{writer.log_dir} cannot be written to: {error}. Checkpoints are untouched.") from error
