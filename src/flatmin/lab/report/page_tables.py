"""The tables on the page of a report, as HTML."""

import html
from collections.abc import Sequence

from flatmin.lab.report.numbers import (
    NOTHING,
    common_unit,
    comparison_text,
    measured_text,
    num_replicas,
    plural,
)
from flatmin.lab.report.page_runs import RunLinks
from flatmin.lab.report.tables import Column, Entry, caption, columns_of, padded, traced, values_text
from flatmin.lab.studies.findings import Cell, Comparison, Table
from flatmin.lab.studies.statistics import SIGNIFICANT, p_text


def table_html(table: Table, links: RunLinks) -> str:
    """Return a table in the paper's shape; each number leads to its runs."""
    columns = columns_of(table)
    beside = any("paper" in column.parts for column in columns)
    first, second = [], []
    for column in columns:
        title = _e(column.title)
        if not beside:
            first.append(f'<th scope="col">{title}</th>')
        elif not column.parts:
            first.append(f'<th scope="col" rowspan="2">{title}</th>')
        else:
            wide = len(column.parts)
            first.append(f'<th scope="colgroup" colspan="{wide}" class="begins">{title}</th>')
            for place, part in enumerate(column.parts):
                begins = " begins" if place == 0 else ""
                second.append(f'<th scope="col" class="part{begins}">{part}</th>')
    rows = [
        "<tr>"
        + "".join(_entry(entry, column, place, table, links, beside) for place, (entry, column) in cells)
        + "</tr>"
        for cells in (enumerate(zip(padded(row, columns), columns, strict=True)) for row in table.rows)
    ]
    head = f"<tr>{''.join(first)}</tr>" + (f"<tr>{''.join(second)}</tr>" if second else "")
    note = f'<p class="note">{_e(table.note)}</p>' if table.note else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{_e(table.title)}"><table>'
        f"<caption>{_e(caption(table))}</caption><thead>{head}</thead>\n<tbody>{_lines(rows)}</tbody></table></div>{note}"
    )


def _entry(entry: Entry, column: Column, place: int, table: Table, links: RunLinks, beside: bool) -> str:
    begins = " begins" if beside and column.parts else ""
    with_unit = common_unit(table) is None
    if isinstance(entry, str):
        span = f' colspan="{len(column.parts)}"' if len(column.parts) > 1 else ""
        if place == 0:
            return f'<th scope="row"{span}>{_e(entry)}</th>'
        return f"<td{span}{f' class={_q(begins.strip())}' if begins else ''}>{_e(entry)}</td>"
    cells = []
    for part in column.parts or ("measured",):
        if isinstance(entry, Comparison):
            content = "" if part == "paper" else _comparison(entry, links, with_unit)
        elif part == "paper":
            content = _e(entry.claimed if entry.claimed is not None else NOTHING)
        else:
            content = _measured(entry, links, with_unit)
        kind = "paper" if part == "paper" else "number"
        cells.append(f'<td class="{kind}{begins}">{content}</td>')
        begins = ""
    return "".join(cells)


def _measured(cell: Cell, links: RunLinks, with_unit: bool) -> str:
    note = f'<small class="remark">{_e(cell.note)}</small>' if cell.note else ""
    if cell.measured is None:
        return f"{NOTHING}{note}"
    number = num_replicas(cell)
    count = f' <small class="fact">n = {number}</small>' if number else ""
    return _traced(measured_text(cell, with_unit=with_unit), count + note, cell, links)


def _comparison(comparison: Comparison, links: RunLinks, with_unit: bool) -> str:
    corrected = f"Holm {p_text(comparison.p_holm)}"
    corrected = f"<strong>{_e(corrected)}</strong>" if comparison.p_holm < SIGNIFICANT else _e(corrected)
    pairs = plural(comparison.num_pairs, "pair")
    facts = (
        f'<small class="fact">{_e(comparison.name)}, {pairs}</small>'
        f'<small class="fact">{_e(p_text(comparison.p_value))}, {corrected}</small>'
    )
    return _traced(comparison_text(comparison, with_unit=with_unit), facts, comparison, links)


def _traced(text: str, facts: str, entry: Cell | Comparison, links: RunLinks) -> str:
    """Return a number that says its values when pointed at, and names its runs when opened."""
    values = values_text(entry)
    hover = f' title="{_e(values)}"' if values else ""
    if not (entry.runs or entry.values):
        return f"{_e(text)}{facts}"
    lines = [f"<li>{f'{_e(value)} · ' if value else ''}{links.link(run)}</li>" for value, run in traced(entry)]
    if len(entry.values) != len(entry.runs) and values:
        lines.insert(0, f"<li>{_e(values)}</li>")
    summary = f'<summary><span class="mean">{_e(text)}</span>{facts}</summary>'
    return f"<details{hover}>{summary}<ul>{''.join(lines)}</ul></details>"


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts; the first of each row is its heading."""
    head = "".join(f'<th scope="col">{_e(name)}</th>' for name in header)
    body = [
        f'<tr><th scope="row">{_e(row[0])}</th>{"".join(f"<td>{_e(text)}</td>" for text in row[1:])}</tr>'
        for row in rows
    ]
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{_e(title)}"><table><caption>{_e(title)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{_lines(body)}</tbody></table></div>"
    )


def _lines(rows: Sequence[str]) -> str:
    return "\n".join(rows)


def _q(text: str) -> str:
    return f'"{text}"'


def _e(text: str) -> str:
    return html.escape(text)
