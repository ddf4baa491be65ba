"""Hooks of MkDocs: files of the repository that pages link to, and the pages of results, become part of the site.

And docstrings, which are reStructuredText where they have formulas and references, become Markdown.
"""

import re
import tempfile
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files
from rich.console import Console

from flatmin.lab.commands.report import Report

LINK = re.compile(r"\]\(\.\./([^)#]+)")
NEIGHBOR = re.compile(r"(?:\]\(|src=\"|href=\")([^)\"#:]+)")
REPORT = re.compile(r"(\]\(repository/results/[^/)]+/)report\.md")
ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked as ``../path`` under ``repository/``."""
    pages = [Path(file.abs_src_path) for file in files.documentation_pages()]
    linked = {path for page in pages if page.parent == ROOT / "docs" for path in LINK.findall(page.read_text())}
    for path in list(linked):  # and what these files show in turn
        if (ROOT / path).is_file():
            directory = Path(path).parent
            linked |= {str(directory / name) for name in NEIGHBOR.findall((ROOT / path).read_text())}
    for path in sorted(linked):
        if (ROOT / path).is_file() and ".." not in path:
            files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    for study in sorted((ROOT / "results").glob("*/study.json")):
        name, page = study.parent.name, _results_page(study.parent)
        files.append(File.generated(config, f"repository/results/{name}/index.html", content=page))
    return files


def _results_page(results: Path) -> str:
    """Return the HTML page of a study, which git does not have: it is written from the runs."""
    with tempfile.TemporaryDirectory() as out:
        Report(runs=results, out=Path(out)).run(Console(quiet=True))
        return (Path(out) / "index.html").read_text()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point such links there; on the site, the report of a study is its HTML page."""
    if "/" in page.file.src_uri:
        return markdown
    return REPORT.sub(r"\1index.html", LINK.sub(r"](repository/\1", markdown))


# Docstrings.


def to_markdown(text: str) -> str:
    r"""Return a docstring with its formulas, references and literal blocks in Markdown.

    Example:
        >>> to_markdown(r"Returns :math:`\rho` of :class:`flatmin.SAM`::")
        'Returns $\\rho$ of [`SAM`][flatmin.SAM]:'
    """
    text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)  # >>> is code only under this title
    text = re.sub(r"^( *)\.\. math:: *(.+(?:\n\1 +\S.*)*)", _display, text, flags=re.MULTILINE)
    text = re.sub(r":math:`([^`]+)`", lambda match: "$" + " ".join(match[1].split()) + "$", text)
    text = re.sub(r":(?:class|func):`(flatmin\.(?:\w+\.)*(\w+))`", r"[`\2`][\1]", text)
    text = re.sub(r":(?:class|func|meth):`([\w.]+)`", r"`\1`", text)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _display(match: re.Match[str]) -> str:
    indent, formula = match.groups()
    return f"{indent}$$\n{indent}{' '.join(formula.split())}\n{indent}$$"


class MarkdownDocstrings(griffe.Extension):
    """Converts every docstring that mkdocstrings reads."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert one."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
