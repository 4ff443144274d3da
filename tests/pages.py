"""Reading a report's page: its tags, scripts, styles and words."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """Tags, attributes and text of scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        place = {"script": self.scripts, "style": self.styles}.get(self.tags[-1][0] if self.tags else "", self.words)
        (place if self.cdata_elem else self.words).append(data)

    @property
    def text(self) -> str:
        """All words, single spaces between them."""
        return " ".join("".join(self.words).split())

    def figure(self, name: str) -> dict[str, Any]:
        """The chart of this id, as the page hands it to its script."""
        line = next(line for line in self.scripts[-1].splitlines() if line.startswith("const figures = "))
        found = re.search(f'"{name}": ', line)
        assert found is not None, f"the page draws no {name}"
        return json.JSONDecoder().raw_decode(line[found.end() :])[0]

    def check_that_nothing_is_loaded(self) -> None:
        """No tag, attribute or style that makes a browser ask for a file, and a policy that forbids it."""
        for tag, attributes in self.tags:
            assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
            assert not {"src", "srcset", "action", "data", "background"} & set(attributes)
            assert attributes.get("href", "#").startswith("#")
        assert not re.search(r"@import|url\(", "".join(self.styles))
        policies = [at["content"] for tag, at in self.tags if at.get("http-equiv") == "Content-Security-Policy"]
        (policy,) = policies
        assert policy.startswith("default-src 'none';")
        assert "http" not in policy
