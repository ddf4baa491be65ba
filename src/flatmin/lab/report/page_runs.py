"""The list of runs on the page of a report: one row for each, with its whole spec, and the links that lead to it."""

import html
import json
import re
from collections.abc import Iterable

from flatmin.lab.report.numbers import NOTHING, number_text, time_text
from flatmin.lab.report.runs import ERRORS, RunRecord, session_text

HEADER = (
    *("run", "seed", "epochs", "train error, %", "valid. error, %", "test error, %", "time", "hardware"),
    *("cores / threads", "precision", "versions", "commit"),
)
NUMBERS = HEADER[1:7]


class RunLinks:
    """Anchors of runs: equal for equal names on every page, and never the same for two of them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._anchors: dict[str, str] = {}
        taken: set[str] = set()
        for name in names:
            plain = anchor = "run-" + re.sub(r"[^A-Za-z0-9._-]", "_", name)
            number = 2
            while anchor in taken:
                anchor, number = f"{plain}-{number}", number + 1
            taken.add(anchor)
            self._anchors[name] = anchor

    def anchor(self, name: str) -> str:
        """Return the id of a run's row."""
        return self._anchors[name]

    def link(self, name: str) -> str:
        """Return a link to a run's row."""
        return f'<a href="#{self._anchors[name]}">{html.escape(name)}</a>'


def runs_section(records: dict[str, RunRecord], links: RunLinks) -> str:
    """Return the section with all runs."""
    if not records:
        return ""
    head = "".join(
        f'<th scope="col"{" class=number" if name in NUMBERS else ""}>{html.escape(name)}</th>' for name in HEADER
    )
    rows = "\n".join(_row(record, links) for record in records.values())
    total = sum(record.time_seconds or 0.0 for record in records.values())
    return (
        '<section aria-labeledby="runs"><h2 id="runs">What was run</h2>'
        f"<p>Errors after the last epoch; time of training, {time_text(total)} in all. A commit with a + had files "
        "that differed from it. Each name opens to the whole spec, and to every session of the run.</p>"
        '<div class="wide" tabindex="0" role="region" aria-label="Runs"><table class="runs">'
        f"<caption>All {len(records)} runs that this page speaks of</caption><thead><tr>{head}</tr></thead>\n"
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _row(record: RunRecord, links: RunLinks) -> str:
    name = html.escape(record.name)
    state = ""
    if record.state != "finished":
        badge = f'<span class="badge {record.state.replace(" ", "-")}">{html.escape(record.state)}</span>'
        state = f' <span class="state">{badge}</span>'
    lines = "".join(f'<p class="soft">{html.escape(session_text(session))}</p>' for session in record.sessions)
    if record.spec or lines:
        spec = html.escape(json.dumps(record.spec, indent=1, ensure_ascii=False))
        first = f"<details><summary>{name}{state}</summary>{lines}<pre>{spec}</pre></details>"
    else:
        first = f"{name}{state}"
    cells = [f'<th scope="row">{first}</th>', _cell(record.seed), _cell(record.epochs)]
    if record.state == "finished":
        cells += [f'<td class="number">{number_text(record.error(metric))}</td>' for metric in ERRORS]
        cells.append(f'<td class="number">{time_text(record.time_seconds or 0.0)}</td>')
    else:
        cells.append(f'<td colspan="4" class="reason">{html.escape(record.reason or record.state)}</td>')
    facts = (record.hardware, record.cores_and_threads, record.precision, record.versions, record.commit)
    cells += [f"<td>{html.escape(fact)}</td>" for fact in facts]
    return f'<tr id="{links.anchor(record.name)}">{"".join(cells)}</tr>'


def _cell(value: int | None) -> str:
    return f'<td class="number">{NOTHING if value is None else value}</td>'
