"""Numbers, intervals and tables of a report as text: what the paper says next to what was measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flatmin.lab.studies.findings import Cell, Comparison, Entry, Table
from flatmin.lab.studies.statistics import SIGNIFICANT, Interval, p_text

Part = Literal["paper", "measured"]


@dataclass(frozen=True, kw_only=True)
class ShownCell:
    """A cell as the templates show it."""

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
    """Each run, with its value if there is one value per run."""


def shown_table(table: Table) -> dict[str, Any]:
    """Return a table as the templates show it; each column has a title and none, one or two parts."""
    columns = [(title, _parts(table, number)) for number, title in enumerate(table.columns)]
    has_parts = any("paper" in parts for _, parts in columns)
    unit_in_caption = common_unit(table) is not None
    rows: list[list[ShownCell]] = []
    traced: list[tuple[str, ShownCell]] = []  # what has runs or values behind it, with its labels
    for row in table.rows:
        labels: list[str] = []
        rows.append([])
        for (title, parts), entry in zip(columns, [*row, *[""] * (len(columns) - len(row))], strict=True):
            cells = _cells(entry, parts, unit_in_caption, has_parts)
            rows[-1] += cells
            labels += [entry] if isinstance(entry, str) and entry else []
            traced += [(", ".join([*labels, title]), cell) for cell in cells if cell.sources or cell.values]
    shown = {"title": table.title, "caption": caption(table), "note": table.note, "folded": table.folded}
    return shown | {"columns": columns, "has_parts": has_parts, "rows": rows, "traced": traced}


def common_unit(table: Table) -> str | None:
    """Return the unit of all measured numbers, if they share one: it is printed once, in the caption."""
    units = {entry.unit for entry in table.entries if _is_measured(entry)}  # type: ignore[union-attr]
    return units.pop() if len(units) == 1 else None


def caption(table: Table) -> str:
    """Return the title, with the unit of all measured numbers, and of their differences, if they share one."""
    unit = common_unit(table)
    if not unit:
        return table.title
    units = [f"measured in {unit}"] if any(isinstance(e, Cell) and e.measured for e in table.entries) else []
    if any(isinstance(entry, Comparison) for entry in table.entries):
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


def _is_measured(entry: Entry) -> bool:
    return isinstance(entry, Comparison) or (isinstance(entry, Cell) and entry.measured is not None)


def _cells(entry: Entry, parts: tuple[Part, ...], unit_in_caption: bool, has_parts: bool) -> list[ShownCell]:
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


MINUS, TIMES, NOTHING = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"


def interval_text(interval: Interval, unit: str = "%") -> str:
    """Return "mean ± half-width", both rounded to the half-width's first digit (its second after a leading 1).

    Percentages have one decimal at least. Without an interval (one replica) the mean stands alone.

    Example:
        >>> interval_text(Interval(14.7183, 0.3421)), interval_text(Interval(523.4, 41.0), unit="")
        ('14.7 ± 0.3', '520 ± 40')
    """
    mean, half_width = interval.mean, interval.half_width
    # Of percentages with equal values rounding may leave some 1e-15.
    smallest = 5e-4 if unit == "%" else 0.0
    if not (math.isfinite(half_width) and half_width > smallest):
        alone = number_text(mean, unit)
        return alone if math.isnan(half_width) else f"{alone} ± {number_text(half_width, unit)}"
    exponent = math.floor(math.log10(half_width))
    decimals = -exponent + (f"{half_width:e}"[0] == "1")
    if decimals > 6:  # a long row of zeros says less than an exponent
        return _with_minus(f"{mean:.4g} ± {half_width:.1g}")
    if unit == "%":
        decimals = max(decimals, 1)
    shown = max(decimals, 0)
    return _with_minus(f"{round(mean, decimals):.{shown}f} ± {round(half_width, decimals):.{shown}f}")


def number_text(value: float | None, unit: str = "%") -> str:
    """Return one number: two decimals in %, else four digits.

    Example:
        >>> number_text(14.7183), number_text(0.000123456, unit=""), number_text(None)
        ('14.72', '0.0001235', '–')
    """
    if value is None or math.isnan(value):
        return NOTHING
    return _with_minus(f"{value:.2f}" if unit == "%" and math.isfinite(value) else f"{value:.4g}")


def difference_unit(unit: str) -> str:
    """Return the unit of a difference: of percentages it is points."""
    return "points" if unit == "%" else unit


def signed(text: str) -> str:
    """Return a difference with its sign.

    Example:
        >>> signed("1.3 ± 0.4"), signed("0.0 ± 0.4")
        ('+1.3 ± 0.4', '0.0 ± 0.4')
    """
    first = text.partition(" ")[0]
    return f"+{text}" if first[0].isdigit() and first.strip("0.") else text


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _with_minus(text: str) -> str:
    # "-0.00" is a zero; a hyphen would break at the end of a line.
    zero, separator, rest = text.partition(" ± ")
    if zero.startswith("-") and float(zero) == 0:
        zero = zero[1:]
    return (zero + separator + rest).replace("-", MINUS)


def setting_text(value: Any) -> str:
    """Return a hyperparameter's value as text."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(setting_text(inner) for inner in value)
    return str(value)
