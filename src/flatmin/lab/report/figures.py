"""Figures of a report, drawn once: inside the page, and as files next to the Markdown."""

import io
import itertools
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.style
import numpy as np
from markupsafe import Markup
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from flatmin.lab.report.tables import MINUS, interval_text
from flatmin.lab.studies.findings import LineFigure, Series, SurfaceFigure, VerdictStatus
from flatmin.lab.studies.statistics import Interval

INK = "#1b1f24"
"""Of text and axes; on the page it becomes the color of the page's text, light or dark."""
# After Okabe and Ito (distinct for color-blind readers too), with a blue that is visible on white and on black.
COLORS = ("#1a85c8", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8f98")
METHOD_COLORS = {
    "SGD": COLORS[0],
    "SAM": COLORS[1],
    "SAM on 1/8": COLORS[2],
    "SGD, twice the epochs": COLORS[3],
    "SGD, stopped early": COLORS[4],
}
"""Methods that many figures have look the same in all of them; other lines take what is left, in order."""
MARKERS, DASHES = "osD^X*", ("-", "--", ":")
STATUS_LOOK: dict[VerdictStatus, tuple[str, str]] = {
    "reproduced": ("#009e73", "o"),
    "not reproduced": ("#d55e00", "s"),
    "kept": ("#009e73", "o"),
    "not kept": ("#d55e00", "s"),
    "inconclusive": ("#e69f00", "D"),
    "not tested at this scale": ("#8a8f98", "^"),
    "not tested": ("#8a8f98", "X"),
}
NUM_LEVELS, MOST_TICKS, FOREST_LABEL, NARROW_RANGE = 25, 10, 56, 30.0
STYLE = {
    **{"svg.hashsalt": "flatmin", "svg.fonttype": "none", "font.size": 9.5, "font.family": "sans-serif"},
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **{"axes.spines.top": False, "axes.spines.right": False, "grid.color": INK, "grid.alpha": 0.15},
}


@dataclass(frozen=True)
class ForestFigure:
    """Effects of several claims with their intervals, one below the other, in % of the baseline."""

    title: str
    groups: Sequence[tuple[str, Sequence[tuple[str, VerdictStatus, Interval]]]]
    """Headings, each with its rows; an empty heading is left out."""
    limit: float = 100.0
    """How far the axis goes to either side at most, in %."""


def svg(figure: LineFigure | SurfaceFigure | ForestFigure) -> str:
    """Return the figure as SVG without a background: the same bytes for the same figure."""
    # Ids in an SVG are random but for the salt; a reader's own matplotlibrc must not change a page.
    with matplotlib.style.context(["default", STYLE]):
        buffer = io.StringIO()
        draw(figure).savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # Two decimals of a point are less than a screen shows.
    return re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), buffer.getvalue())


def inline_svg(text: str, title: str, name: str) -> Markup:
    """Return an SVG for the page: as wide as there is room, text in the page's color, ids that begin with a name."""
    text = re.sub(r'<g id="[^"]*">', "<g>", text[text.index("<svg") :]).replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'( id="|url\(#|href="#)', rf"\1{name}-", text)
    width = float(re.search(r'width="([\d.]+)pt"', text)[1])  # type: ignore[index]
    head = Markup('<svg role="img" aria-label="{}" style="max-width: {:.0f}px"').format(title, 1.5 * width)
    return Markup(re.sub(r'<svg height="[\d.]+pt"|<svg', head, text, count=1).replace(f'width="{width:g}pt"', "", 1))


def standalone_svg(text: str) -> str:
    """Return an SVG for a file: on white, because the background is not known."""
    return re.sub(r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="#fff"/>', text, count=1)


def draw(figure: LineFigure | SurfaceFigure | ForestFigure) -> Figure:
    """Draw a figure with matplotlib."""
    if isinstance(figure, LineFigure):
        return _draw_lines(figure)
    return _draw_surfaces(figure) if isinstance(figure, SurfaceFigure) else _draw_forest(figure)


def x_text(x: float) -> str:
    """Return a place on the horizontal axis."""
    return f"{x:.6g}".replace("-", MINUS)


def y_text(figure: LineFigure, series: Series, index: int) -> str:
    """Return a point's height with its interval."""
    half_width = math.nan if series.half_width is None else float(series.half_width[index])
    return interval_text(Interval(float(series.y[index]), half_width), "%" if "%" in figure.y_label else "")


def _colors(names: Sequence[str]) -> list[str]:
    taken = {METHOD_COLORS[name] for name in names if name in METHOD_COLORS}
    others = itertools.cycle([color for color in COLORS if color not in taken])
    return [METHOD_COLORS[name] if name in METHOD_COLORS else next(others) for name in names]


def _draw_lines(figure: LineFigure) -> Figure:
    longest = max((len(series.name) for series in figure.series), default=0)
    columns = max(1, min(len(figure.series), 56 // (longest + 6)))
    rows = math.ceil(len(figure.series) / columns)
    # A long legend takes no room from the axes.
    drawn = Figure(figsize=(5.4, 3.5 + 0.22 * max(0, rows - 2)), layout="constrained")
    axes = drawn.add_subplot()
    drawable = False
    colors = _colors([series.name for series in figure.series])
    for number, (series, color) in enumerate(zip(figure.series, colors, strict=True)):
        marker = MARKERS[number % len(MARKERS)]
        line = DASHES[number // len(COLORS) % len(DASHES)] if "lines" in series.mode else "none"
        xs, ys = np.array(series.x, dtype=float), np.array(series.y, dtype=float)
        shown = np.isfinite(xs) & np.isfinite(ys) & ((xs > 0) | (not figure.log_x)) & ((ys > 0) | (not figure.log_y))
        drawable |= bool(shown.any())
        xs, ys = np.where(shown, xs, np.nan), np.where(shown, ys, np.nan)
        look: dict[str, Any] = {"color": color, "label": _plain(series.name), "linestyle": line, "linewidth": 1.6}
        widths = None if series.half_width is None else np.nan_to_num(np.array(series.half_width, dtype=float))
        if series.mode == "lines":
            axes.plot(xs, ys, **look)
            if widths is not None:
                axes.fill_between(xs, ys - widths, ys + widths, color=color, alpha=0.15, linewidth=0)
        else:
            axes.errorbar(xs, ys, yerr=widths, marker=marker, markersize=4.5, capsize=3, **look)
    axes.set(xlabel=_plain(figure.x_label), ylabel=_plain(figure.y_label))
    axes.grid(visible=True)
    if figure.log_y and drawable:
        axes.set_yscale("log", nonpositive="clip")
        low, high = axes.get_ylim()
        if high < NARROW_RANGE * low:  # powers of ten alone would be one label, or none
            axes.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
            axes.yaxis.set_major_formatter("{x:g}")
    if figure.log_x and drawable:
        axes.set_xscale("log", nonpositive="clip")
        # For a grid of few values, the values themselves say more than powers of ten.
        values = sorted({float(x) for series in figure.series for x in series.x if math.isfinite(x) and x > 0})
        if len(values) <= MOST_TICKS:
            axes.set_xticks(values, [x_text(value) for value in values])
            axes.minorticks_off()
    if len(figure.series) > 1:
        drawn.legend(loc="outside lower center", ncols=columns, frameon=False)
    return drawn


def _draw_surfaces(figure: SurfaceFigure) -> Figure:
    # Contours: heights can be read off them, and compared, better than off a surface in perspective.
    low, high = _height_range(figure)
    levels, norm = np.geomspace(low, high, NUM_LEVELS), LogNorm(low, high)
    num = len(figure.surfaces)
    drawn = Figure(figsize=(2.9 * num + 0.9, 3.2), layout="constrained")
    image: Any = None
    for number, surface in enumerate(figure.surfaces):
        axes = drawn.add_subplot(1, num, number + 1)
        heights = np.ma.masked_invalid(np.array(surface.height, dtype=float).T)
        image = axes.contourf(
            surface.coordinates, surface.coordinates, np.ma.clip(heights, low, high), levels=levels, norm=norm
        )
        axes.plot(0, 0, "+", color="white", markersize=9)
        axes.set(xlabel="direction 1", title=_plain(surface.name, 30), aspect="equal")
    drawn.axes[0].set_ylabel("direction 2")
    bar = drawn.colorbar(image, ax=drawn.axes, label=_plain(figure.height_label), shrink=0.85)
    powers = 10.0 ** np.arange(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    ticks = powers if len(powers) > 1 else levels[::6]
    bar.set_ticks(ticks.tolist(), labels=[f"{float(f'{tick:.3g}'):g}" for tick in ticks])
    bar.minorticks_off()
    return drawn


def _height_range(figure: SurfaceFigure) -> tuple[float, float]:
    heights = np.concatenate([np.array(surface.height, dtype=float).ravel() for surface in figure.surfaces])
    heights = heights[np.isfinite(heights) & (heights > 0)]
    if not heights.size:
        return 1.0, 10.0
    low, high = float(heights.min()), float(heights.max())
    return low, high if high > low else 10 * low


def _draw_forest(figure: ForestFigure) -> Figure:
    # Texts beside the axis, each with its effect; a heading has none.
    entries: list[tuple[str, tuple[str, VerdictStatus, Interval] | None]] = []
    for heading, group in figure.groups:
        entries += [(_plain(heading, FOREST_LABEL), None)] * bool(heading)
        entries += [(_plain(row[0], FOREST_LABEL), row) for row in group]
    rows = [row for _, row in entries if row is not None]
    lines = sum(text.count("\n") + 1 for text, _ in entries)
    drawn = Figure(figsize=(8.2, 0.9 + 0.19 * lines + 0.1 * len(entries)), layout="constrained")
    axes = drawn.add_subplot()
    at, ticks = 0.0, []
    for text, row in entries:
        height = 0.19 * (text.count("\n") + 1) + 0.1
        middle = at + height / 2
        at += height
        if row is None:
            ticks.append((middle + 0.06, text, "bold"))
            continue
        ticks.append((middle, text, "normal"))
        _, status, effect = row
        color, marker = STATUS_LOOK[status]
        width = 0.0 if math.isnan(effect.half_width) else effect.half_width
        if abs(effect.mean) > figure.limit:  # off the axis: an arrow at its end, with the number
            sign, arrow, side = (1, ">", "right") if effect.mean > 0 else (-1, "<", "left")
            end, number = (sign * figure.limit, middle), f"{effect.mean:+.0f} %"
            axes.plot(*end, arrow, color=color, markersize=6, clip_on=False)
            axes.annotate(number, end, (-8 * sign, 0), textcoords="offset points", ha=side, va="center")
        else:
            look: dict[str, Any] = {"color": color, "marker": marker, "markersize": 5, "capsize": 3, "linewidth": 1.8}
            axes.errorbar(effect.mean, middle, xerr=width, **look)
    ends = [effect.mean + sign * np.nan_to_num(effect.half_width) for _, _, effect in rows for sign in (-1, 1)]
    reach = [min(figure.limit, max(-figure.limit, 1.08 * end)) for end in (*ends, -5.0, 5.0)]
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_yticks([place for place, _, _ in ticks], [text for _, text, _ in ticks])
    for label, (_, _, weight) in zip(axes.get_yticklabels(), ticks, strict=True):
        label.set_fontweight(weight)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(xlabel="difference, % of the baseline", ylim=(at, 0), xlim=(min(reach), max(reach)))
    axes.grid(visible=True, axis="x")
    for status, (color, marker) in STATUS_LOOK.items():
        if any(status == row[1] for row in rows):
            axes.plot([], [], color=color, marker=marker, linestyle="none", label=status)
    drawn.legend(loc="outside upper right", ncols=4, frameon=False)
    return drawn


def _plain(text: str, width: int = 44) -> str:
    # Between two dollar signs matplotlib would read mathematics.
    return textwrap.fill(text, width).replace("$", r"\$")
