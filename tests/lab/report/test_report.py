"""The report: every number traced to its run, nothing hidden, nothing from outside taken for markup."""

import dataclasses
import html
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from flatmin.lab.errors import RunError, StorageError
from flatmin.lab.report import describe_runs, write_report
from flatmin.lab.report.content import relative_effect, run_anchors
from flatmin.lab.report.figures import INK, ForestFigure, draw, svg
from flatmin.lab.report.numbers import NOTHING, interval_text, number_text
from flatmin.lab.report.runs import read_run, without_paths
from flatmin.lab.report.tables import caption
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
from report_cases import METHODS, SESSION, experiment, findings_with_runs, named_experiment, write_run

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
        self._silent = tag in (
            "script",
            "style",
            "text",
            "dc:format",
        )  # texts inside of figures are no text of the page
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
    """A report on invented findings: where its runs are, what was found, where it is."""
    runs, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("out")
    findings = findings_with_runs(runs)
    write_report(findings, runs=runs, out=out)
    return runs, findings, out


def page_of(findings, tmp_path):
    return write_report(findings, runs=tmp_path / "runs", out=tmp_path / "out").read_text()


def entries(findings):
    return [
        entry
        for one in findings
        for table in one.tables
        for row in table.rows
        for entry in row
        if isinstance(entry, Cell | Comparison)
    ]


def simple(**changes):
    facts = {"item": "x", "scale": "smoke", "title": "X", "source": "Table 9", "about_scale": "Small."}
    return Findings(**facts | changes)


def test_every_run_of_every_number_is_linked_to_its_row(report):
    _, findings, out = report
    page = Page((out / "index.html").read_text())
    named = {run for entry in entries(findings) for run in entry.runs}
    assert len(named) == 40
    rows = {row[0].split()[0] for row in page.tables[-1][1:]}
    assert named <= rows
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    for run in named:
        assert f"#run-{run}" in page.links


def test_measured_numbers_are_those_of_the_run_files(report):
    """A cell's mean is that of the test errors in the result files of the runs it names."""
    runs, findings, out = report
    text = (out / "index.html").read_text()
    cells = [entry for entry in entries(findings) if isinstance(entry, Cell) and entry.measured]
    assert len(cells) == 2 * len(METHODS)
    for cell in cells:
        results = [json.loads((runs / run / "result.json").read_text()) for run in cell.runs]
        errors = [100 * result["metrics"]["test_error"] for result in results]
        interval = mean_and_interval(errors)
        assert f'<span class="mean">{interval_text(interval)}</span> <small class="fact">n = 5</small>' in text
        for run, error in zip(cell.runs, errors, strict=True):
            assert f'<li>{error:.2f} · <a href="#run-{run}">{run}</a></li>' in text


def test_claims_stand_beside_what_was_measured(report):
    _, _, out = report
    page = Page((out / "index.html").read_text())
    table = page.tables[1]
    assert table[1] == ["paper", "measured", "measured", "paper", "measured", "measured"]
    sgd = table[2]
    assert sgd[0] == "SGD"
    assert sgd[1] == "3.5 ± 0.1"
    assert sgd[2].startswith("16.2 ± 0.2")
    assert "p < 0.001, Holm p < 0.001" in table[4][3]


@pytest.mark.parametrize(("p_holm", "is_bold"), [(0.04, True), (0.06, False)])
def test_both_p_values_of_a_comparison_are_shown_and_bold_is_for_holms(tmp_path, p_holm, is_bold):
    comparison = Comparison(
        name="SAM - SGD",
        difference=Interval(1.26, 0.41),
        p_value=0.03,
        p_holm=p_holm,
        num_pairs=2,
        values=(0.85, 1.67),
    )
    text = page_of([simple(tables=[Table(title="T", columns=["a", "b"], rows=[["x", comparison]])])], tmp_path)
    shown = f"p = 0.030, Holm p = {p_holm:.3f}"
    assert Page(text).tables[0][1][1] == f"+1.3 ± 0.4 SAM - SGD, 2 pairs {shown}"
    assert (f"<strong>{shown}</strong>" in text) == is_bold
    assert 'title="0.85, 1.67 points"' in text
    assert f"+1.3 ± 0.4 (SAM - SGD, 2 pairs; {shown})" in (tmp_path / "out" / "report.md").read_text()


def test_missing_runs_and_runs_that_came_to_nothing_are_said(report):
    """Three are missing by the study's own count; of the two that are named one is not finished and one diverged."""
    _, _, out = report
    page, markdown = Page((out / "index.html").read_text()), (out / "report.md").read_text()
    assert "this report is incomplete" in page.text
    assert "this report is incomplete" in markdown
    assert "3 runs of this item are missing. 1 run failed" in page.text
    rows = page.tables[-1]
    diverged = next(row for row in rows if "failed" in row[0])
    assert diverged[3].startswith("The loss is not finite in epoch 3 <b>")
    assert sum("not finished" in row[0] for row in rows) == 1
    assert "failed: The loss is not finite in epoch 3" in markdown


def test_a_run_that_is_named_and_not_there_counts_as_missing(tmp_path):
    cell = Cell(measured=Interval(3.0, 0.1), values=(2.9, 3.1), runs=("gone-seed0", "gone-seed1"))
    text = page_of([simple(tables=[Table(title="T", columns=["a", "b"], rows=[["x", cell]])])], tmp_path)
    assert "2 runs of this item are missing." in text
    assert text.count(">missing<") == 4


def test_a_complete_report_raises_no_alarm(tmp_path):
    name = write_run(tmp_path / "runs", experiment(), 0, 16.0)
    text = page_of([simple(runs=[name])], tmp_path)
    assert 'class="alarm"' not in text
    assert "<svg" not in text  # without figures there is nothing to draw


def test_the_same_input_gives_the_same_bytes(report, tmp_path):
    runs, findings, out = report
    write_report(findings, runs=runs, out=tmp_path)
    files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) == 7
    for file in files:
        assert (out / file).read_bytes() == (tmp_path / file).read_bytes(), file


def test_markdown_holds_the_numbers_of_the_page(report):
    """Row by row, the tables of Markdown have the same numbers in the same order as those of the page."""
    _, findings, out = report
    page, markdown = Page((out / "index.html").read_text()), (out / "report.md").read_text()
    grids = [
        [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        for block in re.findall(r"(?:^\|.*\|\n)+", markdown, flags=re.MULTILINE)
    ]
    assert len(grids) == len(page.tables) == 6  # the overview, the table, two figures' numbers, hyperparameters, runs

    def numbers(cells):
        return re.findall(r"\d+(?:\.\d+)?", " ".join(cells))

    for shown, grid in zip(page.tables, grids, strict=True):
        rows = [row for row in shown[1:] if "measured" not in row[1:2]]
        lines = grid[2:]
        for row, line in zip(rows, lines, strict=True):
            failed = "failed" in row[0] or "not finished" in row[0]  # the page has the reason in place of errors
            width = 3 if failed else len(row) if shown is page.tables[-1] else None
            assert numbers(row[:width]) == numbers(line[:width]), row
    for entry in entries(findings):
        if isinstance(entry, Cell) and entry.measured:
            assert f"{interval_text(entry.measured)} (n = 5" in markdown
            for value, run in zip(entry.values, entry.runs, strict=True):
                assert f"{number_text(value)} from {run}" in markdown
    files = re.findall(r"!\[.*?\]\((.*?)\)", markdown)
    assert len(files) == 5
    assert all((out / file).read_text().startswith("<?xml") for file in files)


def evil_findings():
    cell = Cell(claimed=EVIL, measured=Interval(1.0, 0.1), unit=EVIL, values=(1.0,), runs=(f"{EVIL}-seed0",), note=EVIL)
    comparison = Comparison(
        name=EVIL,
        quantity=EVIL,
        difference=Interval(1.0, 0.1),
        baseline=2.0,
        p_value=0.5,
        p_holm=0.5,
        num_pairs=2,
        unit=EVIL,
        runs=("../x",),
    )
    line = LineFigure(
        title=EVIL,
        x_label=EVIL,
        y_label=EVIL,
        series=[Series(name=EVIL, x=[0], y=[1], hover=[EVIL]), Series(name=EVIL, x=[0], y=[1])],
        note=EVIL,
        runs=[EVIL],
    )
    surface = SurfaceFigure(
        title=EVIL, height_label=EVIL, surfaces=[Surface(name=EVIL, coordinates=[0, 1], height=[[0, 1], [1, 2]])]
    )
    return Findings(
        item=EVIL,
        scale=EVIL,
        title=EVIL,
        source=EVIL,
        about_scale=EVIL,
        tables=[Table(title=EVIL, columns=[EVIL, EVIL, EVIL], rows=[[EVIL, cell, comparison]], note=EVIL)],
        figures=[line, surface],
        verdicts=[Verdict(claim=EVIL, status="reproduced", evidence=EVIL, comparisons=[comparison, comparison])],
        hyperparameters=[Hyperparameter(name=EVIL, value=EVIL, source="ours", note=EVIL)],
        notes=[EVIL],
        cut=[EVIL],
        runs=[EVIL],
    )


def test_nothing_from_outside_is_taken_for_markup(tmp_path):
    """The page of a finding full of markup has the same elements as that of the same finding in plain words."""
    evil = evil_findings()
    out = write_report([evil], runs=tmp_path, out=tmp_path / "out", title=EVIL)
    text = out.read_text()
    assert "<script>alert" not in text
    page = Page(text)
    assert page.tags.count("script") == 0
    assert not any("onload" in attributes for attributes in page.attributes)
    assert all(link.startswith(("#run-", "#item-1-")) for link in page.links)
    assert page.text.count(EVIL) > 20
    markdown = (tmp_path / "out" / "report.md").read_text()
    for ours in ("<details><summary>", "</summary>", "</details>"):
        markdown = markdown.replace(ours, "")
    bare = re.sub(r"\\.", "", markdown)  # without what is escaped
    assert not re.search(r"[<`]|\]\(javascript", bare)
    for block in re.findall(r"(?:^\|.*\|\n)+", bare, flags=re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1


def test_a_page_loads_nothing_and_names_no_folder_of_this_machine(report):
    runs, _, out = report
    text = (out / "index.html").read_text()
    page = Page(text)
    for attributes in page.attributes:
        for name in ("src", "href"):
            assert re.match(r"data:|#", attributes.get(name, "#"))
    for content in (re.sub(r' xmlns(:xlink)?="[^"]*"', "", text), (out / "report.md").read_text()):
        assert "somebody" not in content
        assert str(runs) not in content
        assert "http" not in re.sub(r"http-equiv", "", content)
    assert "default-src 'none'" in html.unescape(text)


def test_versions_hardware_and_specs_are_shown(report):
    _, _, out = report
    page = Page((out / "index.html").read_text())
    row = next(row for row in page.tables[-1][1:] if "finished" not in row[0])
    assert row[7:] == ["Example CPU 9000", "2 / 1", "bfloat16", "torch 2.13.0", "0123456789+"]
    assert SESSION["commit"] in page.opened
    assert "numpy 2.4.6" in page.opened
    assert '"train_size": 2000' in page.opened
    assert row[6] == "1 min 33 s"


def test_every_table_has_a_caption_and_headers_with_a_scope(report):
    _, _, out = report
    page = Page((out / "index.html").read_text())
    assert page.tags.count("caption") == page.tags.count("table") == 6
    headers = [a for tag, a in zip(page.tags, page.attributes, strict=True) if tag == "th"]
    assert all(header.get("scope") in ("col", "row", "colgroup") for header in headers)
    images = [a for tag, a in zip(page.tags, page.attributes, strict=True) if tag == "svg"]
    assert len(images) == 5
    assert all(image["role"] == "img" and image["aria-label"] for image in images)
    labels = [a["aria-labelledby"] for a in page.attributes if "aria-labelledby" in a]
    assert len(labels) == 5  # overview, two items, runs, how to read
    assert set(labels) <= set(page.ids)


def test_a_page_is_replaced_as_a_whole(tmp_path, monkeypatch):
    """What could not be written leaves the old page."""
    page = write_report([simple()], runs=tmp_path, out=tmp_path / "out")
    before = page.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("flatmin.lab.runs.directory.os.fsync", fail)
    with pytest.raises(StorageError, match="disk full"):
        write_report([simple(title="another")], runs=tmp_path, out=tmp_path / "out")
    assert page.read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Choose another directory with --out"):
        write_report([simple()], runs=tmp_path, out=tmp_path / "file" / "out")


def test_files_that_cannot_be_read_are_said_and_stop_nothing(tmp_path):
    name = write_run(tmp_path, experiment(), 0, 16.0)
    (tmp_path / name / "result.json").write_text('{"seed": 0, "hist')
    record = read_run(name, tmp_path)
    assert record.state == "not readable"
    assert record.reason.startswith("…/result.json is corrupt")
    assert str(tmp_path) not in record.reason
    assert read_run("../elsewhere", tmp_path).state == "missing"
    assert read_run("..", tmp_path).state == "missing"


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
    row = []
    if of_cell is not None:
        row.append(Cell(measured=Interval(1.0, 0.1), unit=of_cell))
    if of_comparison is not None:
        difference = Interval(1.0, 0.1)
        row.append(
            Comparison(name="c", difference=difference, p_value=0.5, p_holm=0.5, num_pairs=2, unit=of_comparison)
        )
    assert caption(Table(title="t", columns=("x",) * len(row), rows=[row])) == shown


def test_numbers_that_are_not_finite_leave_gaps_in_figures():
    line = LineFigure(
        title="t",
        x_label="x",
        y_label="y",
        log_x=True,
        log_y=True,
        series=[Series(name="s", x=[0.0, 1.0, 2.0], y=[1.0, math.nan, math.inf], half_width=[2.0, math.nan, 1.0])],
    )
    surface = SurfaceFigure(
        title="t",
        height_label="h",
        surfaces=[Surface(name="s", coordinates=[-1.0, 1.0], height=[[1.0, math.nan], [0.0, 100.0]])],
    )
    for figure in (line, surface):
        assert svg(figure).startswith("<?xml")
    heights = draw(line).axes[0].lines[0].get_ydata()
    assert not np.isfinite(heights).any()  # x = 0 has no place on a logarithmic axis, and the others are not finite
    assert "nan" not in svg(line)


def test_error_bars_are_half_the_width_of_the_interval_and_one_replica_has_none(tmp_path):
    figure = LineFigure(
        title="t",
        x_label="x",
        y_label="error, %",
        series=[Series(name="s", x=[1.0, 2.0, 3.0], y=[10.0, 20.0, 30.0], half_width=[0.5, 2.0, math.nan])],
    )
    _, _, (bars,) = draw(figure).axes[0].containers[0]
    assert [bar[:, 1].tolist() for bar in bars.get_segments()] == [[9.5, 10.5], [18.0, 22.0], [30.0, 30.0]]
    text = page_of([simple(figures=[figure])], tmp_path)
    assert [row[2] for row in Page(text).tables[0][1:]] == ["10.0 ± 0.5", "20.0 ± 2.0", "30.00"]


def test_the_first_direction_of_a_surface_runs_to_the_right_on_paper():
    """A height that does not change along the second direction has contours that run from below to above."""
    axis = [-1.0, 0.0, 1.0]
    surface = Surface(name="s", coordinates=axis, height=[[2.0 + a] * 3 for a in axis])
    drawn = draw(SurfaceFigure(title="t", height_label="h", surfaces=[surface]))
    bands = [path.get_extents() for path in drawn.axes[0].collections[0].get_paths() if len(path.vertices)]
    assert bands
    assert all(band.height == pytest.approx(2.0) and band.width < 1 for band in bands)


def test_surfaces_share_one_scale(report):
    _, findings, _ = report
    first, second, _ = draw(findings[1].figures[0]).axes
    assert first.collections[0].get_clim() == second.collections[0].get_clim() == pytest.approx((0.05, 9.05))


def test_overview_has_every_claim_with_effect_interval_n_p_and_cost(report):
    """The cost of the first claim is that of its ten runs, 93.4 s each; the third has nothing to compare."""
    _, findings, out = report
    page, markdown = Page((out / "index.html").read_text()), (out / "report.md").read_text()
    table = page.tables[0]
    assert table[0] == ["", "claim", "verdict", "effect (95 % interval)", "n", "p (Holm)", "cost"]
    (sam,) = findings[0].verdicts[0].comparisons
    effect = interval_text(sam.difference)
    percent = f"\N{MINUS SIGN}{abs(100 * sam.difference.mean / sam.baseline):.0f} %"
    claim = "SAM has lower test error than SGD. table1"
    assert table[1] == ["1", claim, "✓ reproduced", f"{effect} points {percent}", "5", "p < 0.001", "15 min 34 s"]
    third = "SAM needs no more than one ascent step. table1"
    assert table[3] == ["3", third, f"{NOTHING} not tested", *[NOTHING] * 3, "1 h 2 min"]
    both = [row[-4:] for row in table[4:6]]
    assert both[0] == ["\N{MINUS SIGN}0.5 ± 0.2 points \N{MINUS SIGN}3 % test error", "5", "p = 0.010", "7 min 47 s"]
    assert table[5] == ["\N{MINUS SIGN}0.50 points \N{MINUS SIGN}3 % top-5 error", "1", "no test"]
    assert [row[0] for row in table[1:]] == ["1", "2", "3", "4", table[5][0], "5"]
    assert "(figures/overview.svg)" in markdown
    assert "± 0.0 " not in page.text + markdown  # one replica has no interval, not one of width 0


def test_forest_plot_shows_relative_effects_with_their_intervals():
    comparison = Comparison(
        name="c", difference=Interval(-2.0, 1.0), baseline=20.0, p_value=0.01, p_holm=0.01, num_pairs=5
    )
    effect = relative_effect(comparison)
    assert effect == Interval(-10.0, 5.0)
    assert relative_effect(dataclasses.replace(comparison, baseline=0.0)) is None
    assert relative_effect(dataclasses.replace(comparison, baseline=math.nan)) is None
    rows = [("lower", "reproduced", effect), ("one pair", "not tested", Interval(4.0, math.nan))]
    axes = draw(ForestFigure("t", rows)).axes[0]
    spans = [bars.get_segments()[0][:, 0].tolist() for _, _, (bars,) in axes.containers[:2]]
    assert spans == [[-15.0, -5.0], [4.0, 4.0]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["lower", "one pair"]
    assert axes.yaxis_inverted()  # in the order of the table
    low, high = axes.get_xlim()
    assert low < -15
    assert high > 4


def test_what_was_cut_is_on_the_page(report):
    _, findings, out = report
    assert findings[0].cut[0] in Page((out / "index.html").read_text()).text
    assert "CIFAR-100 \\<all of it\\>" in (out / "report.md").read_text()


def test_figures_have_the_color_of_the_text_on_the_page_and_a_white_background_as_files(report):
    _, _, out = report
    page = (out / "index.html").read_text()
    assert "currentColor" in page
    assert INK not in page.partition("</style>")[2]
    for file in (out / "figures").iterdir():
        assert '<rect width="100%" height="100%" fill="#fff"/>' in file.read_text()


def test_folded_tables_open_when_clicked(tmp_path):
    tables = [Table(title=f"T {folded}", columns=["a"], rows=[["x"]], folded=folded) for folded in (False, True)]
    text = page_of([simple(tables=tables)], tmp_path)
    assert "<summary>T True</summary>" in text
    assert "<summary>T False</summary>" not in text
    assert len(Page(text).tables) == 2


def test_runs_have_different_anchors():
    assert run_anchors(["a b", "a_b", "a b"]) == {"a b": "run-a_b", "a_b": "run-a_b-2"}


def test_any_folder_of_runs_can_be_described(tmp_path):
    """Three experiments: one with a name, one with two seeds of which one diverged, one that is not finished."""
    named, plain, slow = named_experiment(), experiment("SGD"), experiment("SGD, twice the epochs")
    for seed, error in enumerate((14.0, 15.0, 16.0)):
        write_run(tmp_path, named, seed, error)
    write_run(tmp_path, plain, 0, 17.0)
    write_run(tmp_path, plain, 1, 0.0, failure="diverged")
    write_run(tmp_path, slow, 0, 0.0, finished=False)
    (tmp_path / "not a run").mkdir()
    found = describe_runs(tmp_path)
    assert found.num_missing == 1
    assert len(found.runs) == 6
    (table,) = found.tables
    assert table.columns == ["experiment", "rho", "epochs", "train error", "validation error", "test error"]
    rows = {tuple(row[:3]): row[3:] for row in table.rows}
    assert list(rows) == [
        ("fashion-mnist, wrn-10-2", "0", "40"),
        ("fashion-mnist, wrn-10-2", "0", "80"),
        ("sam <one>", "0.2", "40"),
    ]
    sam = rows["sam <one>", "0.2", "40"][-1]
    assert sam.values == pytest.approx((14.0, 15.0, 16.0))
    assert sam.measured.mean == pytest.approx(15.0)
    assert sam.runs == tuple(named.run_name(seed) for seed in range(3))
    sgd = rows["fashion-mnist, wrn-10-2", "0", "40"][-1]
    assert sgd.note == "1 of 2 failed"
    assert sgd.runs == (plain.run_name(0),)
    assert math.isnan(sgd.measured.half_width)
    assert rows["fashion-mnist, wrn-10-2", "0", "80"][-1].measured is None
    (figure,) = found.figures
    assert [series.half_width is None for series in figure.series] == [True, False]
    assert list(figure.series[0].x) == [1, 2, 3, 4]
    assert [series.y[-1] for series in figure.series] == pytest.approx([17.0, 15.0])
    assert "Runs are missing" in write_report([found], runs=tmp_path, out=tmp_path / "out").read_text()


def test_a_curve_has_the_epochs_that_all_of_its_runs_have(tmp_path):
    """The mean of some of the runs at one epoch, and of all at the next, would jump without any reason."""
    names = [write_run(tmp_path, experiment(), seed, 16.0 + seed) for seed in (0, 1)]
    file = tmp_path / names[1] / "result.json"
    content = json.loads(file.read_text())
    content["history"][1]["test_error"] = None
    file.write_text(json.dumps(content))
    (figure,) = describe_runs(tmp_path).figures
    (series,) = figure.series
    assert list(series.x) == [1, 3, 4]
    assert series.y[-1] == pytest.approx(16.5)


def test_a_folder_without_runs_says_so(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunError, match="no runs in"):
            describe_runs(folder)


def test_findings_of_nothing_make_a_page(tmp_path):
    empty = dataclasses.replace(simple(), tables=[Table(title="T", columns=["a"], rows=[])])
    assert "<h2" in write_report([empty], runs=tmp_path, out=tmp_path / "out").read_text()
    assert "<h1>" in write_report([], runs=tmp_path, out=tmp_path / "out").read_text()


def test_an_effect_off_the_axis_is_an_arrow_with_its_number():
    rows = [("near", "reproduced", Interval(-5.0, 1.0)), ("far", "not reproduced", Interval(191.0, 60.0))]
    (axes,) = draw(ForestFigure("effects", rows)).axes
    assert [text.get_text() for text in axes.texts] == ["+191 %"]
    assert axes.get_xlim()[1] == 100
