"""Checkpoints that are whole or not there: written aside, checksummed, renamed, and read with a way back.

A file is called ``step-00001234-SHA256.pt``, with the first 16 digits of its content's checksum: it proves itself. It
holds only tensors, numbers and strings (``weights_only=True``). The two latest are kept.
"""

import hashlib
import io
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from flatmin.lab.errors import StorageError

PATTERN = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")
NUM_KEPT = 2
TEMPORARY_SUFFIX = ".part"


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint atomically and remove all but the two latest.

    Raises:
        StorageError: the disk is full or the folder unwritable; earlier checkpoints are untouched.
    """
    try:
        path = _write_state(folder, f"step-{step:08d}", state)
    except (OSError, RuntimeError) as error:  # torch's zip writer turns a full disk into a RuntimeError
        kept = [p.name for p in checkpoints(folder)]
        raise StorageError(
            f"The checkpoint of step {step} cannot be written to {folder}: {error}. "
            f"{'Saved so far: ' + kept[0] + '.' if kept else 'Nothing was saved before.'} "
            "Make room or choose another --runs folder, and run the same command again to go on."
        ) from error
    for old in checkpoints(folder)[NUM_KEPT:]:
        old.unlink(missing_ok=True)
    return path


def save_epoch_weights(folder: Path, epoch: int, state: dict[str, Any]) -> Path:
    """Write the weights after an epoch, to stay.

    Raises:
        StorageError: the disk is full or the folder unwritable.
    """
    try:
        folder.mkdir(exist_ok=True)
        return _write_state(folder, f"epoch-{epoch:06d}", state)
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"The weights of epoch {epoch} cannot be written to {folder}: {error}. Make room, and run the same "
            "command again to go on."
        ) from error


def load_epoch_weights(folder: Path, epoch: int) -> bytes | None:
    """Return the weights after an epoch, whole and as they were written, or None."""
    return _read_whole(folder, f"epoch-{epoch:06d}")


def checkpoint_of(folder: Path, step: int) -> bytes | None:
    """Return the checkpoint after a step, whole and as it was written, or None."""
    return _read_whole(folder, f"step-{step:08d}")


def latest_checkpoint(folder: Path) -> bytes | None:
    """Return the content of the latest checkpoint that is whole, or None if there is none.

    A damaged one is passed over with a warning.
    """
    for path in checkpoints(folder):
        try:
            content = path.read_bytes()
        except OSError as error:
            warnings.warn(f"{path} cannot be read ({error}); going back to the one before.", stacklevel=2)
            continue
        if _is_content_of(path, content):
            return content
        warnings.warn(f"{path} is damaged (its checksum differs); going back to the one before.", stacklevel=2)
    return None


def read_state(content: bytes, device: torch.device) -> dict[str, Any]:
    """Return what was saved, with its tensors on a device."""
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    return state


def checkpoints(folder: Path) -> list[Path]:
    """Return the files of a folder that are named as checkpoints, the latest first."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := PATTERN.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda item: (item[0], item[1].stat().st_mtime_ns), reverse=True)]


def latest_step(folder: Path) -> int:
    """Return the step of the latest checkpoint by its name alone; 0 if there is none."""
    steps = [int(match[1]) for path in folder.glob("step-*.pt") if (match := PATTERN.fullmatch(path.name))]
    return max(steps, default=0)


def prepare_folder(folder: Path, needed_bytes: int) -> None:
    """Make a folder and see that it can hold three checkpoints of a size; remove what a killed run left half-written.

    Raises:
        StorageError: it cannot be made or written to, or the disk has too little room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"*{TEMPORARY_SUFFIX}"):
            leftover.unlink()
        probe = folder / f"probe{TEMPORARY_SUFFIX}"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise StorageError(f"{folder} cannot be written to: {error}. Choose another folder with --runs.") from error
    total = (NUM_KEPT + 1) * needed_bytes
    if free < total:
        raise StorageError(
            f"{folder} has {free / 1e9:.2f} GB free, but the checkpoints of this run need {total / 1e9:.2f} GB. "
            "Make room or choose another folder with --runs."
        )


def _write_state(folder: Path, stem: str, state: dict[str, Any]) -> Path:
    temporary = folder / f"{stem}{TEMPORARY_SUFFIX}"
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"{stem}-{_checksum(temporary)}.pt"
        temporary.replace(path)
        _sync_folder(folder)
    except (OSError, RuntimeError):
        temporary.unlink(missing_ok=True)
        raise
    return path


def _read_whole(folder: Path, stem: str) -> bytes | None:
    found = ((path, path.read_bytes()) for path in sorted(folder.glob(f"{stem}-*.pt")))
    return next((content for path, content in found if _is_content_of(path, content)), None)


def _is_content_of(path: Path, content: bytes) -> bool:
    return hashlib.sha256(content).hexdigest()[:16] == path.stem.rpartition("-")[2]


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _sync_folder(folder: Path) -> None:
    # The rename itself has to reach the disk as well.
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
