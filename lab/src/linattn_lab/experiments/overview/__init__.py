"""Claims of an overview of linear attention, in Chinese."""
