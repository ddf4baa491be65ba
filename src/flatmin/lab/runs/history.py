"""metrics.jsonl: one line per epoch, with the run it belongs to and a checksum.

It holds only what is bitwise identical in every repetition of the run, and it is the only copy: a checkpoint says how
many of its lines are valid, and result.json that there will be no more. TensorBoard's event files repeat the numbers.
"""

import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from flatmin.lab.errors import CorruptFileError
from flatmin.lab.runs.json_files import OTHER_RUN, append, read_file, run_id, storing, write_atomic

Metrics = dict[str, float | int | None]
FILE = "metrics.jsonl"
UNCHANGED = "Checkpoints are unchanged."


def write_history(run: Path, history: list[Metrics]) -> None:
    """Replace the file, without the lines that a killed session wrote after its last checkpoint."""
    write_atomic(run / FILE, "".join(_line(run, metrics) for metrics in history))


def add_metrics(run: Path, metrics: Metrics) -> None:
    """Append an epoch."""
    append(run / FILE, _line(run, metrics))


def read_history(run: Path) -> list[Metrics]:
    """Return the metrics of the epochs that a run has completed; a CorruptFileError says why they cannot be used."""
    try:
        # What a killed process left half-written has no newline.
        *lines, _ = read_file(run / FILE).split(b"\n")
    except FileNotFoundError:
        return []
    history = [_read_line(run, line) for line in lines]
    first = history[0]["epoch"] if history else 1
    if [metrics["epoch"] for metrics in history] != list(range(first, first + len(history))) or first not in (0, 1):
        raise CorruptFileError(run / FILE, "an epoch is missing")
    return history


def _read_line(run: Path, line: bytes) -> dict[str, Any]:
    try:
        metrics = json.loads(line)
        if metrics.pop("crc32") != _crc32(metrics):
            raise ValueError
        owner = metrics.pop("run")
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
        raise CorruptFileError(run / FILE, "a line is corrupt") from None
    if owner != run_id(run):
        raise CorruptFileError(run / FILE, f"it belongs to the run {owner}", OTHER_RUN)
    return dict(metrics)


def _line(run: Path, metrics: Metrics) -> str:
    content = {**metrics, "run": run_id(run)}
    return json.dumps(content | {"crc32": _crc32(content)}) + "\n"


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


@contextmanager
def tensorboard(run: Path, epoch: int) -> Iterator[Any]:
    """Give a writer of events for a run that resumes after an epoch; later events, of a killed session, are hidden."""
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    print_error = threading.excepthook

    def skip_writer(error: threading.ExceptHookArgs) -> None:
        if type(error.thread).__name__ != "_AsyncWriterThread":  # its errors are raised by the next call, too
            print_error(error)

    with mock.patch.object(threading, "excepthook", skip_writer):
        with storing(run / "tensorboard", UNCHANGED):
            writer = SummaryWriter(run / "tensorboard", purge_step=epoch + 1)
        try:
            yield writer
        finally:
            with storing(run / "tensorboard", UNCHANGED):
                writer.close()


def write_events(writer: Any, line: Metrics) -> None:
    """Write an epoch's numbers."""
    with storing(writer.log_dir, UNCHANGED):
        for name, value in line.items():
            if name not in ("epoch", "step") and value is not None:
                writer.add_scalar(name, value, line["epoch"])
        writer.flush()
