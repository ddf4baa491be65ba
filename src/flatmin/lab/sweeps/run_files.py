"""Runs on nodes that do not see the directory of runs: files are fetched from it, and sent to it as they change."""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flatmin.lab.runs.directory import RunDirectory
from flatmin.lab.runs.json_files import TEMPORARY_SUFFIX, storing, write_atomic
from flatmin.lab.sweeps.jobs import Job, JobStatus, status_of_error
from flatmin.lab.sweeps.scheduler import prerequisite

SEND_SECONDS = 2.0
Files = dict[str, bytes]
"""Contents of files, by their paths relative to the directory of runs."""


class RunStore:
    """The directory of runs, for jobs on other nodes; an actor on the machine that has the directory."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self._locked: dict[str, RunDirectory] = {}

    def exists(self, path: Path) -> bool:
        """Return whether this process sees a file."""
        return path.exists()

    def begin(self, job: Job) -> Files | JobStatus:
        """Lock a job's run and return its files and the files of runs it builds on; or why that is impossible."""
        directory = RunDirectory(job.experiment, job.seed, self.runs)
        try:
            directory.open()
            self._locked[job.name] = directory
            return {
                path: (self.runs / path).read_bytes()
                for name in {job.name} | _builds_on(job)
                for path in stamps(self.runs / name, self.runs)
            }
        except Exception as error:
            return status_of_error(error)

    def write(self, files: Files, removed: list[str]) -> None:
        """Write files, each complete or absent, and remove others."""
        write_files(self.runs, files)
        for path in removed:
            (self.runs / path).unlink(missing_ok=True)

    def end(self, name: str) -> None:
        """Unlock a run; its job has ended, whether its node could say so or not."""
        if name in self._locked:
            self._locked.pop(name).close()


class FileSender:
    """Sends what changes in a directory of runs, every few seconds and once more at the end of the ``with`` block."""

    def __init__(self, runs: Path, send: Callable[[Files, list[str]], object]) -> None:
        self.error: Exception | None = None
        self._runs, self._send, self._sent = runs, send, stamps(runs, runs)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "FileSender":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SEND_SECONDS):
            self._try_to_send()
        self._try_to_send()

    def _try_to_send(self) -> None:
        try:
            self._send_changes()
            self.error = None
        except Exception as error:  # the next attempt may succeed, on a disk that was full for example
            self.error = error

    def _send_changes(self) -> None:
        # The list first, then the contents: a file that says that others are complete was then listed after them.
        now = stamps(self._runs, self._runs)
        files: Files = {}
        for path in sorted((p for p in now if now[p] != self._sent.get(p)), key=_order):
            with suppress(FileNotFoundError):
                files[path] = (self._runs / path).read_bytes()
        removed = [path for path in self._sent if path not in now]
        if files or removed:
            self._send(files, removed)
        self._sent = now


def stamps(directory: Path, runs: Path) -> dict[str, tuple[int, int]]:
    """Return the paths of all complete files, relative to the directory of runs, with their times and sizes."""
    found = {}
    for path in sorted(directory.rglob("*")):
        with suppress(FileNotFoundError):
            if path.is_file() and path.name != "lock" and path.suffix != TEMPORARY_SUFFIX:
                found[path.relative_to(runs).as_posix()] = (path.stat().st_mtime_ns, path.stat().st_size)
    return found


def write_files(runs: Path, files: Files) -> None:
    """Write files into a directory of runs."""
    for name, content in files.items():
        path = runs / name
        with storing(path.parent, "Free some disk space, and rerun."):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)


def _order(path: str) -> tuple[bool, bool, str]:
    """Sort what describes a run before its checkpoints, and its result last, as training writes them.

    So what has arrived when a machine dies is a run that can be resumed.
    """
    return path.endswith("/result.json"), "/checkpoints/" in path or "/weights/" in path, path


def _builds_on(job: Job) -> set[str]:
    """Return the names of the runs that a job reads: its first stage, and the one whose weights it starts from."""
    names = (prerequisite(job), prerequisite(replace(job, experiment=job.experiment.first_stage())))
    return {name for name in names if name is not None}
