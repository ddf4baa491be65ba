"""``flatmin report``: findings and the files of runs become one HTML page, and the same in Markdown.

Nothing on them is typed by hand: each number comes from the findings or from the directory of a run. The same input
gives the same bytes.
"""

from collections.abc import Sequence
from pathlib import Path

from flatmin.lab.errors import StorageError
from flatmin.lab.report.figures import svg
from flatmin.lab.report.folder import describe_runs
from flatmin.lab.report.markdown import markdown_page
from flatmin.lab.report.page import html_page
from flatmin.lab.report.runs import read_runs
from flatmin.lab.report.text import slug
from flatmin.lab.runs.directory import write_atomic
from flatmin.lab.studies.findings import Findings

__all__ = ["describe_runs", "write_report"]


def write_report(
    findings: Sequence[Findings], *, runs: Path, out: Path, title: str = "Claimed beside measured"
) -> Path:
    """Write OUT/index.html, a page that needs nothing else, and OUT/report.md with its figures in OUT/figures.

    Args:
        findings: what studies found, in the order in which it is shown.
        runs: the folder with the directories of the runs that the findings name.
        out: where to write; files of these names are replaced, each as a whole.
        title: the title of the page.

    Returns:
        The path of the page.

    Raises:
        StorageError: a file cannot be written.
    """
    records = read_runs(findings, runs)
    pictures, names = {}, {}
    for number, one in enumerate(findings):
        for index, figure in enumerate(one.figures):
            pictures[number, index] = svg(figure)
            names[number, index] = f"figures/{number + 1}-{index + 1}-{slug(one.item)}-{slug(figure.title)}.svg"
    for key, picture in pictures.items():
        _write(out / names[key], picture)
    _write(out / "report.md", markdown_page(findings, records, title=title, files=names))
    page = out / "index.html"
    _write(page, html_page(findings, records, title=title, pictures=pictures))
    return page


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}. Choose another folder with --out.") from error
    write_atomic(path, text)
