"""``flatmin report`` writes a page on existing runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from flatmin.lab.cheap_sam.study import CHEAP_SAM
from flatmin.lab.commands.items import ITEMS
from flatmin.lab.errors import SpecError
from flatmin.lab.spec.fields import did_you_mean
from flatmin.lab.studies.findings import Findings
from flatmin.lab.studies.item import Item, Scale
from flatmin.lab.studies.plan import with_all_missing
from flatmin.lab.sweeps.runners import ReadOnlyRunner


@dataclass(frozen=True)
class Report:
    """Write a page on existing runs: the paper's tables with its numbers next to the measured ones; or on any runs."""

    items: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of items (`flatmin list items`), or all of the paper's; without, a plain table of all runs."""
    scale: Scale = "laptop"
    """At which scale they were run."""
    runs: Path = Path("runs/reproduce")
    """The directory of the runs."""
    out: Path | None = None
    """Where the page goes; RUNS/report-SCALE (or RUNS/report) if None."""
    title: str = field(default="")
    """The page's title."""

    def run(self, console: Console) -> None:
        """Read the runs and write the page."""
        from flatmin.lab.report import describe_runs

        if not self.items:
            described = [describe_runs(self.runs)]
            out = self.out or self.runs / "report"
        else:
            archive = ReadOnlyRunner(self.runs)
            described = [
                with_all_missing(item.study(self.scale, archive), item.study, archive)
                for item in items_named(self.items)
            ]
            out = self.out or self.runs / f"report-{self.scale}"
        page = write_page(described, self.runs, out, self.title)
        for findings in described:
            print_verdicts(findings, console)
        console.print(f"The page: {page}")


def items_named(names: Sequence[str]) -> list[Item]:
    """Return the items of these names.

    Raises:
        SpecError: there is no such item.
    """
    if "all" in names:
        return [item for item in ITEMS.values() if item is not CHEAP_SAM]
    for name in names:
        if name not in ITEMS:
            hint = did_you_mean(name, ITEMS)
            raise SpecError(f"Unknown item {name!r}.{hint} Allowed: {', '.join(ITEMS)}, and all.")
    return [ITEMS[name] for name in names]


def write_page(findings: Sequence[Findings], runs: Path, out: Path, title: str = "") -> Path:
    """Write the page and return its path."""
    from flatmin.lab.report import write_report

    return write_report(findings, runs=runs, out=out, **({"title": title} if title else {}))


def print_verdicts(findings: Findings, console: Console) -> None:
    """Print what an item showed."""
    from flatmin.lab.report.content import missing_text

    for verdict in findings.verdicts:
        console.print(f"  {verdict.status}: {verdict.claim} {verdict.evidence}", highlight=False, markup=False)
    if findings.num_missing:
        console.print(f"  {missing_text(findings.num_missing)}", highlight=False)
