"""``flatmin report``: findings and the files of runs become one HTML page, and the same in Markdown.

Nothing on them is typed by hand: each number comes from the findings or from the directory of a run. The same input
gives the same bytes. May import everything of the lab but commands.
"""

from collections.abc import Sequence
from pathlib import Path

from flatmin.lab.report.content import report_content
from flatmin.lab.report.render import html_page, markdown_page
from flatmin.lab.report.run_findings import describe_runs
from flatmin.lab.report.runs import named_runs
from flatmin.lab.runs.json_files import storing, write_atomic
from flatmin.lab.runs.record import Records
from flatmin.lab.studies.findings import Findings

__all__ = ["describe_runs", "write_report"]


def write_report(findings: Sequence[Findings], *, known: Records, out: Path, title: str, html: bool = True) -> Path:
    """Write OUT/index.html, a page that needs nothing else, and OUT/report.md with its figures in OUT/figures.

    Args:
        findings: what studies found, in the order in which it is shown.
        known: the runs that the findings name.
        out: where to write; files of these names are replaced, each as a whole.
        title: the title of the page.
        html: whether to write index.html; if not, only report.md and the figures, as git has them.

    Returns:
        The path of the page, or of report.md.

    Raises:
        StorageError: a file cannot be written.
    """
    names = sorted({name for one in findings for name in named_runs(one)})
    content = report_content(findings, {name: known[name] for name in names}, title)
    pictures = [figure["picture"] for item in content["items"] for figure in item["figures"]]
    for picture in (content["overview"]["picture"], *pictures):
        if picture is not None:
            _write(out / picture["file"], picture["content"])
    _write(out / "report.md", markdown_page(content))
    if not html:
        return out / "report.md"
    _write(out / "index.html", html_page(content))
    return out / "index.html"


def _write(path: Path, text: str) -> None:
    with storing(path.parent, "Choose another directory with --out."):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
