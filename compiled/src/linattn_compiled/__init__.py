"""Compiled steps of linattn, for its backend "compiled"; addresses of float32 memory go in, nothing is checked here."""

from linattn_compiled._steps import step as step

__version__ = "0.1.0"
INTERFACE = 1
"""Of `step`: raised with every change of what it takes, or of what that means."""
