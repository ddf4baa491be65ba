"""The report in a real browser: every figure is drawn, and nothing complains."""

import dataclasses
import html
import re
import shutil
import subprocess

import pytest

from flatmin.lab.report import write_report
from report_cases import findings_with_runs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on the PATH: the report is not looked at in a browser (apt install chromium)"
)
# Without a graphics card 3-D scenes are drawn by SwiftShader, in software.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-unsafe-swiftshader"),
    *("--enable-logging=stderr", "--virtual-time-budget=8000", "--window-size=1200,2000"),
)
# What Chromium itself says in the console: about speed, on machines without a graphics card.
CHATTER = ("GL Driver Message", "willReadFrequently")


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a browser made of a page."""

    num_figures: int
    num_drawn: int
    errors: list[str]
    console: list[str]
    page: str


def look_at(page, tmp_path, *flags):
    """Open a page and return what came of it."""
    command = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    root = re.search(r"<html[^>]*>", done.stdout).group()
    data = {name: html.unescape(value) for name, value in re.findall(r'data-(\w+)="([^"]*)"', root)}
    console = re.findall(r"CONSOLE[^\]]*\] (.*)", done.stderr)
    return Seen(
        num_figures=int(data.get("figures", 0)),
        num_drawn=int(data.get("drawn", 0)),
        errors=data["errors"].splitlines(),
        console=[line for line in console if not any(words in line for words in CHATTER)],
        page=done.stdout,
    )


@pytest.fixture
def findings(tmp_path):
    return findings_with_runs(tmp_path / "runs")


def write(findings, tmp_path):
    return write_report(findings, runs=tmp_path / "runs", out=tmp_path / "out")


def only_figure(findings, kind):
    """Return findings with nothing but the first figure of a kind: less to wait for."""
    figure = next(figure for one in findings for figure in one.figures if type(figure).__name__ == kind)
    return [dataclasses.replace(findings[0], figures=[figure])]


def test_every_figure_is_drawn_and_nothing_complains(findings, tmp_path):
    seen = look_at(write(findings, tmp_path), tmp_path)
    assert seen.errors == []
    assert seen.console == []
    assert seen.num_figures == seen.num_drawn == 4
    assert len(re.findall(r'<figure class="interactive drawn"', seen.page)) == 4
    assert len(re.findall(r'class="gl-container"', seen.page)) >= 2
    assert seen.page.count('class="errorbars"') >= 3  # of the points on the first figure's curves


@pytest.mark.parametrize(
    ("whole", "broken"),
    [
        ('{"data":[{"type":"scatter"', '{"data":[{"type":"scatter",,'),  # no JSON
        ("function draw(figure) {", "function draw(figure) { Promise.reject(new Error('late'));"),
        ("const OPTIONS = {", "const OPTIONS = { {"),  # no JavaScript
    ],
)
def test_a_broken_figure_is_noticed(findings, tmp_path, whole, broken):
    page = write(only_figure(findings, "LineFigure"), tmp_path)
    text = page.read_text()
    assert text.count(whole) == 1
    page.write_text(text.replace(whole, broken))
    seen = look_at(page, tmp_path)
    assert seen.errors
    assert seen.num_drawn == 0 or "late" in seen.errors[0]
    assert seen.console


def test_without_webgl_the_still_picture_stays_and_the_page_says_so(findings, tmp_path):
    seen = look_at(write(only_figure(findings, "SurfaceFigure"), tmp_path), tmp_path, "--disable-3d-apis")
    assert (seen.num_figures, seen.num_drawn) == (1, 0)
    assert any("WebGL" in error for error in seen.errors)
    assert '<figure class="interactive"' in seen.page
    assert 'class="still"' in seen.page


def test_the_page_keeps_to_its_policy_and_loads_nothing(findings, tmp_path):
    page = write([dataclasses.replace(findings[0], figures=[])], tmp_path)
    text = page.read_text()
    page.write_text(text.replace("</main>", '<img src="https://example.org/x.png"></main>'))
    assert any("Content Security Policy" in line for line in look_at(page, tmp_path).console)
