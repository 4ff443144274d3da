"""The audit: a model's attention recorded on a text, and every method measured against it, head by head."""
