"""Numbers as a report prints them: rounded to what their intervals allow."""

import math

from flatmin.lab.studies.statistics import Interval

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
    """Return a count with its noun.

    Example:
        >>> plural(1, "run"), plural(2, "run")
        ('1 run', '2 runs')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _with_minus(text: str) -> str:
    # "-0.00" is a zero; a hyphen would break at the end of a line.
    zero, separator, rest = text.partition(" ± ")
    if zero.startswith("-") and float(zero) == 0:
        zero = zero[1:]
    return (zero + separator + rest).replace("-", MINUS)
