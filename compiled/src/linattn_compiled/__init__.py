"""Compiled code of linattn, for its backend "compiled"; addresses of float32 memory go in, nothing is checked here."""

from linattn_compiled._codes import read_codes as read_codes
from linattn_compiled._coding import decode_codes as decode_codes
from linattn_compiled._coding import write_codes as write_codes
from linattn_compiled._everywhere import merge_everywhere as merge_everywhere
from linattn_compiled._merging import merge_stream as merge_stream
from linattn_compiled._steps import step as step

__version__ = "0.1.0"
INTERFACE = 8
"""Of all functions: raised with every change of what they take, or of what that means."""
