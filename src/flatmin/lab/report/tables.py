"""The tables of a report as text, cell by cell: what the paper says next to what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flatmin.lab.report.numbers import NOTHING, difference_unit, interval_text, number_text, plural, signed
from flatmin.lab.studies.findings import Cell, Comparison, Table
from flatmin.lab.studies.statistics import SIGNIFICANT, p_text

TableEntry = str | Cell | Comparison
Part = Literal["paper", "measured"]


@dataclass(frozen=True, kw_only=True)
class ShownCell:
    """A cell as it is shown."""

    text: str
    part: Part | None = None
    """None: a label, in the place of all parts of the column."""
    span: int = 1
    begins: bool = False
    """Whether a column of several parts begins here."""
    facts: tuple[str, ...] = ()
    """The number of replicas; or what is compared, and the p-values."""
    bold: bool = False
    """Whether the p-values are significant."""
    note: str = ""
    values: str = ""
    """The value of each replica or pair, with its unit."""
    sources: Sequence[tuple[str, str]] = ()
    """Each run, with its value where there is one value per run."""


@dataclass(frozen=True, kw_only=True)
class ShownTable:
    """A table as it is shown."""

    title: str
    caption: str
    columns: Sequence[tuple[str, tuple[Part, ...]]]
    """Titles, and what each column holds of its entries: nothing, one or two parts."""
    has_parts: bool
    """Whether there is a second line of titles, as something is claimed."""
    rows: Sequence[Sequence[ShownCell]]
    note: str
    folded: bool

    @property
    def traced(self) -> list[tuple[str, ShownCell]]:
        """The cells with runs or values behind them, each with its labels."""
        found = []
        for row in self.rows:
            labels: list[str] = []
            at = 0
            for cell in row:
                title, parts = self.columns[at]
                if cell.sources or cell.values:
                    found.append((", ".join([*labels, title]), cell))
                elif cell.part is None and cell.text:
                    labels.append(cell.text)
                # A column ends with its last part.
                at += cell.part is None or len(parts) < 2 or cell.part == "measured"
        return found


def shown_table(table: Table) -> ShownTable:
    """Return a table as it is shown, in the paper's shape."""
    columns = [(title, _parts(table, number)) for number, title in enumerate(table.columns)]
    has_parts = any("paper" in parts for _, parts in columns)
    unit_in_caption = common_unit(table) is not None
    rows = [
        [
            cell
            for (_, parts), entry in zip(columns, [*row, *[""] * (len(columns) - len(row))], strict=True)
            for cell in _cells(entry, parts, unit_in_caption, has_parts)
        ]
        for row in table.rows
    ]
    return ShownTable(
        title=table.title,
        caption=caption(table),
        columns=columns,
        has_parts=has_parts,
        rows=rows,
        note=table.note,
        folded=table.folded,
    )


def common_unit(table: Table) -> str | None:
    """Return the unit of all measured numbers, if they share one: it is printed once, in the caption."""
    units = {entry.unit for row in table.rows for entry in row if _is_measured(entry)}  # type: ignore[union-attr]
    return units.pop() if len(units) == 1 else None


def caption(table: Table) -> str:
    """Return the title, with the unit of all measured numbers, and of their differences, if they share one."""
    unit = common_unit(table)
    if not unit:
        return table.title
    entries = [entry for row in table.rows for entry in row]
    units = [f"measured in {unit}"] if any(isinstance(entry, Cell) and entry.measured for entry in entries) else []
    if any(isinstance(entry, Comparison) for entry in entries):
        units.append(f"differences in {difference_unit(unit)}")
    return f"{table.title} ({', '.join(units)})"


def effect_text(comparison: Comparison) -> str:
    """Return the difference of a comparison with its interval and unit."""
    text = signed(interval_text(comparison.difference, comparison.unit))
    return f"{text} {difference_unit(comparison.unit)}".rstrip()


def _parts(table: Table, number: int) -> tuple[Part, ...]:
    entries = [row[number] for row in table.rows if number < len(row)]
    claimed = any(isinstance(entry, Cell) and entry.claimed is not None for entry in entries)
    return (*(("paper",) if claimed else ()), *(("measured",) if any(map(_is_measured, entries)) else ()))


def _is_measured(entry: TableEntry) -> bool:
    return isinstance(entry, Comparison) or (isinstance(entry, Cell) and entry.measured is not None)


def _cells(entry: TableEntry, parts: tuple[Part, ...], unit_in_caption: bool, has_parts: bool) -> list[ShownCell]:
    begins = has_parts and bool(parts)
    if isinstance(entry, str):
        return [ShownCell(text=entry, span=max(1, len(parts)), begins=begins)]
    cells = []
    for part in parts or ("measured",):
        if part == "measured":
            cells.append(_measured(entry, unit_in_caption, begins))
        else:
            claimed = entry.claimed if isinstance(entry, Cell) else ""
            cells.append(ShownCell(text=NOTHING if claimed is None else claimed, part="paper", begins=begins))
        begins = False
    return cells


def _measured(entry: Cell | Comparison, unit_in_caption: bool, begins: bool) -> ShownCell:
    if isinstance(entry, Comparison):
        unit, text = difference_unit(entry.unit), signed(interval_text(entry.difference, entry.unit))
        p_values = f"{p_text(entry.p_value)}, Holm {p_text(entry.p_holm)}"
        facts: tuple[str, ...] = (f"{entry.name}, {plural(entry.num_pairs, 'pair')}", p_values)
        bold, note = entry.p_holm < SIGNIFICANT, ""
    else:
        if entry.measured is None:
            return ShownCell(text=NOTHING, part="measured", begins=begins, note=entry.note or "")
        unit, text = entry.unit, interval_text(entry.measured, entry.unit)
        number = len(entry.values) or len(entry.runs)
        facts, bold, note = (f"n = {number}",) if number else (), False, entry.note or ""
    values = [number_text(value, entry.unit) for value in entry.values]
    paired = values if len(values) == len(entry.runs) else [""] * len(entry.runs)
    return ShownCell(
        text=text if unit_in_caption else f"{text} {unit}".rstrip(),
        part="measured",
        begins=begins,
        facts=facts,
        bold=bold,
        note=note,
        values=f"{', '.join(values)} {unit}".strip() if values else "",
        sources=list(zip(paired, entry.runs, strict=True)),
    )
