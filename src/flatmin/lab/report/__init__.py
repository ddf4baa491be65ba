"""``flatmin report``: findings and the files of runs become one HTML page, and the same in Markdown.

Nothing on them is typed by hand: each number comes from the findings or from the directory of a run. The same input
gives the same bytes. May import everything of the lab but commands.
"""

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from flatmin.lab.report.content import report_content
from flatmin.lab.report.runs import describe_runs, named_runs
from flatmin.lab.runs.json_files import storing, write_atomic
from flatmin.lab.runs.record import Records
from flatmin.lab.studies.findings import Findings

__all__ = ["describe_runs", "write_report"]


def write_report(findings: Sequence[Findings], *, known: Records, out: Path, title: str, html: bool = True) -> Path:
    """Write OUT/index.html, a page that needs nothing else, and OUT/report.md with its figures in OUT/figures.

    Without ``html`` only report.md and the figures are written, as git has them. Returns the path of the page.
    """
    names = sorted({name for one in findings for name in named_runs(one)})
    content = report_content(findings, {name: known[name] for name in names}, title)
    figures = [figure for item in content["items"] for figure in item["figures"]]
    for figure in (content["answer"]["forest"], content["overview"]["forest"], *figures):
        if figure is not None:
            _write(out / figure["picture"]["file"], figure["picture"]["content"])
    text = _template("report.md", finalize=_markdown).render(content)
    _write(out / "report.md", re.sub(r"\n{3,}", "\n\n", text).strip() + "\n")
    if not html:
        return out / "report.md"
    # One file that loads nothing and runs no script.
    style = files("flatmin.lab.report").joinpath("templates/page.css").read_text(encoding="utf-8")
    _write(out / "index.html", _template("page.html").render(content, style=Markup(style)))
    return out / "index.html"


def _write(path: Path, text: str) -> None:
    with storing(path.parent, "Choose another directory with --out."):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)


def _template(name: str, **options: Any) -> Template:
    look: dict[str, Any] = {
        "autoescape": True,
        "undefined": StrictUndefined,
        "trim_blocks": True,
        "lstrip_blocks": True,
    }
    return Environment(loader=PackageLoader("flatmin.lab.report"), **look, **options).get_template(name)


def _markdown(value: object) -> Markup:
    """Return a value that Markdown leaves as it is, on one line; what a macro returns is left alone."""
    if isinstance(value, Markup):
        return value
    text = re.sub(r"\s+", " ", str(value)).strip()
    text = re.sub(r"[\\`*\[\]<>|$~]", r"\\\g<0>", text)
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)  # inside of a word it has no meaning
    text = re.sub(r"&(?=#?\w+;)", "&amp;", text)
    # "1. " or "- " or "# " at the beginning of a line would make a list or a title.
    return Markup(re.sub(r"^(\d+)([.)])(?=\s)", r"\1\\\2", re.sub(r"^([-+#])(?=\s|#)", r"\\\1", text)))
