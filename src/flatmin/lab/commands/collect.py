"""``flatmin collect RUNS RESULTS``: finished runs become evidence in git, one line each."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from flatmin.lab.commands.report import STUDY_FILE, described, items_named, read_study
from flatmin.lab.errors import RunError, SpecError
from flatmin.lab.runs.json_files import storing, write_atomic
from flatmin.lab.runs.record import Records, RunRecord, all_records, write_records
from flatmin.lab.studies.registered_plan import PLAN_FILE, Registration, read_plan
from flatmin.lab.studies.study import Scale, planned_jobs
from flatmin.lab.sweeps.sweep import unite

SHOWN_NAMES = 5


@dataclass(frozen=True)
class Collect:
    """Add finished runs to RESULTS/runs.jsonl, and write report.md and the figures from it; weights stay behind."""

    runs: Annotated[Path, tyro.conf.Positional]
    """The directory of the runs."""
    results: Annotated[Path, tyro.conf.Positional]
    """Where the evidence goes. Runs that it has and that the items still ask for stay."""
    items: tuple[str, ...] = ()
    """Names of items (`flatmin list items`), or all of the paper's: their runs are collected; as before if none."""
    scale: Scale = "laptop"
    """At which scale they were run."""
    title: str = "Paper vs. measured"
    """The page's title."""
    allow_unknown_code: bool = False
    """Collect runs even if their code had uncommitted changes, or is not in the history of RESULTS."""

    def run(self, console: Console) -> None:
        """Collect."""
        from flatmin.lab.report import write_report

        items, scale, title = (self.items, self.scale, self.title) if self.items else read_study(self.results)[:3]
        if not items:
            raise SpecError(f"Which items? {self.results / STUDY_FILE} does not exist: pass --items.")
        known, added = Records(self.results), all_records(self.runs)
        complete = {name: record for name, record in added.items() if record.is_complete}
        replaced = [name for name, new in complete.items() if known[name].is_complete and not _agree(new, known[name])]
        known |= {name: new if name in replaced else _merged(new, known[name]) for name, new in complete.items()}
        named = items_named(items)
        jobs = unite(job for item in named for job in planned_jobs(item, scale, known).values())
        self._check_code([record for name, record in complete.items() if name in jobs])
        kept = [known[name] for name in jobs if known[name].is_complete]
        with storing(self.results, "Choose another directory."):
            self.results.mkdir(parents=True, exist_ok=True)
        write_records(self.results, kept, {name: job.curves for name, job in jobs.items()})
        plans = {name: asdict(when) for name, when in registrations(self.results).items()}
        study = {"items": items, "scale": scale, "title": title} | ({"plans": plans} if plans else {})
        write_atomic(self.results / STUDY_FILE, json.dumps(study, indent=1) + "\n")
        shutil.rmtree(self.results / "figures", ignore_errors=True)  # some may have other names now
        known = Records(self.results)
        found = described(named, scale, known, self.results)
        page = write_report(found, known=known, out=self.results, title=title, html=False)
        for name in (name for name in replaced if name in jobs):
            console.print(f"{name} replaces an earlier run with other results.", highlight=False)
        console.print(f"{len(kept)} of {len(jobs)} runs are in {self.results}. The report: {page}")

    def _check_code(self, records: Sequence[RunRecord]) -> None:
        """Refuse runs whose code nobody can look up."""
        commits = {r.name: {str(s.get("commit") or "(none)") for s in r.sessions or [{}]} for r in records}
        unknown = {commit for commit in set().union(*commits.values()) if not _is_known(commit, self.results)}
        names = [name for name, own in commits.items() if own & unknown]
        if names and not self.allow_unknown_code:
            more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
            raise RunError(
                f"The code of {', '.join(names[:SHOWN_NAMES])}{more} is not known: it had uncommitted changes (a "
                f"trailing +), or its commit is not in the history of {self.results} ({', '.join(sorted(unknown))}). "
                "Run them again from a clean commit, or pass --allow-unknown-code."
            )


def registrations(results: Path) -> dict[str, Registration]:
    """Return the commit that registered each item of RESULTS/plan.json: from git; outside of it, what is known."""
    plans, _ = read_plan(results)
    *_, found = read_study(results)
    for name in plans:
        # The first commit that added the item's name to the file.
        words = ("log", "--reverse", "--format=%H %cI", f'-S"{name}": {{', "--", PLAN_FILE)
        if lines := _git(results, *words).splitlines():
            found[name] = Registration(*lines[0].split())
    return {name: found[name] for name in plans if name in found}


def _agree(one: RunRecord, other: RunRecord) -> bool:
    return (one.state, one.metrics) == (other.state, other.metrics)


def _merged(new: RunRecord, old: RunRecord) -> RunRecord:
    """Return a run with all that was measured of it, and the longer of its curves, where two say the same."""
    history = max(new.history, old.history, key=len)
    return replace(new, history=history, measured={**old.measured, **new.measured})


def _is_known(commit: str, repository: Path) -> bool:
    """Return whether a commit is in the history of the repository that a directory is in."""
    directory = next(path for path in (repository.absolute(), *repository.absolute().parents) if path.is_dir())
    return commit.isalnum() and _git(directory, "merge-base", commit, "HEAD").strip() == commit


def _git(directory: Path, *words: str) -> str:
    try:
        command = ["git", "-C", str(directory), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
