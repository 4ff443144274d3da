"""What tests of the library's commands share: tiny models, in memory and saved."""

from __future__ import annotations

from saved_models import _short_texts as _short_texts
from saved_models import folder as folder
from saved_models import prose as prose
from tiny_models import tiny as tiny
from tiny_models import words as words
