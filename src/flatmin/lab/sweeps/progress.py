"""How a sweep is shown: a table that follows it in a terminal, else a line for each job that ended."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flatmin.lab.runs.record import read_record
from flatmin.lab.spec.experiment import passes_per_step
from flatmin.lab.sweeps.jobs import Job

State = Literal["waiting", "running", "done", "failed"]
REFRESHES_PER_SECOND = 2
OTHER_LINES = 8  # of a terminal's height: the table's frame, sums, the prompt


def passes(job: Job) -> int:
    """Return how many passes over the training set a job takes in all, by which its length is guessed."""
    return round(job.experiment.epochs * passes_per_step(job.experiment))


class SweepProgress:
    """What is known of every job of a sweep while it runs; epochs are read from the runs' own files."""

    def __init__(self, jobs: Mapping[str, Job], runs: Path, console: Console | None, what: str) -> None:
        self.jobs, self.runs, self.console, self.what = jobs, runs, console, what
        self.states: dict[str, State] = dict.fromkeys(jobs, "waiting")
        self.epochs_before: dict[str, int] = {}
        self.started_at = time.monotonic()
        self.groups: dict[str, list[str]] = {}
        for name, job in jobs.items():
            self.groups.setdefault(job.experiment.run_hash(), []).append(name)

    def shown(self) -> AbstractContextManager[object]:
        """Show the table as long as it lasts, in a terminal."""
        if self.console is None or not self.console.is_terminal:
            return nullcontext()
        rate = REFRESHES_PER_SECOND
        return Live(get_renderable=self.table, console=self.console, refresh_per_second=rate, transient=True)

    def complete_before(self, name: str, failed: bool) -> None:
        """Take note of a job that an earlier sweep completed."""
        self.states[name] = "failed" if failed else "done"
        self.epochs_before[name] = self.jobs[name].experiment.epochs

    def started(self, name: str) -> None:
        """Take note of a job that begins or resumes."""
        self.states[name] = "running"
        self.epochs_before.setdefault(name, self.num_epochs(name))

    def waits(self, name: str, why: str | None) -> None:
        """Take note of a job that has to wait again; say why, if it is given."""
        self.states[name] = "waiting"
        if why is not None:
            self.say(f"{name}: {why}")

    def ended(self, name: str, problem: str | None) -> None:
        """Take note of a job that is done or failed, and print its line."""
        self.states[name] = "done" if problem is None else "failed"
        if self.console is None or (self.console.is_terminal and problem is None):
            return
        num_ended = sum(state in ("done", "failed") for state in self.states.values())
        self.say(f"[{num_ended}/{len(self.jobs)}] {name}: {problem or self._found(name)}")

    def say(self, line: str) -> None:
        """Print a line, if there is somebody to read it."""
        if self.console is not None:
            self.console.print(Text(line), soft_wrap=True)

    def num_epochs(self, name: str) -> int:
        """Return how many epochs of a job are completed."""
        if self.states[name] == "done":
            return self.jobs[name].experiment.epochs
        try:
            return (self.runs / name / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def seconds_left(self) -> float | None:
        """Return the time that is left at the speed so far; None if nothing is known yet."""
        done, left = 0.0, 0.0
        for name, job in self.jobs.items():
            if self.states[name] == "failed":
                continue
            epochs = job.experiment.epochs
            each = passes(job) / max(1, epochs)  # a pretrained model may be measured as it is
            completed = min(epochs, self.num_epochs(name))
            left += each * (epochs - completed)
            done += each * max(0, completed - self.epochs_before.get(name, completed))
        return (time.monotonic() - self.started_at) * left / done if done else None

    def table(self) -> RenderableType:
        """Return the table as it is now."""
        table = Table(title=self.what or None, title_justify="left")
        for column in ("experiment", "done", "running", "failed"):
            table.add_column(column, overflow="fold")
        groups = list(self.groups.values())
        room = 10**6 if self.console is None else max(1, self.console.height - OTHER_LINES)
        if len(groups) > room:  # what is going on now is worth its lines
            groups = sorted(groups, key=lambda names: not any(self.states[n] == "running" for n in names))[:room]
        for names in groups:
            table.add_row(self._title(names[0]), *self._counts(names))
        if len(self.groups) > 1:
            table.add_section()
            table.add_row(f"all {len(self.groups)} experiments", *self._counts(list(self.jobs), brief=True))
        seconds = self.seconds_left()
        left = "time left: not known yet" if seconds is None else f"time left: about {time_text(seconds)}"
        return Group(table, Text(left))

    def _title(self, name: str) -> str:
        experiment = self.jobs[name].experiment
        alike = [names[0] for names in self.groups.values() if self.jobs[names[0]].experiment.name == experiment.name]
        return experiment.name if experiment.name and len(alike) == 1 else name.rpartition("-seed")[0]

    def _counts(self, names: list[str], *, brief: bool = False) -> tuple[str, str, str]:
        by_state = {state: [n for n in names if self.states[n] == state] for state in ("done", "running", "failed")}
        epochs = [f"{self.num_epochs(n)}/{self.jobs[n].experiment.epochs}" for n in by_state["running"]]
        running = str(len(epochs)) if brief else f"epoch {', '.join(epochs)}" if epochs else ""
        return f"{len(by_state['done'])}/{len(names)}", running, str(len(by_state["failed"]) or "")

    def _found(self, name: str) -> str:
        record = read_record(name, self.runs)
        errors = [(key.removesuffix("_error"), record.metrics.get(key)) for key in ("valid_error", "test_error")]
        shown = [f"{key} error {100 * value:.2f} %" for key, value in errors if value is not None]
        return ", ".join([*shown, time_text(record.time_seconds)])


def time_text(seconds: float) -> str:
    """Return a duration, human-readable.

    Example:
        >>> time_text(8.24), time_text(83.0), time_text(7384.0)
        ('8.2 s', '1 min 23 s', '2 h 3 min')
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
