"""The report: every number traced to its run, nothing hidden, nothing from outside taken for markup."""

import dataclasses
import html
import math
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from flatmin.lab.errors import RunError, StorageError
from flatmin.lab.report import describe_runs, write_report
from flatmin.lab.report.content import _forest_groups, relative_effect, report_content, run_anchors
from flatmin.lab.report.figures import INK, ForestFigure, _colors, draw, svg
from flatmin.lab.report.tables import NOTHING, caption, interval_text
from flatmin.lab.runs.directory import read_result
from flatmin.lab.runs.history import read_history, write_history
from flatmin.lab.runs.record import Records, RunRecord, all_records, read_record, without_paths
from flatmin.lab.studies.findings import (
    Cell,
    Comparison,
    Findings,
    Hyperparameter,
    LineFigure,
    Series,
    Surface,
    SurfaceFigure,
    Table,
    Verdict,
)
from flatmin.lab.studies.statistics import Interval, mean_and_interval
from report_cases import METHODS, SESSION, experiment, findings_with_runs, write_run

EVIL = """<script>alert(1)</script>"' onload=x &amp; $a$ |`*_[x](javascript:y)</td>"""


class Page(HTMLParser):
    """Ids, links, tables and texts of a page, without what is in scripts and styles.

    A cell is what a reader sees of it at first: what its <details> open to is in `opened`, by the cell's text.
    """

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.tags, self.attributes, self.tables, self.text = [], [], [], [], [], ""
        self.opened, self._hidden, self._silent, self._cell = "", False, False, False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.attributes.append(attrs)
        self._silent = tag in ("script", "style", "text", "dc:format")  # texts of figures are not the page's
        if "id" in attrs:
            self.ids.append(attrs["id"])
        if tag == "a":
            self.links.append(attrs["href"])
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self._cell, self._hidden = True, False
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        self._silent = False
        if tag in ("td", "th"):
            self._cell = False
        if tag == "summary" and self._cell:
            self._hidden = True

    def handle_data(self, data):
        if self._silent:
            return
        self.text += data
        if self._cell and self._hidden:
            self.opened += data + " "
        elif self._cell:
            cell = self.tables[-1][-1][-1]
            self.tables[-1][-1][-1] = f"{cell} {data.strip()}".strip()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report on invented findings."""
    runs, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("out")
    findings = findings_with_runs(runs)
    text = write_report(findings, known=Records(runs), out=out, title="T").read_text()
    return SimpleNamespace(
        runs=runs, findings=findings, out=out, text=text, page=Page(text), markdown=(out / "report.md").read_text()
    )


def page_of(findings, tmp_path, **settings):
    settings = {"known": Records(tmp_path / "runs"), "title": "T"} | settings
    return write_report(findings, out=tmp_path / "out", **settings).read_text()


def entries(findings):
    rows = [row for one in findings for table in one.tables for row in table.rows]
    return [entry for row in rows for entry in row if isinstance(entry, Cell | Comparison)]


def simple(**changes):
    facts = {"item": "x", "scale": "smoke", "title": "X", "source": "Table 9", "about_scale": "Small."}
    return Findings(**facts | changes)


def compared(mean=1.26, half_width=0.41, **changes):
    facts = {"name": "SAM - SGD", "difference": Interval(mean, half_width), "p_value": 0.03, "p_holm": 0.04}
    return Comparison(**facts | {"num_pairs": 2} | changes)


def lines(x, y, half_width=None, **changes):
    series = [Series(name="s", x=x, y=y, half_width=half_width)]
    return LineFigure(title="t", x_label="x", y_label="error, %", series=series, **changes)


def surfaces(axis, height):
    surface = Surface(name="s", coordinates=axis, height=height)
    return SurfaceFigure(title="t", height_label="h", surfaces=[surface])


def test_every_run_of_every_number_is_linked_to_its_row(report):
    page = report.page
    named = {run for entry in entries(report.findings) for run in entry.runs}
    assert len(named) == 40
    assert named <= {row[0].split()[0] for row in page.tables[-1][1:]}
    assert len(page.ids) == len(set(page.ids))
    assert {f"#run-{run}" for run in named} <= set(page.links) <= {f"#{one}" for one in page.ids}


def test_measured_numbers_are_those_of_the_run_files_and_stand_beside_the_claims(report):
    """A cell's mean is that of the test errors in the result files of the runs it names."""
    cells = [entry for entry in entries(report.findings) if isinstance(entry, Cell) and entry.measured]
    assert len(cells) == 2 * len(METHODS)
    for cell in cells:
        errors = [100 * read_result(report.runs / run).metrics["test_error"] for run in cell.runs]
        interval = interval_text(mean_and_interval(errors))
        assert f'<span class="mean">{interval}</span> <small class="fact">n = 5</small>' in report.text
        assert f"{interval} (n = 5" in report.markdown
        for run, error in zip(cell.runs, errors, strict=True):
            assert f'<li>{error:.2f} · <a href="#run-{run}">{run}</a></li>' in report.text
            assert f"{error:.2f} from {run}" in report.markdown
    table = report.page.tables[1]
    assert table[1] == ["paper", "measured", "measured", "paper", "measured", "measured"]
    assert table[2][:2] == ["SGD", "3.5 ± 0.1"]
    assert table[2][2].startswith("16.2 ± 0.2")
    assert "p < 0.001, Holm p < 0.001" in table[4][3]


@pytest.mark.parametrize(("p_holm", "is_bold"), [(0.04, True), (0.06, False)])
def test_both_p_values_of_a_comparison_are_shown_and_bold_is_for_holms(tmp_path, p_holm, is_bold):
    rows = [["x", compared(p_holm=p_holm, values=(0.85, 1.67))]]
    text = page_of([simple(tables=[Table(title="T", columns=["a", "b"], rows=rows)])], tmp_path)
    shown = f"p = 0.030, Holm p = {p_holm:.3f}"
    assert Page(text).tables[0][1][1] == f"+1.3 ± 0.4 SAM - SGD, 2 pairs {shown}"
    assert (f"<strong>{shown}</strong>" in text) == is_bold
    assert 'title="0.85, 1.67 points"' in text
    assert f"+1.3 ± 0.4 (SAM - SGD, 2 pairs; {shown})" in (tmp_path / "out" / "report.md").read_text()


def test_missing_runs_and_failed_runs_are_said(report):
    """Three are missing by the study's own count; of the two that are named one is not finished and one diverged."""
    for text in (report.page.text, report.markdown):
        assert "this report is incomplete" in text
        assert "3 runs of this item are missing. 1 run failed" in text
    rows = report.page.tables[-1]
    diverged = next(row for row in rows if "failed" in row[0])
    assert diverged[3].startswith("The loss is not finite in epoch 3 <b>")
    assert sum("not finished" in row[0] for row in rows) == 1
    assert "failed: The loss is not finite in epoch 3" in report.markdown


def test_runs_that_are_named_and_not_there_count_as_missing_and_a_complete_report_raises_no_alarm(tmp_path):
    cell = Cell(measured=Interval(3.0, 0.1), values=(2.9, 3.1), runs=("gone-seed0", "gone-seed1"))
    text = page_of([simple(tables=[Table(title="T", columns=["a", "b"], rows=[["x", cell]])])], tmp_path)
    assert "2 runs of this item are missing." in text
    assert text.count(">missing<") == 4
    text = page_of([simple(runs=[write_run(tmp_path / "runs", experiment(), 0, 16.0)])], tmp_path)
    assert 'class="alarm"' not in text
    assert "<svg" not in text  # without figures there is nothing to draw
    assert run_anchors(["a b", "a_b", "a b"]) == {"a b": "run-a_b", "a_b": "run-a_b-2"}


def test_the_same_input_gives_the_same_bytes(report, tmp_path):
    write_report(report.findings, known=Records(report.runs), out=tmp_path, title="T")
    first, second = ({p.relative_to(o): p.read_bytes() for p in o.rglob("*.*")} for o in (report.out, tmp_path))
    assert first == second
    assert len(first) == 7


def test_markdown_holds_the_numbers_of_the_page(report):
    """Row by row, the tables of Markdown have the same numbers in the same order as those of the page."""
    page, markdown = report.page, report.markdown
    grids = [
        [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        for block in re.findall(r"(?:^\|.*\|\n)+", markdown, flags=re.MULTILINE)
    ]
    assert len(grids) == len(page.tables) == 6  # the overview, the table, two figures' numbers, hyperparameters, runs

    def numbers(cells):
        return re.findall(r"\d+(?:\.\d+)?", " ".join(cells))

    for shown, grid in zip(page.tables, grids, strict=True):
        rows = [row for row in shown[1:] if "measured" not in row[1:2]]
        for row, line in zip(rows, grid[2:], strict=True):
            failed = "failed" in row[0] or "not finished" in row[0]  # the page has the reason in place of errors
            width = 3 if failed else len(row) if shown is page.tables[-1] else None
            assert numbers(row[:width]) == numbers(line[:width]), row
    files = re.findall(r"!\[.*?\]\((.*?)\)", markdown)
    assert len(files) == 5
    assert all((report.out / file).read_text().startswith("<?xml") for file in files)


def evil_findings():
    cell = Cell(claimed=EVIL, measured=Interval(1.0, 0.1), unit=EVIL, values=(1.0,), runs=(f"{EVIL}-seed0",), note=EVIL)
    comparison = compared(name=EVIL, quantity=EVIL, baseline=2.0, unit=EVIL, runs=("../x",))
    series = [Series(name=EVIL, x=[0], y=[1], hover=[EVIL]), Series(name=EVIL, x=[0], y=[1])]
    surface = Surface(name=EVIL, coordinates=[0, 1], height=[[0, 1], [1, 2]])
    return Findings(
        **dict.fromkeys(("item", "scale", "title", "source", "about_scale"), EVIL),
        tables=[Table(title=EVIL, columns=[EVIL, EVIL, EVIL], rows=[[EVIL, cell, comparison]], note=EVIL)],
        figures=[
            LineFigure(title=EVIL, x_label=EVIL, y_label=EVIL, series=series, note=EVIL, runs=[EVIL]),
            SurfaceFigure(title=EVIL, height_label=EVIL, surfaces=[surface]),
        ],
        verdicts=[Verdict(claim=EVIL, status="reproduced", evidence=EVIL, comparisons=[comparison, comparison])],
        hyperparameters=[Hyperparameter(name=EVIL, value=EVIL, source="ours", note=EVIL)],
        notes=[EVIL],
        cut=[EVIL],
        runs=[EVIL],
    )


def test_nothing_from_outside_is_taken_for_markup(tmp_path):
    """The page of a finding full of markup has the same elements as that of the same finding in plain words."""
    text = page_of([evil_findings()], tmp_path, title=EVIL)
    assert "<script>alert" not in text
    page = Page(text)
    assert page.tags.count("script") == 0
    assert not any("onload" in attributes for attributes in page.attributes)
    assert all(link.startswith(("#run-", "#item-1-")) for link in page.links)
    assert page.text.count(EVIL) > 20
    markdown = re.sub("</?details>|</?summary>", "", (tmp_path / "out" / "report.md").read_text())
    bare = re.sub(r"\\.", "", markdown)  # without what is escaped
    assert not re.search(r"[<`]|\]\(javascript", bare)
    for block in re.findall(r"(?:^\|.*\|\n)+", bare, flags=re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1


def test_a_page_loads_nothing_and_names_no_folder_of_this_machine(report):
    for attributes in report.page.attributes:
        assert all(re.match(r"data:|#", attributes.get(name, "#")) for name in ("src", "href"))
    for content in (re.sub(r' xmlns(:xlink)?="[^"]*"', "", report.text), report.markdown):
        assert "somebody" not in content
        assert str(report.runs) not in content
        assert "http" not in re.sub(r"http-equiv", "", content)
    assert "default-src 'none'" in html.unescape(report.text)


def test_versions_hardware_specs_and_what_was_cut_are_shown(report):
    page = report.page
    row = next(row for row in page.tables[-1][1:] if "finished" not in row[0])
    assert row[6:] == ["1 min 33 s", "Example CPU 9000", "2 / 1", "bfloat16", "torch 2.13.0", "0123456789+"]
    for text in (SESSION["commit"], "numpy 2.4.6", '"train_size": 2000'):
        assert text in page.opened
    assert report.findings[0].cut[0] in page.text
    assert "CIFAR-100 \\<all of it\\>" in report.markdown


def test_every_table_has_a_caption_and_headers_with_a_scope(report):
    page = report.page
    assert page.tags.count("caption") == page.tags.count("table") == 6
    elements = list(zip(page.tags, page.attributes, strict=True))
    assert all(a.get("scope") in ("col", "row", "colgroup") for tag, a in elements if tag == "th")
    images = [a for tag, a in elements if tag == "svg"]
    assert len(images) == 5
    assert all(image["role"] == "img" and image["aria-label"] for image in images)
    labels = [a["aria-labelledby"] for a in page.attributes if "aria-labelledby" in a]
    assert len(labels) == 6  # answer, overview, two items, runs, how to read
    assert set(labels) <= set(page.ids)


def test_a_page_is_replaced_as_a_whole(tmp_path, monkeypatch):
    before = page_of([simple()], tmp_path)

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="disk full"):
        patch.setattr("os.fsync", fail)
        page_of([simple(title="another")], tmp_path)
    assert (tmp_path / "out" / "index.html").read_text() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Choose another directory with --out"):
        page_of([simple()], tmp_path / "file")


def test_files_that_cannot_be_read_are_said_and_stop_nothing(tmp_path):
    name = write_run(tmp_path, experiment(), 0, 16.0)
    (tmp_path / name / "result.json").write_text('{"seed": 0, "hist')
    record = read_record(name, tmp_path)
    assert record.state == "not readable"
    assert record.reason.startswith("…/result.json is corrupt")
    assert str(tmp_path) not in record.reason
    assert [read_record(name, tmp_path).state for name in ("../elsewhere", "..")] == ["missing"] * 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ada/weights.pt", "…/weights.pt"),
        ("folder:/data/birds/small", "folder:…/small"),
        (r"C:\Users\ada\weights.pt", "…/weights.pt"),
        ("'/a/b/c.json' is gone; see /d/e.", "'…/c.json' is gone; see …/e."),
        ("timm/resnet18, 3/4, https://example.org/a/b", "timm/resnet18, 3/4, https://example.org/a/b"),
    ],
)
def test_absolute_paths_are_cut_to_their_last_name(text, shown):
    assert without_paths({"a": [text]}) == {"a": [shown]}


@pytest.mark.parametrize(
    ("mean", "half_width", "unit", "shown"),
    [
        (14.7183, 0.3421, "%", "14.7 ± 0.3"),
        (14.7183, 0.1421, "%", "14.72 ± 0.14"),
        (14.7183, 0.0342, "%", "14.72 ± 0.03"),
        (14.7183, 3.2, "%", "14.7 ± 3.2"),
        (-1.26, 0.41, "%", "\N{MINUS SIGN}1.3 ± 0.4"),
        (-0.01, 0.4, "%", "0.0 ± 0.4"),
        (14.7183, math.nan, "%", "14.72"),
        (14.7183, 0.0, "%", "14.72 ± 0.00"),
        (14.7183, 3e-15, "%", "14.72 ± 0.00"),
        (1234.5, 210.0, "", "1200 ± 200"),
        (0.00012345, 0.0000321, "", "0.00012 ± 0.00003"),
        (1.25e-9, 3.2e-10, "", "1.25e\N{MINUS SIGN}09 ± 3e\N{MINUS SIGN}10"),
        (math.nan, math.nan, "%", "\N{EN DASH}"),
    ],
)
def test_numbers_are_rounded_to_what_their_intervals_allow(mean, half_width, unit, shown):
    assert interval_text(Interval(mean, half_width), unit) == shown


@pytest.mark.parametrize(
    ("units", "shown"),
    [
        (("%", None), "t (measured in %)"),
        ((None, "%"), "t (differences in points)"),
        (("%", "%"), "t (measured in %, differences in points)"),
        (("s", "s"), "t (measured in s, differences in s)"),
        (("", ""), "t"),
        (("%", "s"), "t"),  # each number says its own
    ],
)
def test_a_caption_says_the_unit_that_all_numbers_have(units, shown):
    of_cell, of_comparison = units
    row = [] if of_cell is None else [Cell(measured=Interval(1.0, 0.1), unit=of_cell)]
    row += [] if of_comparison is None else [compared(unit=of_comparison)]
    assert caption(Table(title="t", columns=("x",) * len(row), rows=[row])) == shown


def test_a_logarithmic_axis_within_a_decade_has_several_labels():
    drawn = draw(lines([0.0, 1.0], [0.9, 6.0], log_y=True))
    drawn.draw_without_rendering()
    labels = [label.get_text() for label in drawn.axes[0].get_yticklabels()]
    assert {"2", "5"} <= set(labels)


def test_numbers_that_are_not_finite_leave_gaps_in_figures():
    line = lines([0.0, 1.0, 2.0], [1.0, math.nan, math.inf], [2.0, math.nan, 1.0], log_x=True, log_y=True)
    for figure in (line, surfaces([-1.0, 1.0], [[1.0, math.nan], [0.0, 100.0]])):
        assert svg(figure).startswith("<?xml")
    heights = draw(line).axes[0].lines[0].get_ydata()
    assert not np.isfinite(heights).any()  # x = 0 has no place on a logarithmic axis, and the others are not finite
    assert "nan" not in svg(line)


def test_error_bars_are_half_the_width_of_the_interval_and_one_replica_has_none(tmp_path):
    figure = lines([1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [0.5, 2.0, math.nan])
    _, _, (bars,) = draw(figure).axes[0].containers[0]
    assert [bar[:, 1].tolist() for bar in bars.get_segments()] == [[9.5, 10.5], [18.0, 22.0], [30.0, 30.0]]
    text = page_of([simple(figures=[figure])], tmp_path)
    assert [row[2] for row in Page(text).tables[0][1:]] == ["10.0 ± 0.5", "20.0 ± 2.0", "30.00"]


def test_the_first_direction_of_a_surface_runs_to_the_right_on_paper():
    """A height that does not change along the second direction has contours that run from below to above."""
    axis = [-1.0, 0.0, 1.0]
    drawn = draw(surfaces(axis, [[2.0 + a] * 3 for a in axis]))
    bands = [path.get_extents() for path in drawn.axes[0].collections[0].get_paths() if len(path.vertices)]
    assert bands
    assert all(band.height == pytest.approx(2.0) and band.width < 1 for band in bands)


def test_surfaces_share_one_scale(report):
    first, second, _ = draw(report.findings[1].figures[0]).axes
    assert first.collections[0].get_clim() == second.collections[0].get_clim() == pytest.approx((0.05, 9.05))


def test_overview_has_every_claim_with_effect_interval_n_p_and_cost(report):
    """The cost of the first claim is that of its ten runs, 93.4 s each; the third is not tested, and cost nothing."""
    table = report.page.tables[0]
    assert table[0] == ["", "claim", "verdict", "effect (95 % interval)", "n", "p (Holm)", "cost"]
    (sam,) = report.findings[0].verdicts[0].comparisons
    percent = f"\N{MINUS SIGN}{abs(100 * sam.difference.mean / sam.baseline):.0f} %"
    effect = f"{interval_text(sam.difference)} points {percent}"
    claim = "SAM has lower test error than SGD. table1"
    assert table[1] == ["1", claim, "✓ reproduced", effect, "5", "p < 0.001", "15 min 34 s"]
    third = "SAM needs no more than one ascent step. table1"
    assert table[3] == ["3", third, f"{NOTHING} not tested", *[NOTHING] * 4]
    effect = "\N{MINUS SIGN}0.5 ± 0.2 points \N{MINUS SIGN}3 % test error"
    assert table[4][-4:] == [effect, "5", "p = 0.010", "7 min 47 s"]
    assert table[5] == ["\N{MINUS SIGN}0.50 points \N{MINUS SIGN}3 % top-5 error", "1", "no test"]
    assert [row[0] for row in table[1:]] == ["1", "2", "3", "4", table[5][0], "5"]
    assert "(figures/overview.svg)" in report.markdown
    assert "± 0.0 " not in report.page.text + report.markdown  # one replica has no interval, not one of width 0


def test_forest_plot_shows_relative_effects_with_their_intervals():
    comparison = compared(-2.0, 1.0, baseline=20.0)
    effect = relative_effect(comparison)
    assert effect == Interval(-10.0, 5.0)
    assert [relative_effect(dataclasses.replace(comparison, baseline=b)) for b in (0.0, math.nan)] == [None, None]
    rows = [("lower", "reproduced", effect), ("one pair", "not tested", Interval(4.0, math.nan))]
    axes = draw(ForestFigure("t", [("", rows)])).axes[0]
    spans = [bars.get_segments()[0][:, 0].tolist() for _, _, (bars,) in axes.containers[:2]]
    assert spans == [[-15.0, -5.0], [4.0, 4.0]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["lower", "one pair"]
    assert axes.yaxis_inverted()  # in the order of the table
    low, high = axes.get_xlim()
    assert low < -15
    assert high > 4


def test_forest_plot_ends_at_its_limit_with_the_number_of_what_is_beyond():
    rows = [("near", "reproduced", Interval(-4.0, 1.0)), ("far", "not reproduced", Interval(105.0, 2.0))]
    axes = draw(ForestFigure("t", [("", rows)], limit=25.0)).axes[0]
    assert axes.get_xlim()[1] == 25
    assert [text.get_text() for text in axes.texts] == ["+105 %"]
    assert len(axes.containers) == 1


def test_first_screen_of_several_items_has_one_effect_in_each_condition():
    """Every claim is in the overview then; the page of one item has all of its claims on the first screen."""
    better = Verdict(
        claim="basic: SAM has a lower test error than SGD.",
        status="reproduced",
        evidence="",
        comparisons=[compared(-2.0, 1.0, baseline=20.0, runs=("sgd", "sam"))],
    )
    found = [simple(item=item, verdicts=[better]) for item in ("table1", "table2")]
    records = {name: RunRecord(name=name, state="finished", history=[{}]) for name in ("sgd", "sam")}
    content = report_content(found, records, "Two tables")
    first, every = content["answer"]["forest"], content["overview"]["forest"]
    assert [first["picture"]["file"], every["picture"]["file"]] == ["figures/answer.svg", "figures/overview.svg"]
    one = report_content(found[:1], records, "One table")
    assert one["answer"]["forest"]["picture"]["file"] == "figures/overview.svg"
    assert one["overview"]["forest"] is None


def test_forest_plot_has_each_item_and_each_shared_condition_once():
    def verdict(claim, quantity="test error"):
        comparison = dataclasses.replace(compared(-2.0, 1.0, baseline=20.0), name="SAM - SGD", quantity=quantity)
        return Verdict(claim=claim, status="reproduced", evidence="", comparisons=[comparison])

    table = [verdict("basic: SAM is better."), verdict("none: SAM wins."), verdict("basic: SAM is surer.", "test loss")]
    other = [verdict("No colon.", "validation error")]
    found = [simple(item="table1", source="Figure 1 (middle, right), Section 1", verdicts=table)]
    found += [simple(item="other", source="", verdicts=other)]
    rows = [(one, verdict) for one in found for verdict in one.verdicts]
    groups = [(heading, [label for label, *_ in group]) for heading, group in _forest_groups(rows, several_items=True)]
    assert groups == [
        ("Figure 1 (middle, right): basic", ["1. SAM vs. SGD", "3. SAM vs. SGD (test loss)"]),
        ("Figure 1 (middle, right): none", ["2. SAM vs. SGD"]),
        ("other", ["4. SAM vs. SGD (validation error)"]),
    ]
    assert [heading for heading, _ in _forest_groups(rows[0:3:2], several_items=False)] == ["basic"]
    (alone,) = _forest_groups(rows[1:3], several_items=False)
    assert (alone[0], [label for label, *_ in alone[1]]) == (
        "",
        ["1. none: SAM vs. SGD", "2. basic: SAM vs. SGD (test loss)"],
    )
    drawn = draw(ForestFigure("t", _forest_groups(rows, several_items=True))).axes[0]
    weights = {label.get_text(): label.get_fontweight() for label in drawn.get_yticklabels()}
    assert [text for text, weight in weights.items() if weight == "bold"] == [heading for heading, _ in groups]


def test_an_effect_off_the_axis_is_an_arrow_with_its_number():
    rows = [("near", "reproduced", Interval(-5.0, 1.0)), ("far", "not reproduced", Interval(191.0, 60.0))]
    (axes,) = draw(ForestFigure("effects", [("", rows)])).axes
    assert [text.get_text() for text in axes.texts] == ["+191 %"]
    assert axes.get_xlim()[1] == 100


def test_figures_have_the_color_of_the_text_on_the_page_and_a_white_background_as_files(report):
    assert "currentColor" in report.text
    assert INK not in report.text.partition("</style>")[2]
    for file in (report.out / "figures").iterdir():
        assert '<rect width="100%" height="100%" fill="#fff"/>' in file.read_text()


def test_folded_tables_open_when_clicked_and_empty_findings_make_a_page(tmp_path):
    tables = [Table(title=f"T {folded}", columns=["a"], rows=[["x"]], folded=folded) for folded in (False, True)]
    text = page_of([simple(tables=tables)], tmp_path)
    assert "<summary>T True</summary>" in text
    assert "<summary>T False</summary>" not in text
    assert len(Page(text).tables) == 2
    assert "<h2" in page_of([simple(tables=[Table(title="T", columns=["a"], rows=[])])], tmp_path)
    assert "<h1>" in page_of([], tmp_path)


def test_any_folder_of_runs_can_be_described(tmp_path):
    """Three experiments: one with a name, one with two seeds of which one diverged, one that is not finished."""
    named, plain = experiment("SAM", name="sam <one>"), experiment("SGD")
    for seed, error in enumerate((14.0, 15.0, 16.0)):
        write_run(tmp_path, named, seed, error)
    write_run(tmp_path, plain, 0, 17.0)
    write_run(tmp_path, plain, 1, 0.0, failure="diverged")
    write_run(tmp_path, experiment("SGD, twice the epochs"), 0, 0.0, finished=False)
    (tmp_path / "not a run").mkdir()
    known = all_records(tmp_path)
    found = describe_runs(known)
    assert found.num_missing == 1
    assert len(found.runs) == 6
    (table,) = found.tables
    assert table.columns == ["experiment", "rho", "epochs", "train error", "validation error", "test error"]
    sgd, slow, sam = (row[-1] for row in table.rows)
    fashion = "fashion-mnist, wrn-10-2"
    assert [row[:3] for row in table.rows] == [[fashion, "0", "40"], [fashion, "0", "80"], ["sam <one>", "0.2", "40"]]
    assert sam.values == pytest.approx((14.0, 15.0, 16.0))
    assert sam.measured.mean == pytest.approx(15.0)
    assert sam.runs == tuple(named.run_name(seed) for seed in range(3))
    assert (sgd.note, sgd.runs) == ("1 of 2 failed", (plain.run_name(0),))
    assert math.isnan(sgd.measured.half_width)
    assert slow.measured is None
    (figure,) = found.figures
    assert [series.half_width is None for series in figure.series] == [True, False]
    assert list(figure.series[0].x) == [1, 2, 3, 4]
    assert [series.y[-1] for series in figure.series] == pytest.approx([17.0, 15.0])
    assert "Runs are missing" in page_of([found], tmp_path, known=known)


def test_a_curve_has_the_epochs_that_all_of_its_runs_have(tmp_path):
    """The mean of some of the runs at one epoch, and of all at the next, would jump without any reason."""
    names = [write_run(tmp_path, experiment(), seed, 16.0 + seed) for seed in (0, 1)]
    history = read_history(tmp_path / names[1])
    history[1]["test_error"] = None
    write_history(tmp_path / names[1], history)
    (figure,) = describe_runs(all_records(tmp_path)).figures
    (series,) = figure.series
    assert list(series.x) == [1, 3, 4]
    assert series.y[-1] == pytest.approx(16.5)


def test_a_folder_without_runs_says_so(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunError, match="no runs in"):
            all_records(folder)


def test_a_method_has_the_same_color_in_all_figures_and_no_other_line_has_it():
    one, other = _colors(["m = 4", "SAM", "SGD"]), _colors(["SGD", "SAM on 1/8", "SAM"])
    assert (one[1], one[2]) == (other[2], other[0])
    assert len(set(one)) == len(set(other)) == 3
