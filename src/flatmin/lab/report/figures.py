"""Figures of a report: for the browser as what plotly.js draws, and as pictures (SVG) for paper and Markdown."""

import html
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flatmin.lab.report.numbers import MINUS, interval_text
from flatmin.lab.studies.findings import LineFigure, Series, SurfaceFigure
from flatmin.lab.studies.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# After Okabe and Ito (told apart by color-blind people too), with a blue that is seen on white and on black.
COLOURS = ("#1a85c8", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8f98")
SYMBOLS = (("circle", "o"), ("square", "s"), ("diamond", "D"), ("triangle-up", "^"), ("x", "X"), ("star", "*"))
DASHES = (("solid", "-"), ("dash", "--"), ("dot", ":"))
NUM_LEVELS, MOST_TICKS = 25, 10
WIDE_CHARACTERS, NARROW_CHARACTERS = 70, 36
"""More in the names of all categories do not fit side by side below a figure, on a page and on a phone."""
LINES_HEIGHT, SURFACE_HEIGHT = 420, 460
"""In pixels."""


def plotly_figure(figure: LineFigure | SurfaceFigure) -> dict[str, Any]:
    """Return data and layout for `Plotly.newPlot`, and under "narrow" what a narrow screen changes of the layout."""
    return _plotly_lines(figure) if isinstance(figure, LineFigure) else _plotly_surfaces(figure)


def svg(figure: LineFigure | SurfaceFigure) -> str:
    """Return the figure as a picture: the same bytes for the same figure."""
    import matplotlib
    import matplotlib.style

    # Ids in an SVG are random but for the salt; a reader's own matplotlibrc must not change a page.
    fixed = {"svg.hashsalt": "flatmin", "svg.fonttype": "path", "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.style.context(["default", fixed]):
        drawn = _draw_lines(figure) if isinstance(figure, LineFigure) else _draw_surfaces(figure)
        buffer = io.StringIO()
        drawn.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def positions(figure: LineFigure, number: int) -> list[float]:
    """Return where the points of a series stand on the x axis: over categories side by side, not on each other."""
    xs = [float(x) for x in figure.series[number].x]
    if figure.categories is None or len(figure.series) == 1:
        return xs
    step = min(0.12, 0.6 / len(figure.series))
    return [x + step * (number - (len(figure.series) - 1) / 2) for x in xs]


def x_text(figure: LineFigure, x: float) -> str:
    """Return the name of a category, or the number."""
    if figure.categories is not None and float(x).is_integer() and 0 <= x < len(figure.categories):
        return figure.categories[int(x)]
    return f"{x:.6g}".replace("-", MINUS)


def y_text(figure: LineFigure, series: Series, index: int) -> str:
    """Return a point's height with its interval."""
    half_width = math.nan if series.half_width is None else float(series.half_width[index])
    return interval_text(Interval(float(series.y[index]), half_width), "%" if "%" in figure.y_label else "")


def _plotly_lines(figure: LineFigure) -> dict[str, Any]:
    data = []
    for number, series in enumerate(figure.series):
        color, symbol, dash = _look(number)
        trace = {
            "type": "scatter",
            "name": html.escape(series.name),
            "mode": series.mode,
            "x": _finite(positions(figure, number)),
            "y": _finite(series.y),
            "line": {"color": color, "dash": dash[0], "width": 2},
            "marker": {"color": color, "symbol": symbol[0], "size": 8},
            "hoverinfo": "text",
            "hovertext": [_hover(figure, series, index) for index in range(len(series.x))],
        }
        if series.half_width is not None:
            widths = _finite(series.half_width)
            trace["error_y"] = {"type": "data", "array": widths, "color": color, "thickness": 1.5, "width": 4}
        data.append(trace)
    layout: dict[str, Any] = {
        "height": LINES_HEIGHT,
        "xaxis": _axis(figure.x_label, figure.log_x),
        "yaxis": _axis(figure.y_label, figure.log_y),
        "hovermode": "closest",
        "showlegend": len(figure.series) > 1,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "margin": {"l": 64, "r": 16, "t": 24, "b": 56},
    }
    ticks = _few_values(figure)
    if figure.categories is not None:
        names = [html.escape(name) for name in figure.categories]
        layout["xaxis"] |= {"type": "linear", "tickvals": list(range(len(names))), "ticktext": names}
        layout["xaxis"] |= {"automargin": True, "ticklabeloverflow": "allow"}
        layout["xaxis"]["range"] = [-0.5, len(names) - 0.5]
    elif ticks:
        layout["xaxis"] |= {"tickvals": ticks, "ticktext": [x_text(figure, tick) for tick in ticks]}
    narrow: dict[str, Any] = {"margin.l": 48, "margin.r": 4}
    if figure.categories is not None and sum(map(len, figure.categories)) > NARROW_CHARACTERS:
        narrow["xaxis.tickangle"] = 40
    return {"data": data, "layout": layout, "narrow": narrow}


def _axis(label: str, is_log: bool) -> dict[str, Any]:
    # Powers of ten, not "100µ".
    scale = {"type": "log", "exponentformat": "power"} if is_log else {"type": "linear"}
    return {"title": {"text": html.escape(label)}, **scale}


def _hover(figure: LineFigure, series: Series, index: int) -> str:
    if series.hover is not None:
        return html.escape(series.hover[index]).replace("\n", "<br>")
    place = f"{figure.x_label}: {x_text(figure, series.x[index])}"
    height = f"{figure.y_label}: {y_text(figure, series, index)}"
    return "<br>".join(html.escape(line) for line in (series.name, place, height))


def _plotly_surfaces(figure: SurfaceFigure) -> dict[str, Any]:
    low, high = _height_range(figure)
    ticks = _nice_ticks(low, high) if figure.log_height else None
    num = len(figure.surfaces)
    bar: dict[str, Any] = {"title": {"text": html.escape(figure.height_label)}, "len": 0.75, "thickness": 14}
    bounds = [math.log10(low), math.log10(high)] if figure.log_height else [low, high]
    if ticks is not None:
        bar |= {"tickvals": [math.log10(tick) for tick in ticks], "ticktext": [f"{tick:g}" for tick in ticks]}
    layout: dict[str, Any] = {
        "height": SURFACE_HEIGHT,
        "margin": {"l": 0, "r": 0, "t": 32, "b": 8},
        "coloraxis": {"colorscale": "Viridis", "cmin": bounds[0], "cmax": bounds[1], "colorbar": bar},
        "annotations": [],
    }
    narrow: dict[str, Any] = {"height": 40 + 340 * num, "coloraxis.colorbar.len": 0.9 / num}
    data = []
    for number, surface in enumerate(figure.surfaces):
        # plotly wants z[j][i] at (x[i], y[j]).
        z = np.array(surface.height, dtype=float).T
        key = "scene" if number == 0 else f"scene{number + 1}"
        with np.errstate(divide="ignore", invalid="ignore"):
            shade = np.log10(z) if figure.log_height else z
        trace = {
            "type": "surface",
            "name": html.escape(surface.name),
            "scene": key,
            "x": _finite(surface.coordinates),
            "y": _finite(surface.coordinates),
            "z": [_finite(row) for row in z],
            "surfacecolor": [_finite(row) for row in shade],
            "coloraxis": "coloraxis",
            "contours": {"z": {"show": True, "color": "rgba(255,255,255,0.35)", "width": 1}} if ticks is None else {},
            "hovertext": [[f"{html.escape(surface.name)}: {value:.4g}" for value in row] for row in z],
            "hoverinfo": "text",
        }
        data.append(trace)
        left, right = number / num, (number + 1) / num
        top, bottom = 1 - number / num, 1 - (number + 1) / num
        layout[key] = {
            "domain": {"x": [left, right - 0.01], "y": [0, 1]},
            "xaxis": {"title": {"text": "direction 1"}, "nticks": 5},
            "yaxis": {"title": {"text": "direction 2"}, "nticks": 5},
            "zaxis": {"title": {"text": html.escape(figure.height_label)}, "range": bounds, "nticks": 5}
            | (
                {} if ticks is None else {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
            ),
            "aspectmode": "cube",
            "camera": {"eye": {"x": 1.4, "y": 1.4, "z": 0.85}, "center": {"x": 0, "y": 0, "z": -0.12}},
        }
        layout["annotations"].append(
            {
                "text": f"<b>{html.escape(surface.name)}</b>",
                "x": (left + right) / 2,
                "y": 1.0,
                "xref": "paper",
                "yref": "paper",
                "xanchor": "center",
                "yanchor": "bottom",
                "showarrow": False,
            }
        )
        narrow |= {
            f"{key}.camera.eye": {"x": 1.6, "y": 1.6, "z": 1.0},
            f"{key}.domain.x": [0, 1],
            f"{key}.domain.y": [bottom, top - 0.04],
            f"annotations[{number}].x": 0.5,
            f"annotations[{number}].y": top - 0.04,
        }
    return {"data": data, "layout": layout, "narrow": narrow}


def _draw_lines(figure: LineFigure) -> "Figure":
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = drawn.add_subplot()
    drawable = False
    for number, series in enumerate(figure.series):
        color, symbol, dash = _look(number)
        xs, ys = np.array(positions(figure, number), dtype=float), np.array(series.y, dtype=float)
        shown = np.isfinite(xs) & np.isfinite(ys) & ((xs > 0) | (not figure.log_x)) & ((ys > 0) | (not figure.log_y))
        drawable |= bool(shown.any())
        axes.errorbar(
            np.where(shown, xs, np.nan),
            np.where(shown, ys, np.nan),
            yerr=None if series.half_width is None else np.nan_to_num(np.array(series.half_width, dtype=float)),
            label=_plain(series.name),
            color=color,
            linestyle=dash[1] if "lines" in series.mode else "none",
            marker=symbol[1] if "markers" in series.mode else "none",
            markersize=5,
            capsize=3,
        )
    axes.set(xlabel=_plain(figure.x_label), ylabel=_plain(figure.y_label), title=_plain(figure.title))
    axes.grid(visible=True, alpha=0.3, linewidth=0.6)
    if figure.log_y and drawable:
        axes.set_yscale("log", nonpositive="clip")
    if figure.categories is not None:
        long = sum(map(len, figure.categories)) > WIDE_CHARACTERS
        slanted: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if long else {}
        axes.set_xticks(range(len(figure.categories)), [_plain(name) for name in figure.categories], **slanted)
        axes.set_xlim(-0.5, len(figure.categories) - 0.5)
    elif figure.log_x and drawable:
        axes.set_xscale("log", nonpositive="clip")
        if ticks := _few_values(figure):
            axes.set_xticks(ticks, [x_text(figure, tick) for tick in ticks])
            axes.minorticks_off()
    if len(figure.series) > 1:
        drawn.legend(loc="outside lower center", ncols=min(3, len(figure.series)), frameon=False)
    return drawn


def _draw_surfaces(figure: SurfaceFigure) -> "Figure":
    # Contours: on paper, where nothing can be turned, heights are read off them better than off a surface.
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure

    low, high = _height_range(figure)
    levels = np.geomspace(low, high, NUM_LEVELS) if figure.log_height else np.linspace(low, high, NUM_LEVELS)
    norm = LogNorm(low, high) if figure.log_height else Normalize(low, high)
    num = len(figure.surfaces)
    drawn = Figure(figsize=(3.6 * num + 1.0, 3.9), layout="constrained")
    drawn.suptitle(_plain(figure.title))
    image: Any = None
    for number, surface in enumerate(figure.surfaces):
        axes = drawn.add_subplot(1, num, number + 1)
        heights = np.ma.masked_invalid(np.array(surface.height, dtype=float).T)
        image = axes.contourf(
            surface.coordinates, surface.coordinates, np.ma.clip(heights, low, high), levels=levels, norm=norm
        )
        axes.plot(0, 0, "+", color="white", markersize=9)
        axes.set(xlabel="direction 1", ylabel="direction 2", title=_plain(surface.name), aspect="equal")
    bar = drawn.colorbar(image, ax=drawn.axes, label=_plain(figure.height_label), shrink=0.85)
    bar.set_ticks(levels[::6].tolist(), labels=[f"{level:.3g}" for level in levels[::6]])
    bar.minorticks_off()
    return drawn


def _look(number: int) -> tuple[str, tuple[str, str], tuple[str, str]]:
    # Three ways to tell series apart, so that none has to be told by color alone.
    return (
        COLOURS[number % len(COLOURS)],
        SYMBOLS[number % len(SYMBOLS)],
        DASHES[number // len(COLOURS) % len(DASHES)],
    )


def _few_values(figure: LineFigure) -> list[float]:
    # A grid of few values over a logarithmic axis: their own values say more than powers of ten.
    values = sorted({float(x) for series in figure.series for x in series.x if math.isfinite(x) and x > 0})
    return values if figure.log_x and len(values) <= MOST_TICKS else []


def _height_range(figure: SurfaceFigure) -> tuple[float, float]:
    heights = np.concatenate([np.array(surface.height, dtype=float).ravel() for surface in figure.surfaces])
    heights = heights[np.isfinite(heights) & ((heights > 0) | (not figure.log_height))]
    if not heights.size:
        return (1.0, 10.0) if figure.log_height else (0.0, 1.0)
    low, high = float(heights.min()), float(heights.max())
    if high > low:
        return low, high
    return low, (10 * low if figure.log_height else low + 1.0)


def _nice_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) <= 4 else (1,)
    ticks = [float(f"{step}e{power}") for power in powers for step in steps if low <= float(f"{step}e{power}") <= high]
    return ticks if len(ticks) > 1 else [float(f"{tick:.2g}") for tick in np.geomspace(low, high, 4)]


def _finite(values: Sequence[float] | np.ndarray) -> list[float | None]:
    # JSON knows no NaN and no infinity; plotly.js leaves a gap where it finds null. Eight digits are more than a screen
    # shows, and half of what they would be.
    return [float(f"{value:.8g}") if math.isfinite(value) else None for value in values]


def _plain(text: str) -> str:
    # Between two dollar signs matplotlib would read mathematics.
    return text.replace("$", r"\$")
