"""The tables of a report in columns: what the paper claims beside what was measured. HTML and Markdown share them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flatmin.lab.report.numbers import common_unit, difference_unit, number_text
from flatmin.lab.studies.findings import Cell, Comparison, Series, Table

Entry = str | Cell | Comparison
Part = Literal["paper", "measured"]
MOST_POINTS = 150
"""A figure of more points than this is not repeated as a table: nobody would read it."""


@dataclass(frozen=True)
class Column:
    """A column of a table: what it holds of its entries, None where there is only one thing to hold."""

    title: str
    parts: tuple[Part, ...]


def columns_of(table: Table) -> list[Column]:
    """Return the columns; one that has both claims and measurements has two parts."""
    columns = []
    for number, title in enumerate(table.columns):
        entries = [row[number] for row in table.rows if number < len(row)]
        claimed = any(isinstance(entry, Cell) and entry.claimed is not None for entry in entries)
        measured = any(
            isinstance(entry, Comparison) or (isinstance(entry, Cell) and entry.measured is not None)
            for entry in entries
        )
        columns.append(Column(title, (*(("paper",) if claimed else ()), *(("measured",) if measured else ()))))
    return columns


def padded(row: Sequence[Entry], columns: Sequence[Column]) -> list[Entry]:
    """Return a row with as many entries as there are columns."""
    return [*row, *[""] * (len(columns) - len(row))]


def caption(table: Table) -> str:
    """Return the title, with the unit of all measured numbers, and of their differences, where they share one."""
    unit = common_unit(table)
    if not unit:
        return table.title
    entries = [entry for row in table.rows for entry in row]
    units = [f"measured in {unit}"] if any(isinstance(entry, Cell) and entry.measured for entry in entries) else []
    if any(isinstance(entry, Comparison) for entry in entries):
        units.append(f"differences in {difference_unit(unit)}")
    return f"{table.title} ({', '.join(units)})"


def values_text(entry: Cell | Comparison) -> str:
    """Return the value of each replica or pair, as it is shown to a reader who points at a number."""
    unit = difference_unit(entry.unit) if isinstance(entry, Comparison) else entry.unit
    values = ", ".join(number_text(value, entry.unit) for value in entry.values)
    return f"{values} {unit}".strip() if values else ""


def traced(entry: Cell | Comparison) -> list[tuple[str, str]]:
    """Return pairs of a value and its run where they belong together, else runs without a value."""
    if len(entry.values) == len(entry.runs):
        return [(number_text(value, entry.unit), run) for value, run in zip(entry.values, entry.runs, strict=True)]
    return [("", run) for run in entry.runs]


def worth_a_table(series: Sequence[Series]) -> bool:
    """Return whether the points of a figure are few enough to be read as numbers."""
    return sum(len(one.x) for one in series) <= MOST_POINTS
