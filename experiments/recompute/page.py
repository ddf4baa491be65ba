"""Reads report.md: its sections, tables and lists, and what it prints as numbers. Imports nothing of flatmin."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

NUMBER = re.compile(r"(?<![\w.-])[+-]?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[+-]\d+)?(?![\w])")
NOTHING = "\N{EN DASH}"
RUN = re.compile(r"[\w.-]+-seed\d+")


@dataclass
class Block:
    """What stands under one heading of the third level."""

    caption: str
    is_figure: bool = False
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    traced: list[tuple[str, str]] = field(default_factory=list)
    """The list below a table: what a number is, and the values and runs behind it."""
    lines: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)


@dataclass
class Section:
    """What stands under one heading of the second level: an item, the overview, the list of runs."""

    title: str
    item: str = ""
    source: str = ""
    verdicts: list[tuple[str, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def block(self, caption):
        """Return the block of a caption, empty if there is none."""
        return next((b for b in self.blocks if b.caption == caption), Block(caption))

    @property
    def runs(self):
        """The runs that the section links, each once, in their order."""
        linked = [run for b in self.blocks for _, text in b.traced for run in RUN.findall(text)]
        return list(dict.fromkeys([*linked, *(run for b in self.blocks for run in b.runs)]))


def read_page(text):
    """Return the lines before the first section, and the sections by title."""
    text = re.sub(r"\\([\\`*\[\]<>$~_.)+#-])", r"\1", text).replace("\N{MINUS SIGN}", "-")
    head, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    sections = [_section(part) for part in parts]
    return head.strip().splitlines(), sections


def _section(text):
    first, *parts = re.split(r"^### ", text, flags=re.MULTILINE)
    title, *lines = first.splitlines()
    section = Section(title.strip())
    for line in lines:
        if match := re.match(r"(.*) · ([\w.-]+)(?: · scale \*\*\w+\*\*)?$", line):
            section.source, section.item = match.groups()
        elif match := re.match(r"- \*\*([^*]+)\*\*: (.*)", line):
            section.verdicts.append((match[1], match[2].replace("\\|", "|")))
        elif line.startswith("|"):
            section.rows.append(_cells(line))
        elif line.strip():
            section.lines.append(line)
    section.blocks = [_block(part) for part in parts]
    return section


def _block(text):
    caption, *lines = text.splitlines()
    block = Block(caption.strip())
    for line in lines:
        if line.startswith("!["):
            block.is_figure = True
        elif line.startswith("|"):
            block.rows.append(_cells(line))
        elif match := re.fullmatch(rf"- ({RUN.pattern})", line):
            block.runs.append(match[1])
        elif line.startswith("- ") and RUN.search(line):
            start = re.search(
                rf": (?:(?:[^:]*? from )?{RUN.pattern}|[^:]* points; |[^:;]*; (?={RUN.pattern}))", line
            ).start()
            block.traced.append((line[2:start], line[start + 2 :]))
        elif line.strip() and not line.startswith("<"):
            block.lines.append(line)
    if block.rows:
        block.header, _, *block.rows = block.rows
    return block


def _cells(line):
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


@cache
def critical_value(degrees_of_freedom):
    """Return the 97.5 % quantile of Student's distribution."""
    from scipy import stats

    return float(stats.t.ppf(0.975, degrees_of_freedom))


def interval(values):
    """Return the mean and half the width of Student's 95 % interval; NaN for one value."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, math.nan
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return mean, critical_value(n - 1) * math.sqrt(variance / n)


class Tally:
    """What was checked, by kind; what disagrees; and what was not checked."""

    def __init__(self):
        self.checked = Counter()
        self.wrong = []
        self.not_checked = []
        self.papers = 0

    def same(self, kind, where, printed, expected, count=1):
        """Check a word, a whole number, or a list of them."""
        self.checked[kind] += count
        if printed != expected:
            self.wrong.append(f"{where}: the page says {printed!r}, the runs say {expected!r} ({kind})")

    def number(self, kind, where, printed, value, digits=None):
        """Check a number to its last printed digit; to so many significant digits if given (zeros at the end)."""
        self.checked[kind] += 1
        if printed == NOTHING or value is None or math.isnan(value):
            agrees = printed == NOTHING and (value is None or math.isnan(value))
        else:
            agrees = abs(float(printed.replace(",", "")) - value) <= 0.5 * step(printed, value, digits) + 1e-9 * abs(
                value
            )
        if not agrees:
            self.wrong.append(f"{where}: the page says {printed}, the runs say {value!r} ({kind})")

    def interval(self, kind, where, printed, values):
        """Check "mean ± half-width": both are rounded to the same digit."""
        mean, half_width = interval(values)
        if " ± " not in printed:
            self.number(kind, where, printed, mean, digits=None if "." in printed else 4)
            if not math.isnan(half_width):
                self.wrong.append(f"{where}: the page has no interval, {len(values)} values have one")
            return
        first, second = printed.split(" ± ")
        unit = step(second, half_width)
        if "." not in second and "e" not in second and half_width > 0:  # "120 ± 60": zeros are not digits
            exponent = math.floor(math.log10(half_width))
            unit = 10.0 ** (exponent - (f"{half_width:e}"[0] == "1"))
        for name, text, value in (("", first, mean), (", half-width", second, half_width)):
            self.checked[f"{kind}{name}"] += 1
            mine = step(text, value, 4) if half_width == 0 and not name else unit
            if abs(float(text) - value) > 0.5 * mine + 1e-9 * max(1.0, abs(value)):
                self.wrong.append(
                    f"{where}: the page says {printed}, the runs say {mean:.6g} ± {half_width:.6g} ({kind})"
                )

    def p_value(self, kind, where, printed, value):
        """Check "p = 0.012", "p < 0.001" or "no test"."""
        self.checked[kind] += 1
        if printed == "no test":
            agrees = math.isnan(value)
        elif "<" in printed:
            agrees = value < 0.001 and printed == "p < 0.001"
        else:
            agrees = abs(float(printed.split()[-1]) - value) <= 0.0005 * (1 + 1e-6)
        if not agrees:
            self.wrong.append(f"{where}: the page says {printed}, the runs say {value:.6g} ({kind})")

    def seconds(self, kind, where, printed, value):
        """Check a time: "8.2 s", "1 min 23 s" or "2 h 3 min"."""
        self.checked[kind] += 1
        amounts = {unit: float(number) for number, unit in re.findall(r"([\d.]+) (h|min|s)", printed)}
        total = 3600 * amounts.get("h", 0) + 60 * amounts.get("min", 0) + amounts.get("s", 0)
        low, high = (-0.5, 60.0) if "h" in amounts else (-0.5, 0.5) if "min" in amounts else (-0.05, 0.05)
        if not (amounts and total + low - 1e-6 <= value <= total + high + 1e-6):
            self.wrong.append(f"{where}: the page says {printed}, the runs took {value:.2f} s ({kind})")

    def skip(self, where, text, why):
        """Count the numbers of a text that nothing is compared with."""
        if count := len(NUMBER.findall(RUN.sub("", text))):
            self.not_checked.append((why, where, count))


def step(printed, value, digits=None):
    """Return what the last digit of a printed number is worth.

    Example:
        >>> step("0.25", 0.25), step("3.034e+05", 303418.0), step("22", 22.001, digits=4)
        (0.01, 100.0, 0.01)
    """
    if digits is not None and value:
        return 10.0 ** (math.floor(math.log10(abs(value)) + 1e-12) - digits + 1)
    mantissa, _, exponent = printed.lower().partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
