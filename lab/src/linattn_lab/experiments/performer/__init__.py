"""Claims of "Rethinking Attention with Performers" (Choromanski et al. 2021, arXiv 2009.14794)."""
