"""``flatmin report`` writes a page on existing runs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from flatmin.lab.cheap_sam.study import CHEAP_SAM
from flatmin.lab.demo.study import DEMO
from flatmin.lab.errors import CorruptFileError, SpecError
from flatmin.lab.foret2021.items import ITEMS as PAPER_ITEMS
from flatmin.lab.rho_rule import RHO_RULE
from flatmin.lab.runs.record import Records, all_records
from flatmin.lab.spec.fields import did_you_mean
from flatmin.lab.studies.findings import Findings
from flatmin.lab.studies.registered_plan import Registration, with_plan
from flatmin.lab.studies.study import SCALES, Item, Scale, describe

STUDY_FILE = "study.json"
ITEMS = PAPER_ITEMS | {item.name: item for item in (CHEAP_SAM, RHO_RULE, DEMO)}
"""Everything that can be reproduced: the paper's tables and figures, our own studies, and the demo."""


@dataclass(frozen=True)
class Report:
    """Write a page on existing runs: the paper's tables with its numbers next to the measured ones; or on any runs."""

    items: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of items (`flatmin list items`), or all of the paper's. Without, the items that the runs were collected
    for (`flatmin collect`), or a plain table of all runs."""
    scale: Scale = "laptop"
    """At which scale they were run."""
    runs: Path = Path("runs/reproduce")
    """The directory of the runs, or one with runs.jsonl (`flatmin collect`)."""
    out: Path | None = None
    """Where the page goes; RUNS/report-SCALE (or RUNS/report) if None."""
    title: str = ""
    """The page's title."""

    def run(self, console: Console) -> None:
        """Read the runs and write the page."""
        from flatmin.lab.report import describe_runs

        items, scale, title = (self.items, self.scale, self.title) if self.items else read_study(self.runs)[:3]
        if not items:
            known = all_records(self.runs)
            found, out = [describe_runs(known)], self.out or self.runs / "report"
        else:
            known = Records(self.runs)
            found = described(items_named(items), scale, known, self.runs)
            out = self.out or self.runs / f"report-{scale}"
        page = write_page(found, known, out, self.title or title)
        for findings in found:
            if findings.source:
                console.print(f"{findings.source}: {findings.title} ({findings.item})", style="bold")
            print_verdicts(findings, console)
        console.print(f"The page: {page}")


def described(items: Sequence[Item], scale: Scale, known: Records, results: Path) -> list[Findings]:
    """Return what items found, with their registered plans if RESULTS has any."""
    *_, registrations = read_study(results)
    return [with_plan(describe(item, scale, known), item, known, results, registrations) for item in items]


def read_study(results: Path) -> tuple[tuple[str, ...], Scale, str, dict[str, Registration]]:
    """Return the items, the scale and the title that runs were collected for, and when plans were registered.

    There are no items if the runs were not collected.
    """
    file = results / STUDY_FILE
    try:
        study = json.loads(file.read_bytes())
        if study["scale"] not in SCALES:
            raise ValueError(f"{study['scale']!r} is not a scale")
        plans = {name: Registration(**about) for name, about in study.get("plans", {}).items()}
        return tuple(map(str, study["items"])), study["scale"], str(study["title"]), plans
    except FileNotFoundError:
        return (), "laptop", "", {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(file, error, "Collect the runs again.") from None


def items_named(names: Sequence[str]) -> list[Item]:
    """Return the items of these names."""
    if "all" in names:
        return list(PAPER_ITEMS.values())
    for name in names:
        if name not in ITEMS:
            hint = did_you_mean(name, ITEMS)
            raise SpecError(f"Unknown item {name!r}.{hint} Allowed: {', '.join(ITEMS)}, and all.")
    return [ITEMS[name] for name in names]


def write_page(findings: Sequence[Findings], known: Records, out: Path, title: str = "") -> Path:
    """Write the page and return its path."""
    from flatmin.lab.report import write_report

    return write_report(findings, known=known, out=out, title=title or "Paper vs. measured")


def print_verdicts(findings: Findings, console: Console) -> None:
    """Print what an item showed."""
    from flatmin.lab.report.content import missing_text

    for verdict in findings.verdicts:
        console.print(f"  {verdict.status}: {verdict.claim} {verdict.evidence}", highlight=False, markup=False)
    if findings.num_missing:
        console.print(f"  {missing_text(findings.num_missing)}", highlight=False)
