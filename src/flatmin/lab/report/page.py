"""The HTML page of a report: one file that needs nothing else, not even a network."""

import base64
import html
import json
import re
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import get_args

from flatmin.lab.findings import Cell, Comparison, Findings, Held, LineFigure, SurfaceFigure, Table
from flatmin.lab.report.figures import plotly_figure, x_text, y_text
from flatmin.lab.report.numbers import NOTHING, common_unit, comparison_text, measured_text, num_replicas, p_text
from flatmin.lab.report.page_runs import RunLinks, runs_section
from flatmin.lab.report.runs import RunRecord
from flatmin.lab.report.tables import Column, Entry, caption, columns_of, padded, traced, values_text, worth_a_table
from flatmin.lab.report.words import HOW_TO_READ, SIGNIFICANT, about_runs, alarm, item_lines, setting_text

# What the page may load is nothing at all; plotly.js makes functions and pictures of its own.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval' blob:; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
)
# First of all scripts, so that it hears what goes wrong in any other.
LISTEN = """
(() => {
  const root = document.documentElement, told = console.error.bind(console);
  root.dataset.errors = "";
  const note = (what) => { root.dataset.errors += String((what && what.message) || what) + "\\n"; };
  console.error = (...words) => { note(words.join(" ")); told(...words); };
  addEventListener("error", (event) => note(event.error || event.message));
  addEventListener("unhandledrejection", (event) => note(event.reason));
})();
"""
SYMBOLS: dict[Held, str] = {"held": "✓", "did not hold": "✗", "no difference shown": "≈", "not tested": NOTHING}


def html_page(
    findings: Sequence[Findings], records: dict[str, RunRecord], *, title: str, pictures: dict[tuple[int, int], str]
) -> str:
    """Return the page.

    Args:
        findings: what it shows.
        records: the runs, by name; every run that the findings name.
        title: its title.
        pictures: the figures as SVG, by the numbers of findings and figure.
    """
    links = RunLinks(records)
    anchors = [f"item-{number}-{_slug(one.item)}" for number, one in enumerate(findings, 1)]
    sections = [
        _section(number, one, anchor, records, links, pictures, len(findings) > 1)
        for number, (one, anchor) in enumerate(zip(findings, anchors, strict=True))
    ]
    interactive = any(one.figures for one in findings)
    body = [
        f"<header><h1>{_e(title)}</h1>",
        f"<p>{_e(about_runs(findings, records))}</p>",
        _alarm(alarm(findings, records)),
        _tally(findings),
        _contents(findings, anchors) if len(findings) > 1 else "",
        "</header>",
        "<main>",
        *sections,
        runs_section(records, links),
        '<section aria-labelledby="reading"><h2 id="reading">How to read this</h2>',
        *(f"<p>{_e(line)}</p>" for line in HOW_TO_READ),
        "</section></main>",
    ]
    scripts = [f"<script>{_plotly()}</script>", f"<script>{_resource('page.js')}</script>"] if interactive else []
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_e(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_e(title)}</title>",
        f"<style>{_resource('page.css')}</style>",
        f"<script>{LISTEN}</script>",
    ]
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        *head,
        "</head>",
        "<body>",
        *body,
        *scripts,
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _section(
    number: int,
    findings: Findings,
    anchor: str,
    records: dict[str, RunRecord],
    links: RunLinks,
    pictures: dict[tuple[int, int], str],
    repeat_alarm: bool,
) -> str:
    parts = [
        f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{_e(findings.title)}</h2>',
        f'<p class="source">{_e(findings.source)} · <code>{_e(findings.item)}</code> · '
        f'scale <span class="badge">{_e(findings.scale)}</span></p>',
        f'<p class="scale"><b>About the scale.</b> {_e(findings.about_scale)}</p>' if findings.about_scale else "",
        _alarm([" ".join(lines)] if repeat_alarm and (lines := item_lines(findings, records)) else []),
    ]
    if findings.verdicts:
        parts += ["<h3>Verdicts</h3>", '<ul class="verdicts">']
        for verdict in findings.verdicts:
            evidence = f'<p class="evidence">{_e(verdict.evidence)}</p>' if verdict.evidence else ""
            parts.append(f"<li><div>{_badge(verdict.held)}</div><div><p>{_e(verdict.claim)}</p>{evidence}</div></li>")
        parts.append("</ul>")
    parts += [_table(table, links) for table in findings.tables]
    for index, figure in enumerate(findings.figures):
        parts.append(_figure(f"figure-{number + 1}-{index + 1}", figure, links, pictures[number, index]))
    if findings.hyperparameters:
        rows = [(h.name, setting_text(h.value), h.source, h.note) for h in findings.hyperparameters]
        parts.append(
            _plain_table("Hyperparameters and where they come from", ("name", "value", "source", "note"), rows)
        )
    if findings.notes:
        parts += ["<h3>Notes</h3>", "<ul>", *(f"<li>{_e(note)}</li>" for note in findings.notes), "</ul>"]
    return "\n".join(part for part in [*parts, "</section>"] if part)


def _table(table: Table, links: RunLinks) -> str:
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
    corrected = f"Holm p {p_text(comparison.p_holm)}"
    corrected = f"<strong>{_e(corrected)}</strong>" if comparison.p_holm < SIGNIFICANT else _e(corrected)
    pairs = f"{comparison.num_pairs} pairs"
    facts = (
        f'<small class="fact">{_e(comparison.name)}, {pairs}</small>'
        f'<small class="fact">p {_e(p_text(comparison.p_value))}, {corrected}</small>'
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


def _figure(name: str, figure: LineFigure | SurfaceFigure, links: RunLinks, picture: str) -> str:
    # JSON in a script element: only "<" could end it.
    data = json.dumps(plotly_figure(figure), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    still = base64.b64encode(picture.encode()).decode()
    note = f'<span class="note">{_e(figure.note)}</span>' if figure.note else ""
    several = isinstance(figure, SurfaceFigure) and len(figure.surfaces) > 1
    hint = " Drag to turn; all turn together." if several else " Drag to turn."
    hint = f'<span class="note hint">{hint}</span>' if isinstance(figure, SurfaceFigure) else ""
    runs = ""
    if figure.runs:
        lines = "".join(f"<li>{links.link(run)}</li>" for run in figure.runs)
        summary = f"<summary>The runs behind it ({len(figure.runs)})</summary>"
        runs = f'<details class="note">{summary}<ul>{lines}</ul></details>'
    return (
        f'<figure class="interactive" aria-label="{_e(figure.title)}"><figcaption><b>{_e(figure.title)}</b>{note}'
        f'{hint}</figcaption>\n<div class="plot" id="{name}"></div>'
        f'<img class="still" alt="{_e(figure.title)}" src="data:image/svg+xml;base64,{still}">'
        f'<script type="application/json">{data}</script>\n{_points(figure)}{runs}</figure>'
    )


def _points(figure: LineFigure | SurfaceFigure) -> str:
    if not isinstance(figure, LineFigure) or not worth_a_table(figure.series):
        return ""
    rows = [
        (series.name, x_text(figure, series.x[index]), y_text(figure, series, index))
        for series in figure.series
        for index in range(len(series.x))
    ]
    table = _plain_table(figure.title, ("series", figure.x_label, figure.y_label), rows)
    return f'<details class="note"><summary>The numbers</summary>{table}</details>'


def _plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_e(name)}</th>' for name in header)
    body = [
        f'<tr><th scope="row">{_e(row[0])}</th>{"".join(f"<td>{_e(text)}</td>" for text in row[1:])}</tr>'
        for row in rows
    ]
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{_e(title)}"><table><caption>{_e(title)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{_lines(body)}</tbody></table></div>"
    )


def _tally(findings: Sequence[Findings]) -> str:
    counted = Counter(verdict.held for one in findings for verdict in one.verdicts)
    if not counted:
        return ""
    badges = [f"<li>{_badge(held, counted[held])}</li>" for held in get_args(Held) if counted[held]]
    return f'<ul class="tally" aria-label="Claims, counted by verdict">{"".join(badges)}</ul>'


def _badge(held: Held, count: int | None = None) -> str:
    number = "" if count is None else f"{count} "
    return f'<span class="badge {held.replace(" ", "-")}">{SYMBOLS[held]} {number}{_e(held)}</span>'


def _contents(findings: Sequence[Findings], anchors: Sequence[str]) -> str:
    lines = [
        f'<li><a href="#{anchor}">{_e(one.title)}</a> <small>{_e(one.source)}</small></li>'
        for one, anchor in zip(findings, anchors, strict=True)
    ]
    lines.append('<li><a href="#runs">What was run</a></li>')
    return f'<nav aria-label="Contents"><ol>{"".join(lines)}</ol></nav>'


def _alarm(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    rest = f"<ul>{''.join(f'<li>{_e(line)}</li>' for line in lines[1:])}</ul>" if lines[1:] else ""
    return f'<div class="alarm" role="note">{_e(lines[0])}{rest}</div>'


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError('Reports with figures need plotly: pip install "flatmin[lab]".') from error
    code: str = get_plotlyjs()
    return code


def _resource(name: str) -> str:
    return files("flatmin.lab.report").joinpath(name).read_text(encoding="utf-8")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "item"


def _lines(rows: Sequence[str]) -> str:
    return "\n".join(rows)


def _q(text: str) -> str:
    return f'"{text}"'


def _e(text: str) -> str:
    return html.escape(text)
