"""How the library's docstrings become sections of a page: read by mkdocstrings, which asks griffe.

"Example:" holds doctests, which griffe knows as "Examples:"; "Source:" and "Cost:" begin a sentence, not a box.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_SENTENCE = re.compile(r"^(Source|Cost): (.*(?:\n +\S.*)*)", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


def as_sections(text: str) -> str:
    """The docstring as griffe is to read it.

    Example:
        >>> as_sections("Example:\\n    >>> 1\\n    1\\n\\nSource: a paper, of\\n    two lines.")
        'Examples:\\n    >>> 1\\n    1\\n\\n**Source:** a paper, of two lines.'
    """
    text = _EXAMPLE.sub("Examples:", text)
    return _SENTENCE.sub(lambda found: f"**{found[1]}:** {' '.join(found[2].split())}", text)


class DocstringSections(Extension):
    """Changes every docstring before it is parsed."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """A module, class, function or attribute was read."""
        if obj.docstring is not None:
            obj.docstring.value = as_sections(obj.docstring.value)
