"""Checkpoints that are complete or absent: written to a temporary file, checksummed, then renamed.

A file is called ``step-00001234-SHA256.pt``, with the first 16 digits of its content's checksum. It holds only tensors,
numbers and strings (``weights_only=True``), among them the run it belongs to. The two latest intact ones are kept.
"""

import hashlib
import io
import os
import re
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flatmin.lab.errors import StorageError
from flatmin.lab.runs.json_files import TEMPORARY_SUFFIX, open_own, remove_temporary_files, run_id, storing, to_disk

PATTERN = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")
NUM_KEPT = 2
State = dict[str, Any]


def save_checkpoint(directory: Path, step: int, state: State) -> Path:
    """Write a checkpoint atomically and remove all but it and the latest intact one of the others."""
    path = _save(directory, f"step-{step:08d}", f"The checkpoint of step {step}", state)
    others = [other for other in checkpoints(directory) if other.name != path.name]
    if len(others) >= NUM_KEPT:
        kept = next((other for other in others if _is_intact(other)), None)
        for old in others:
            if old != kept:
                with suppress(OSError):  # it may be a directory in place of a file
                    old.unlink(missing_ok=True)
    return path


def save_epoch_weights(directory: Path, epoch: int, weights: State) -> Path:
    """Write the weights after an epoch, to be kept."""
    with storing(directory, "Free some disk space, and rerun the command to resume."):
        directory.mkdir(exist_ok=True)
    return _save(directory, f"epoch-{epoch:06d}", f"The weights of epoch {epoch}", {"epoch": epoch, "model": weights})


def latest_checkpoint(directory: Path, check: Callable[[State], None] | None = None) -> State | None:
    """Return the latest usable checkpoint, its tensors on the CPU, or None; skip each corrupt one with a warning.

    ``check`` raises a ValueError if the run cannot resume from a state.
    """
    for path in checkpoints(directory):
        try:
            state = read_state(path)
            if check is not None:
                check(state)
            return state
        except ValueError as error:
            warnings.warn(f"{path} is corrupt ({error}); falling back to the previous checkpoint.", stacklevel=2)
    return None


def find_state(directory: Path, stem: str) -> Path | None:
    """Return the file of a step (``step-00000012``) or epoch (``epoch-000003``), of several an intact one, or None."""
    files = sorted(directory.glob(f"{stem}-*.pt"))
    return next((path for path in files[:-1] if _is_intact(path)), files[-1] if files else None)


def read_state(path: Path) -> State:
    """Read what was saved, with its tensors on the CPU; a ValueError says why it is not this run's, or corrupt."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(str(error)) from error
    if not path.stem.endswith(_checksum(content)):
        raise ValueError("its checksum differs")
    try:
        state: State = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many types over bytes that are not its own
        raise ValueError(f"torch cannot load it: {type(error).__name__}") from error
    if not isinstance(state, dict) or "run" not in state:
        raise ValueError("it does not hold the state of a run")
    if state["run"] != run_id(path):
        raise ValueError(f"it belongs to the run {state['run']}")
    return state


def checkpoints(directory: Path) -> list[Path]:
    """Return the files that are named like checkpoints, the latest first; none if there is no such directory."""
    files = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if match := PATTERN.fullmatch(path.name):
            with suppress(FileNotFoundError):  # another process may just have removed it
                files.append((int(match[1]), path.lstat().st_mtime_ns, path))
    return [path for _, _, path in sorted(files, reverse=True)]


def latest_step(directory: Path) -> int:
    """Return the step of the latest checkpoint by its name alone; 0 if there is none."""
    return max((int(match[1]) for path in directory.glob("*.pt") if (match := PATTERN.fullmatch(path.name))), default=0)


def prepare_directory(directory: Path, needed_bytes: int) -> None:
    """Create a directory, without what a killed run left half-written, and check that three checkpoints fit into it."""
    with storing(directory, "Choose another directory with --runs."):
        directory.mkdir(parents=True, exist_ok=True)
        remove_temporary_files(directory)
        probe = directory / f"probe{TEMPORARY_SUFFIX}"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
        free = shutil.disk_usage(directory).free
    total = (NUM_KEPT + 1) * needed_bytes
    if free < total:
        raise StorageError(
            f"{directory} has {free / 1e6:,.1f} MB free, but the checkpoints of this run need {total / 1e6:,.1f} MB. "
            "Free some disk space or choose another directory with --runs."
        )


def _save(directory: Path, stem: str, what: str, state: State) -> Path:
    temporary = directory / f"{stem}{TEMPORARY_SUFFIX}"
    try:
        with open_own(temporary, "wb") as file:
            torch.save({**state, "run": run_id(directory)}, file)
            to_disk(file)
        path = directory / f"{stem}-{_checksum(temporary.read_bytes())}.pt"
        temporary.replace(path)
        _sync_directory(directory)
    except (OSError, RuntimeError) as error:  # torch's zip writer turns a full disk into a RuntimeError
        temporary.unlink(missing_ok=True)
        saved = [path.name for path in checkpoints(directory)]
        raise StorageError(
            f"{what} cannot be written to {directory}: {error}. "
            f"{f'Saved so far: {saved[0]}. ' if saved else ''}"
            "Free some disk space or choose another --runs directory, and rerun the command to resume."
        ) from error
    return path


def _is_intact(path: Path) -> bool:
    try:
        return path.stem.endswith(_checksum(path.read_bytes()))
    except OSError:
        return False


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _sync_directory(directory: Path) -> None:
    # The rename itself has to reach the disk as well.
    if os.name == "posix":
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
