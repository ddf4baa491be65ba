"""Hooks of MkDocs: files of the repository that pages link to become part of the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

LINK = re.compile(r"\]\(\.\./([^)#]+)")
NEIGHBOR = re.compile(r"(?:\]\(|src=\"|href=\")([^)\"#:]+)")
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
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point such links there."""
    return LINK.sub(r"](repository/\1", markdown) if "/" not in page.file.src_uri else markdown
