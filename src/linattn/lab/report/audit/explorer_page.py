"""The explorer as a page of its own, for the site."""

from __future__ import annotations

from linattn.lab.report._render import rendered
from linattn.lab.report.audit.explored import Explorer
from linattn.records.fields import to_json


def explorer_page(found: Explorer) -> str:
    """What an audit kept of attention rows as one file, scripts and styles inside; it asks for no other.

    Args:
        found: what the explorer is given.

    Returns:
        The text of the file.
    """
    return rendered("explorer_page.html.j2", {}, {"explorer": to_json(found)})
