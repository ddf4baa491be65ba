"""The documentation site: it builds without a warning, its links resolve, and a browser opens every page of it."""

import functools
import html
import html.parser
import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import threading
import warnings
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from flatmin.lab.foret2021.figures import prediction
from report_cases import without_pictures

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(html.parser.HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loaded, self.anchors = [], [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs[name] for name in ("id", "name") if attrs.get(name)}
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        if tag in ("script", "img", "iframe", "source") and attrs.get("src"):
            self.loaded.append(attrs["src"])
        if tag == "link" and attrs.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(attrs["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The directory of the site, without the figures of the pages of results: `make lint` builds it with them."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, without_pictures(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MkDocs and its plug-ins; what is wrong with the site is in its log
        patch.setattr(prediction, "NUM_RESAMPLES", 99)  # numbers are compared with the runs elsewhere
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.chdir(ROOT)  # where snippets and hooks are looked for
        build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_internal_link_and_anchor_resolves(site, pages):
    assert len(pages) > 12
    broken = []
    for path, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (
                parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors
            ):
                broken.append((str(path.relative_to(site)), link))
    assert not broken


def test_nothing_is_loaded_from_outside(site, pages):
    outside = {link for page in pages.values() for link in page.loaded if urlsplit(link).netloc}
    for style in site.rglob("*.css"):
        outside |= {url for url in re.findall(r"url\(['\"]?([^)'\"]+)", style.read_text()) if urlsplit(url).netloc}
    assert not outside


def test_api_reference_has_every_public_name(pages):
    import flatmin

    anchors = set().union(*(page.anchors for page in pages.values()))
    names = {getattr(flatmin, name).__name__ for name in flatmin.__all__}  # an older name counts as the new one
    assert {f"flatmin.{name}" for name in names} <= anchors


def test_docstrings_lose_their_restructured_text(site):
    for path in (site / "api").rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", path.read_text(), flags=re.DOTALL)
        assert not re.findall(r":math:|\.\. math|:class:|:meth:|:func:", text), path
        assert "<blockquote" not in text, path  # what Markdown makes of >>>


def test_api_reference_has_no_module_in_place_of_a_function(site):
    """A module that has a function's name hides it."""
    for path in (site / "api").rglob("*.html"):
        assert "doc-module" not in path.read_text(), path


def test_snippets_are_filled_in(site):
    """A formatter once turned the marker of a snippet into arithmetic, and pages showed it in place of the code."""
    blocks = 0
    for path in site.rglob("*.html"):
        page = path.read_text()
        assert "--8" not in html.unescape(re.sub(r"<[^>]+>", "", page)), path
        for block in re.findall(r"<pre\b[^>]*>(.*?)</pre>", page, re.DOTALL):
            text = html.unescape(re.sub(r"<[^>]+>", "", block)).strip()
            assert text.strip('-8< "'), (path, block)
            blocks += 1
    assert blocks > 50
    tutorial = re.sub(r"<[^>]+>", "", (site / "tutorial" / "index.html").read_text())
    for line in ("images, labels = load_digits()", "def train(rho, num_epochs=60):", "landscape.plot()"):
        assert line in html.unescape(tutorial)


SCRIPT = """<!doctype html><body><script>
(async () => {
  const report = {};
  for (const path of PAGES) {
    const frame = document.createElement("iframe");
    frame.hidden = true;  // loaded and scripted, but not laid out: half the time
    frame.src = path;
    document.body.append(frame);
    await new Promise(resolve => { frame.onload = resolve; });
    await new Promise(resolve => setTimeout(resolve, 50));
    const page = frame.contentDocument;
    report[path] = {
      title: page.title,
      formulas: page.querySelectorAll(".arithmatex").length,
      drawn: page.querySelectorAll(".arithmatex > .katex, .arithmatex > .katex-display").length,
      images: [...page.images].filter(image => !image.complete || image.naturalWidth == 0).map(image => image.src),
    };
    frame.remove();
  }
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify(report);
  document.body.append(result);
})();
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: the site is not opened in a browser")
def test_every_page_opens_in_a_browser(site, pages, tmp_path):
    paths = [str(path.relative_to(site)) for path in sorted(pages)]
    (site / "all.html").write_text(SCRIPT.replace("PAGES", json.dumps(paths)))
    index = site / "search" / "search_index.json"  # which every page would process again
    index.write_text(json.dumps(json.loads(index.read_text()) | {"docs": []}))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    handler.log_message = lambda *args: None
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = subprocess.run(
            [
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"),
                *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost", "--disable-background-networking"),
                *("--enable-logging=stderr", "--virtual-time-budget=120000", "--dump-dom"),
                f"http://localhost:{server.server_address[1]}/all.html",
            ],
            capture_output=True,
            text=True,
        )
        server.shutdown()
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    assert not console
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(html.unescape(found[1]))
    assert set(report) == set(paths)
    for path, page in report.items():
        assert page["title"], path
        assert page["drawn"] == page["formulas"], path
        assert not page["images"], path
    assert sum(page["formulas"] for page in report.values()) > 20


def test_the_points_of_the_figure_are_eq_2_and_the_gradient_at_the_perturbed_weights():
    """For L = c (w_1 w_2 - 1)^2 / 2 the gradient is c (w_1 w_2 - 1) (w_2, w_1), c the mean square of the inputs."""
    spec = importlib.util.spec_from_file_location("make_rho_figures", ROOT / "docs" / "make_rho_figures.py")
    figure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figure)
    scale = float(figure.INPUTS.square().mean())

    def gradient(w):
        return scale * (w[0] * w[1] - 1) * w[::-1]

    w, at = np.array(figure.START), figure.update()
    perturbed = w + figure.RHO * gradient(w) / np.linalg.norm(gradient(w))
    np.testing.assert_allclose(at["perturbed"], perturbed, rtol=1e-12)
    np.testing.assert_allclose(at["sgd"], w - figure.LR * gradient(w), rtol=1e-12)
    np.testing.assert_allclose(at["sam"], w - figure.LR * gradient(perturbed), rtol=1e-12)
    assert at["sam"][0] < w[0] < at["sgd"][0]  # as the page says: only SAM turns toward (1, 1)
    assert figure.draw_update(at).axes
