"""The templates of a report, filled in. Every value is escaped: text that is not ours is never markup."""

import re
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def html_page(content: dict[str, Any]) -> str:
    """Return the page: one file that loads nothing and runs no script."""
    style = files("flatmin.lab.report").joinpath("templates/page.css").read_text(encoding="utf-8")
    return _environment().get_template("page.html").render(content, style=Markup(style))


def markdown_page(content: dict[str, Any]) -> str:
    """Return the report in Markdown, for repositories; figures are files next to it."""
    text = _environment(finalize=_markdown).get_template("report.md").render(content)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _environment(**options: Any) -> Environment:
    loader = PackageLoader("flatmin.lab.report")
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options
    )


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
