"""The registered plan of a study: what is to be run and compared, in git before the first replica.

``flatmin reproduce ITEM --plan --write RESULTS`` writes RESULTS/plan.json. A plan that changes later needs an entry
that says when, what, why, and what was known by then; the page lists them, with each difference between plan and runs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from flatmin.lab.errors import CorruptFileError, SpecError
from flatmin.lab.runs.json_files import write_atomic
from flatmin.lab.runs.record import PlannedRecords, Records, RunRecord
from flatmin.lab.spec.fields import plain
from flatmin.lab.studies.cost import cost
from flatmin.lab.studies.findings import Findings
from flatmin.lab.studies.study import Item, Known, Scale, planned_jobs
from flatmin.lab.sweeps.jobs import Job

PLAN_FILE = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Change:
    """Why a registered plan is not what it was."""

    item: str
    date: str
    what: str
    why: str
    known: str
    """What was known of the results by then."""


@dataclass(frozen=True)
class Registration:
    """The commit that added an item's plan."""

    commit: str
    date: str
    """When, as ISO 8601 with its time zone."""


def plan_of(item: Item, scale: Scale) -> dict[str, Any]:
    """Return the plan of an item: its groups of runs, its comparisons, and the rules that are part of its findings."""
    groups = {
        _key(key): {
            "spec": {k: v for k, v in plain(jobs[0].experiment, leave_defaults_out=True).items() if v and k != "name"},
            "varies": _varied(jobs),
            "seeds": sorted({job.seed for job in jobs}),
            "measurements": sorted({m.name for job in jobs for m in job.measurements}),
        }
        for key, jobs in item.jobs(scale, PlannedRecords(Records())).items()
        if jobs
    }
    findings = item.findings(scale, Records())
    return {
        "image_passes": cost(planned_jobs(item, scale).values()),
        "comparisons": list(findings.planned),
        "rules": list(findings.rules),
        "groups": groups,
    }


def _key(key: Any) -> str:
    return ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _varied(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return what differs between the experiments of a group: the candidates of a choice."""
    trees = [plain(job.experiment, leave_defaults_out=True) for job in jobs]
    flat = [{f"{a}.{b}": v for a, t in tree.items() if isinstance(t, dict) for b, v in t.items()} for tree in trees]
    names = sorted({name for tree in flat for name in tree})
    varied = [name for name in names if len({json.dumps(tree.get(name)) for tree in flat}) > 1]
    return [{name: tree.get(name) for name in varied} for tree in flat] if varied else []


def read_plan(results: Path) -> tuple[dict[str, Any], list[Change]]:
    """Return the registered plans by item, and what was changed; nothing if there is no plan."""
    file = results / PLAN_FILE
    try:
        content = json.loads(file.read_bytes())
        return dict(content["items"]), [Change(**change) for change in content["changes"]]
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptFileError(file, error, "Restore it from git.") from None


def register(results: Path, plans: Mapping[str, dict[str, Any]], changes: Sequence[Change]) -> list[str]:
    """Write plans to RESULTS/plan.json next to other items' plans, and return the items that are new or changed."""
    registered, before = read_plan(results)
    changed = [name for name, plan in plans.items() if registered.get(name, plan) != plan]
    unexplained = [name for name in changed if name not in {change.item for change in changes}]
    if unexplained:
        raise SpecError(
            f"The registered plan of {', '.join(unexplained)} would change. Say what changes, why, and what is known "
            "of the results so far, with --what, --why and --known."
        )
    new = [name for name in plans if name not in registered]
    content = {
        "items": registered | dict(plans),
        "changes": [asdict(change) for change in (*before, *changes) if change.item not in new],
    }
    results.mkdir(parents=True, exist_ok=True)
    write_atomic(results / PLAN_FILE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return [*new, *changed]


def with_plan(
    findings: Findings, item: Item, known: Known, results: Path, registrations: Mapping[str, Registration]
) -> Findings:
    """Return findings that say when their plan was registered, what was changed since, and what differs from it."""
    plans, changes = read_plan(results)
    if item.name not in plans:
        return findings
    scale: Any = findings.scale
    when = _when(registrations.get(item.name), [known[name] for name in planned_jobs(item, scale, known)])
    lines = [
        f"The plan {when}: {len(plans[item.name]['comparisons'])} comparisons.",
        *plans[item.name]["rules"],
        *(
            f"Changed on {c.date}: {c.what} Why: {c.why} Known by then: {c.known}"
            for c in changes
            if c.item == item.name
        ),
        *differences(item, scale, known, plans[item.name]),
    ]
    return replace(findings, notes=[*lines, *findings.notes], is_registered=True)


def _when(registration: Registration | None, records: Sequence[RunRecord]) -> str:
    """Return when a plan was registered, by the runs that had begun by then."""
    if registration is None:
        return "is in no commit"
    begun = [record.sessions[0]["started"] for record in records if record.sessions]
    early = sum(datetime.fromisoformat(time) < datetime.fromisoformat(registration.date) for time in begun)
    before = f"when {early} of its {len(records)} runs had begun" if early else "before the first run"
    return f"was registered {before} (commit {registration.commit[:10]})"


def differences(item: Item, scale: Scale, known: Known, registered: Mapping[str, Any]) -> list[str]:
    """Return how what was run differs from the registered plan, in sentences; nothing if it does not."""
    now = plan_of(item, scale)
    lines = []
    for what, name in (("comparisons", "comparison"), ("rules", "rule")):
        lines += [f"Not made, though planned: the {name} “{t}”." for t in registered[what] if t not in now[what]]
        lines += [f"Made, though not planned: the {name} “{t}”." for t in now[what] if t not in registered[what]]
    for key in {**registered["groups"], **now["groups"]}:
        if registered["groups"].get(key) != now["groups"].get(key):
            lines.append(f"The runs of “{key}” are not those that were planned.")
    jobs = planned_jobs(item, scale, known)
    extended = len(jobs) - len(planned_jobs(item, scale))
    if extended > 0:
        lines.append(f"{extended} runs more than the plan's first grids have, by its rule for grids.")
    missing = sum(not job.is_complete(known[job.name]) for job in jobs.values())
    lines += [f"{missing} of {len(jobs)} runs are missing."] if missing else []
    return lines
