"""An audit of a bounded KV cache: its rows summed up, put into words, tables and charts."""
