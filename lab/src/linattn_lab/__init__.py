"""What is claimed about approximate attention, and how to see it: measures, the audit of a model, its report."""

__version__ = "0.1.0"
