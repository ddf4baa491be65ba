"""The words in which a publication's claims are kept: numbers as printed, statements, and where they stand."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_PRINTED = re.compile(
    r"(?:approximately|up to|about)?\s*(?P<mean>\d+(?:\.\d+)?)"
    r"(?:\s*±\s*(?P<below><)?(?P<spread>\d+(?:\.\d+)?))?"
)


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A published number.

    Example:
        >>> Claimed.read("5.80 ± 0.1")
        Claimed(printed='5.80 ± 0.1', mean=5.8, ci=0.1, ci_below=False, std=None)
    """

    printed: str
    """As the publication prints it."""
    mean: float
    ci: float | None = None
    """Half the width of its 95 % confidence interval; None where none is given."""
    ci_below: bool = False
    """Whether the interval is only said to be narrower: "± <0.1"."""
    std: float | None = None
    """The standard deviation over runs, where that is what follows the "±"."""

    @classmethod
    def read(cls, text: str, spread: Literal["ci", "std"] = "ci") -> "Claimed":
        """Read a number as printed, for example "2.7 ± 0.1", "2.1 ± <0.1", "0.63" or "up to 11.4"."""
        match = _PRINTED.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"This is not a number as papers print them: {text!r}; one looks like '2.7 ± 0.1'.")
        width = None if match["spread"] is None else float(match["spread"])
        return cls(
            printed=text.strip(),
            mean=float(match["mean"]),
            ci=width if spread == "ci" else None,
            ci_below=match["below"] is not None,
            std=width if spread == "std" else None,
        )


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A claim in words, to be tested, and whether the publication's own numbers bear it out."""

    claim: str
    own_numbers: str
    """What the publication's own numbers say of it."""


Cells = Mapping[tuple[Any, ...], Claimed]


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The numbers of one table, or of one place in the text, and what is claimed of them."""

    source: str
    """Where they stand, for example "Table 1, Section 3.1"."""
    title: str
    metric: str = ""
    """What the numbers are, with their unit."""
    cells: Cells = field(default_factory=dict)
    """By the labels of the row and of the column, the method last."""
    statements: tuple[Statement, ...] = ()
    notes: tuple[str, ...] = ()
    """Slips and oddities; the numbers are verbatim all the same."""

    def __getitem__(self, key: tuple[Any, ...]) -> Claimed:
        """Return one number."""
        return self.cells[key]

    def errors(self, *labels: Any, sgd: str = "SGD", sam: str = "SAM") -> dict[tuple[str, str], Claimed]:
        """Return the errors without and with SAM of one condition, by what the methods are called here."""
        keys = {sgd: (*labels, "sgd"), sam: (*labels, "sam")}
        return {(name, "test_error"): self[key] for name, key in keys.items()}


def table_rows(text: str) -> Iterator[list[str]]:
    r"""Yield the rows of a table written with ``|`` between its columns; a line that starts with # is a heading.

    Example:
        >>> list(table_rows("# rho | error\n0.05 | 2.7 ± 0.1"))
        [['0.05', '2.7 ± 0.1']]
    """
    for line in text.strip().splitlines():
        if not line.startswith("#"):
            yield [column.strip() for column in line.split("|")]


def read_cells(text: str, columns: Iterable[tuple[Any, ...]], spread: Literal["ci", "std"] = "ci") -> Cells:
    r"""Read a table of numbers as printed; "-" is an empty cell, and a column without labels is left out.

    Example:
        >>> [(key, number.mean) for key, number in read_cells("wrn | 200 | 2.7 | -", [("sam",), ("sgd",)]).items()]
        [(('wrn', 200, 'sam'), 2.7)]
    """
    columns = list(columns)
    return {
        (*map(_label, row[: -len(columns)]), *column): Claimed.read(number, spread)
        for row in table_rows(text)
        for column, number in zip(columns, row[-len(columns) :], strict=True)
        if column and number != "-"
    }


def _label(text: str) -> str | float:
    return int(text) if text.isdigit() else float(text) if re.fullmatch(r"\d+\.\d+", text) else text
