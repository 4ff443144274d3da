"""Small tiles, so that few tokens fill several blocks and few features several tiles; a GPU runs what ships."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
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
def _quick_interpreter() -> Iterator[None]:
    """The interpreter with what it does again and again done once: more than half of its time.

    It patches Triton's language at each launch, and at each call of a function by a kernel; nothing else in these
    processes reads the language, so it stays patched. It looks sums of 32-bit integers over for an overflow, which so
    few tokens cannot have and no GPU looks for. It makes a table of all dtypes for each value.
    """
    from linattn_triton import tiles

    with pytest.MonkeyPatch.context() as patch:
        if tiles.IS_INTERPRETED:
            from triton.runtime import interpreter

            language, scopes, original = interpreter.tl, {}, interpreter._patch_lang
            # Modules whose functions were seen, by the names they hold.
            seen: set[int] = set()

            def once(function: Any) -> Any:
                """An empty scope, where functions that see these modules have been patched before."""
                names = function.__globals__
                if id(names) not in seen:
                    seen.add(id(names))
                    modules = [x for x in (language, language.core) if any(x is y for y in names.values())]
                    if tuple(modules) not in scopes:
                        scopes[tuple(modules)] = original(function)
                return interpreter._LangPatchScope()

            options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
            patch.setattr(interpreter.interpreter_builder, "options", options)
            original_dtype = interpreter._get_np_dtype
            dtypes = cache(original_dtype)
            # Types of pointers have no hash.
            patch.setattr(
                interpreter,
                "_get_np_dtype",
                lambda kind: original_dtype(kind) if kind.scalar.is_ptr() else dtypes(kind.scalar),
            )
            patch.setattr(interpreter, "_patch_lang", once)
        yield
