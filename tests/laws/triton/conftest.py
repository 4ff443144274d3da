"""Small tiles, so that few tokens fill several blocks and few features several tiles; a GPU runs what ships."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def device() -> str:
    """Where the kernels run: on a GPU, or interpreted."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from linattn_triton import tiles

    if tiles.IS_INTERPRETED:
        monkeypatch.setattr(tiles, "sizes", lambda *_, **__: (16, 16))


@pytest.fixture(autouse=True, scope="session")
def _language_patched_once() -> Iterator[None]:
    """The interpreter patches Triton's language at each launch, and at each call of a function by a kernel: half of
    its time. Nothing else in these processes reads the language, so it stays patched.
    """
    from linattn_triton import tiles

    with pytest.MonkeyPatch.context() as patch:
        if tiles.IS_INTERPRETED:
            from triton.runtime import interpreter

            language, scopes, original = interpreter.tl, {}, interpreter._patch_lang

            def once(function: Any) -> Any:
                """An empty scope, where functions that see these modules have been patched before."""
                modules = [x for x in (language, language.core) if any(x is y for y in function.__globals__.values())]
                if tuple(modules) not in scopes:
                    scopes[tuple(modules)] = original(function)
                return interpreter._LangPatchScope()

            patch.setattr(interpreter, "_patch_lang", once)
        yield
