"""The report in a real browser: figures have a size, nothing is wider than the screen, and nothing complains."""

import html
import json
import re
import shutil
import subprocess

import pytest

from flatmin.lab.report import write_report
from flatmin.lab.runs.record import Records
from report_cases import findings_with_runs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on the PATH: the report is not looked at in a browser (apt install chromium)"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
    *("--virtual-time-budget=8000", "--window-size=1400,2000"),
)
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
# The page itself runs no script; this one is put into a copy of it, in a frame as wide as a screen.
LOOK = """<script>addEventListener("load", () => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  parent.postMessage(JSON.stringify({
    figures: all("figure svg").map((one) => [one.getBoundingClientRect().width, one.getBoundingClientRect().height]),
    text: getComputedStyle(document.body).color,
    labels: all("figure svg text").map((one) => getComputedStyle(one).fill),
    behind: getComputedStyle(document.body).backgroundColor,
    width: document.documentElement.clientWidth,
    content: document.documentElement.scrollWidth,
  }), "*");
});</script>"""
FRAME = """<!doctype html><body><iframe src="copy.html" width="{}" height="1500" style="color-scheme: {}"></iframe>
<script>addEventListener("message", (event) => {{ document.body.dataset.seen = event.data; }});</script>"""


def opened(page, tmp_path):
    """Open a page and return its elements, and what the browser says in its console."""
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, re.findall(r"CONSOLE[^\]]*\] (.*)", done.stderr)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report")
    findings = findings_with_runs(path / "runs")
    return write_report(findings, known=Records(path / "runs"), out=path / "out", title="T")


def test_browser_has_nothing_to_complain_about(page, tmp_path):
    elements, console = opened(page, tmp_path)
    assert console == []
    assert elements.count("<figure") == 5


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1400, "dark"), (400, "light"), (400, "dark")])
def test_figures_are_drawn_in_the_color_of_the_text_and_nothing_is_wider_than_the_screen(page, tmp_path, width, scheme):
    (tmp_path / "copy.html").write_text(POLICY.sub("", page.read_text()).replace("</body>", f"{LOOK}</body>"))
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width, scheme))
    elements, _ = opened(frame, tmp_path)
    seen = json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', elements).group(1)))
    assert len(seen["figures"]) == 5
    assert all(wide > 300 and high > 100 for wide, high in seen["figures"])
    assert seen["content"] <= seen["width"] <= width
    assert set(seen["labels"]) == {seen["text"]}
    assert (seen["behind"] == "rgb(255, 255, 255)") == (scheme == "light")


def test_page_keeps_to_its_policy_and_loads_nothing(page, tmp_path):
    copy = tmp_path / "copy.html"
    copy.write_text(page.read_text().replace("</main>", '<img src="https://example.org/x.png"></main>'))
    assert any("Content Security Policy" in line for line in opened(copy, tmp_path)[1])
    copy.write_text(page.read_text().replace("</main>", "<script>document.title = 'changed'</script></main>"))
    elements, console = opened(copy, tmp_path)
    assert any("Content Security Policy" in line for line in console)
    assert "<title>changed" not in elements
