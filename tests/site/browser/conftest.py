"""The built site in Debian's Chromium, from a server of this machine; without a browser this folder is left out."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
collect_ignore_glob = [] if CHROMIUM else ["test_*.py"]


class _Silent(SimpleHTTPRequestHandler):
    """A server of files that tells nothing."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def visit(browser: Browser, address: str) -> Iterator[Callable[..., Page]]:
    """A function that opens a page; whatever its console says, or it asks another host for, fails the test."""
    complaints: list[str] = []
    pages: list[Page] = []

    def at(name: str, width: int = 1280, theme: str = "light", *, has_scripts: bool = True) -> Page:
        sizes = {"width": width, "height": 900}
        page = browser.new_page(viewport=sizes, color_scheme=theme, java_script_enabled=has_scripts)
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("request", lambda one: None if one.url.startswith(address) else complaints.append(one.url))
        page.goto(f"{address}/{name}")
        pages.append(page)
        return page

    yield at
    for page in pages:
        page.close()
    assert complaints == []
