"""Sentences that the page and the Markdown of a report share."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from flatmin.lab.report.numbers import plural, time_text
from flatmin.lab.report.runs import RunRecord, named_runs, num_missing
from flatmin.lab.studies.findings import Cell, Findings
from flatmin.lab.studies.statistics import SIGNIFICANT

MOST_CHARACTERS = 60
"""Of a file's name: some file systems take no more than 143."""
HOW_TO_READ = (
    "A measured number is the mean over n replicas (same settings; other initialization and order of examples), ± half "
    "the width of its 95 % confidence interval (Student's t). One replica has no interval. Claims are quoted as "
    "printed.",
    "A comparison is the mean of the differences between runs of the same seed, with its interval, the two-sided "
    "p-value of the paired t-test, and that p-value corrected for all comparisons of the table (Holm, 1979), bold "
    f'where it is below {SIGNIFICANT:g}. "No difference shown" does not say that there is none.',
    "Every number comes from the files of a run. A number with dots under it opens to its runs, and each of them leads "
    "to its row in the list of runs.",
)


def about_runs(findings: Sequence[Findings], records: dict[str, RunRecord]) -> str:
    """Return what the report is, in figures."""
    states = Counter(record.state for record in records.values())
    total = sum(record.time_seconds or 0.0 for record in records.values())
    scales = ", ".join(dict.fromkeys(one.scale for one in findings))
    text = f"{plural(len(findings), 'item')} at scale {scales}, from {plural(states['finished'], 'finished run')}"
    if total:
        text += f" ({time_text(total)} of training)"
    claimed = any(
        isinstance(entry, Cell) and entry.claimed is not None
        for one in findings
        for table in one.tables
        for row in table.rows
        for entry in row
    )
    text += ". What was claimed stands beside what was measured" if claimed else ""
    return f"{text}. Every number leads to the runs it comes from."


def alarm(findings: Sequence[Findings], records: dict[str, RunRecord]) -> list[str]:
    """Return what is wanting in the whole report: a headline and a line for each item, or nothing."""
    wanting = {one.title: " ".join(lines) for one in findings if (lines := item_lines(one, records))}
    lines = [f"{title}: {text}" for title, text in wanting.items()] if len(findings) > 1 else list(wanting.values())
    if not lines:
        return []
    if any(num_missing(one, records) for one in findings):
        return ["Runs are missing: this report is incomplete.", *lines]
    return ["Some runs came to nothing.", *lines]


def item_lines(findings: Findings, records: dict[str, RunRecord]) -> list[str]:
    """Return what is wanting in one item: runs that are missing, and runs that came to nothing."""
    lines = []
    missing = num_missing(findings, records)
    if missing:
        lines.append(missing_text(missing, " of this item"))
    failed = sum(records[name].state == "came to nothing" for name in set(named_runs(findings)))
    if failed:
        lines.append(f"{plural(failed, 'run')} came to nothing; the list of runs says why.")
    return lines


def missing_text(count: int, of_what: str = "") -> str:
    """Return that runs are missing.

    Example:
        >>> missing_text(1), missing_text(2, " of this item")
        ('1 run is missing.', '2 runs of this item are missing.')
    """
    return f"{plural(count, 'run')}{of_what} {'is' if count == 1 else 'are'} missing."


def setting_text(value: Any) -> str:
    """Return a hyperparameter's value in words."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(setting_text(inner) for inner in value)
    return str(value)


def slug(text: str) -> str:
    """Return a text as a part of a file's name or an anchor.

    Example:
        >>> slug("Test error, over rho")
        'test-error-over-rho'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MOST_CHARACTERS].strip("-") or "item"
