"""A report in Markdown, for repositories: the same numbers as on the page, figures as files beside it."""

import re
from collections.abc import Sequence

from flatmin.lab.report.figures import x_text, y_text
from flatmin.lab.report.numbers import (
    NOTHING,
    common_unit,
    comparison_text,
    measured_text,
    num_replicas,
    number_text,
    plural,
    time_text,
)
from flatmin.lab.report.page_runs import HEADER
from flatmin.lab.report.runs import ERRORS, RunRecord
from flatmin.lab.report.tables import Column, Entry, caption, columns_of, padded, traced, values_text, worth_a_table
from flatmin.lab.report.text import HOW_TO_READ, about_runs, alarm, item_lines, setting_text
from flatmin.lab.studies.findings import Cell, Comparison, Findings, LineFigure, SurfaceFigure, Table
from flatmin.lab.studies.statistics import p_text


def markdown_page(
    findings: Sequence[Findings], records: dict[str, RunRecord], *, title: str, files: dict[tuple[int, int], str]
) -> str:
    """Return the report in Markdown.

    Args:
        findings: what it shows.
        records: the runs, by name; every run that the findings name.
        title: its title.
        files: the files of the figures, relative to the report, by the numbers of findings and figure.
    """
    blocks = [f"# {_m(title)}", _m(about_runs(findings, records)), _alarm(alarm(findings, records))]
    for number, one in enumerate(findings):
        blocks += [
            f"## {_m(one.title)}",
            f"{_m(one.source)} · {_m(one.item)} · scale **{_m(one.scale)}**",
            f"> About the scale. {_m(one.about_scale)}" if one.about_scale else "",
            _alarm([" ".join(lines)] if len(findings) > 1 and (lines := item_lines(one, records)) else []),
            _verdicts(one),
        ]
        for table in one.tables:
            blocks += _table(table)
        for index, figure in enumerate(one.figures):
            blocks += _figure(figure, files[number, index])
        if one.hyperparameters:
            rows = [(h.name, setting_text(h.value), h.source, h.note) for h in one.hyperparameters]
            blocks += ["### Hyperparameters and where they come from", _grid(("name", "value", "source", "note"), rows)]
        if one.notes:
            blocks += ["### Notes", "\n".join(f"- {_m(note)}" for note in one.notes)]
    if records:
        blocks += ["## What was run", _grid((*HEADER, "state"), [_run(record) for record in records.values()])]
    blocks += ["## How to read this", *map(_m, HOW_TO_READ)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _verdicts(findings: Findings) -> str:
    lines = [f"- **{_m(v.status)}**: {_m(v.claim)} {_m(v.evidence)}".rstrip() for v in findings.verdicts]
    return "\n".join(lines)


def _table(table: Table) -> list[str]:
    columns = columns_of(table)
    beside = any("paper" in column.parts for column in columns)
    header: list[str] = []
    for column in columns:
        parts = column.parts if beside else ()
        header += [f"{column.title}, {part}" for part in parts] if parts else [column.title]
    with_unit = common_unit(table) is None
    rows = [
        [
            text
            for entry, column in zip(padded(row, columns), columns, strict=True)
            for text in _entry(entry, column, with_unit)
        ]
        for row in table.rows
    ]
    behind = [
        f"- {_m(_label(row, columns, number))}: {_m(_sources(entry))}"
        for row in table.rows
        for number, entry in enumerate(row)
        if isinstance(entry, Cell | Comparison) and (entry.runs or entry.values)
    ]
    found = [f"### {_m(caption(table))}", _grid(header, rows), _m(table.note)]
    return [*found, _folded("The values of each replica, and the runs behind them", behind)]


def _entry(entry: Entry, column: Column, with_unit: bool) -> list[str]:
    if isinstance(entry, str):
        return [*[""] * (len(column.parts) - 1), entry]
    texts = []
    for part in column.parts or ("measured",):
        if isinstance(entry, Comparison):
            text = "" if part == "paper" else _comparison(entry, with_unit)
        elif part == "paper":
            text = NOTHING if entry.claimed is None else entry.claimed
        else:
            text = _measured(entry, with_unit)
        texts.append(text)
    return texts


def _measured(cell: Cell, with_unit: bool) -> str:
    facts = [f"n = {num_replicas(cell)}"] if cell.measured is not None and num_replicas(cell) else []
    facts += [cell.note] if cell.note else []
    text = measured_text(cell, with_unit=with_unit)
    return f"{text} ({'; '.join(facts)})" if facts else text


def _comparison(comparison: Comparison, with_unit: bool) -> str:
    text = comparison_text(comparison, with_unit=with_unit)
    p_values = f"{p_text(comparison.p_value)}, Holm {p_text(comparison.p_holm)}"
    return f"{text} ({comparison.name}, {plural(comparison.num_pairs, 'pair')}; {p_values})"


def _label(row: Sequence[Entry], columns: Sequence[Column], number: int) -> str:
    words = [entry for entry in row[:number] if isinstance(entry, str) and entry]
    return ", ".join([*words, columns[number].title])


def _sources(entry: Cell | Comparison) -> str:
    lines = [f"{value} from {run}" if value else run for value, run in traced(entry)]
    values = values_text(entry) if len(entry.values) != len(entry.runs) else ""
    return "; ".join(part for part in (values, *lines) if part)


def _figure(figure: LineFigure | SurfaceFigure, file: str) -> list[str]:
    blocks = [f"### {_m(figure.title)}", f"![{_m(figure.title)}]({file})", _m(figure.note)]
    if isinstance(figure, LineFigure) and worth_a_table(figure.series):
        rows = [
            (series.name, x_text(figure, series.x[index]), y_text(figure, series, index))
            for series in figure.series
            for index in range(len(series.x))
        ]
        blocks.append(_folded("The numbers", [_grid(("series", figure.x_label, figure.y_label), rows)]))
    if figure.runs:
        blocks.append(_folded("The runs behind it", [f"- {_m(run)}" for run in figure.runs]))
    return blocks


def _run(record: RunRecord) -> list[str]:
    numbers = [NOTHING if value is None else str(value) for value in (record.seed, record.epochs)]
    if record.state == "finished":
        errors = [number_text(record.error(metric)) for metric in ERRORS]
        errors.append(time_text(record.time_seconds or 0.0))
    else:
        errors = [NOTHING] * (len(ERRORS) + 1)
    facts = [record.hardware, record.cores_and_threads, record.precision, record.versions, record.commit]
    state = f"{record.state}: {record.reason}" if record.reason else record.state
    return [record.name, *numbers, *errors, *facts, state]


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header)]
    body = [f"| {' | '.join(_m(text) for text in row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(map(_m, lines[0]))} |", f"| {' | '.join(lines[1])} |", *body])


def _folded(title: str, lines: Sequence[str]) -> str:
    # The empty lines are what makes Markdown read on inside of the element.
    return f"<details><summary>{title}</summary>\n\n" + "\n".join(lines) + "\n\n</details>" if lines else ""


def _alarm(lines: Sequence[str]) -> str:
    return "\n".join([f"> **{_m(lines[0])}**", *(f"> - {_m(line)}" for line in lines[1:])]) if lines else ""


def _m(text: str) -> str:
    """Return text that Markdown leaves as it is, on one line."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"[\\`*\[\]<>|$~]", r"\\\g<0>", text)
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)  # inside of a word it has no meaning
    text = re.sub(r"&(?=#?\w+;)", "&amp;", text)
    # "1. " or "- " or "# " where a line begins would make a list or a title of it.
    return re.sub(r"^(\d+)([.)])(?=\s)", r"\1\\\2", re.sub(r"^([-+#])(?=\s|#)", r"\\\1", text))
