"""A benchmark: its rows summed up, put into words, a table and charts."""
