"""Docstrings are reStructuredText where they have formulas and references: this makes Markdown of them."""

import re
from typing import Any

import griffe


def to_markdown(text: str) -> str:
    r"""Return a docstring with its formulas, references and literal blocks in Markdown.

    Example:
        >>> to_markdown(r"Returns :math:`\rho` of :class:`flatmin.SAM`::")
        'Returns $\\rho$ of [`SAM`][flatmin.SAM]:'
    """
    text = re.sub(r"^( *)\.\. math:: *(.+(?:\n\1 +\S.*)*)", _display, text, flags=re.MULTILINE)
    text = re.sub(r":math:`([^`]+)`", lambda match: "$" + " ".join(match[1].split()) + "$", text)
    text = re.sub(r":(?:class|func):`([\w.]+)`", lambda match: f"[`{match[1].split('.')[-1]}`][{match[1]}]", text)
    text = re.sub(r":meth:`([\w.]+)`", r"`\1`", text)
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
