"""Associative recall from a state of fixed size: what is said of it since Zoology (arXiv 2312.04927)."""
