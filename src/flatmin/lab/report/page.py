"""The HTML page of a report: one file that needs nothing else, not even a network."""

import base64
import html
import json
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import get_args

from flatmin.lab.report.figures import plotly_figure, x_text, y_text
from flatmin.lab.report.numbers import NOTHING
from flatmin.lab.report.page_runs import RunLinks, runs_section
from flatmin.lab.report.page_tables import plain_table, table_html
from flatmin.lab.report.runs import RunRecord
from flatmin.lab.report.tables import worth_a_table
from flatmin.lab.report.text import HOW_TO_READ, about_runs, alarm, item_lines, setting_text, slug
from flatmin.lab.studies.findings import Findings, LineFigure, SurfaceFigure, VerdictStatus

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
SYMBOLS: dict[VerdictStatus, str] = {
    "reproduced": "✓",
    "not reproduced": "✗",
    "inconclusive": "≈",
    "not tested": NOTHING,
}


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
    anchors = [f"item-{number}-{slug(one.item)}" for number, one in enumerate(findings, 1)]
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
        '<section aria-labeledby="reading"><h2 id="reading">How to read this</h2>',
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
        f'<section aria-labeledby="{anchor}"><h2 id="{anchor}">{_e(findings.title)}</h2>',
        f'<p class="source">{_e(findings.source)} · <code>{_e(findings.item)}</code> · '
        f'scale <span class="badge">{_e(findings.scale)}</span></p>',
        f'<p class="scale"><b>About the scale.</b> {_e(findings.about_scale)}</p>' if findings.about_scale else "",
        _alarm([" ".join(lines)] if repeat_alarm and (lines := item_lines(findings, records)) else []),
    ]
    if findings.verdicts:
        parts += ["<h3>Verdicts</h3>", '<ul class="verdicts">']
        for verdict in findings.verdicts:
            evidence = f'<p class="evidence">{_e(verdict.evidence)}</p>' if verdict.evidence else ""
            parts.append(f"<li><div>{_badge(verdict.status)}</div><div><p>{_e(verdict.claim)}</p>{evidence}</div></li>")
        parts.append("</ul>")
    parts += [table_html(table, links) for table in findings.tables]
    for index, figure in enumerate(findings.figures):
        parts.append(_figure(f"figure-{number + 1}-{index + 1}", figure, links, pictures[number, index]))
    if findings.hyperparameters:
        rows = [(h.name, setting_text(h.value), h.source, h.note) for h in findings.hyperparameters]
        parts.append(plain_table("Hyperparameters and where they come from", ("name", "value", "source", "note"), rows))
    if findings.notes:
        parts += ["<h3>Notes</h3>", "<ul>", *(f"<li>{_e(note)}</li>" for note in findings.notes), "</ul>"]
    return "\n".join(part for part in [*parts, "</section>"] if part)


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
    table = plain_table(figure.title, ("series", figure.x_label, figure.y_label), rows)
    return f'<details class="note"><summary>The numbers</summary>{table}</details>'


def _tally(findings: Sequence[Findings]) -> str:
    counted = Counter(verdict.status for one in findings for verdict in one.verdicts)
    if not counted:
        return ""
    badges = [f"<li>{_badge(status, counted[status])}</li>" for status in get_args(VerdictStatus) if counted[status]]
    return f'<ul class="tally" aria-label="Claims, counted by verdict">{"".join(badges)}</ul>'


def _badge(status: VerdictStatus, count: int | None = None) -> str:
    number = "" if count is None else f"{count} "
    return f'<span class="badge {status.replace(" ", "-")}">{SYMBOLS[status]} {number}{_e(status)}</span>'


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


def _e(text: str) -> str:
    return html.escape(text)
