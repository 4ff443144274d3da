"""An audit of a constant memory: its rows summed up, put into words, tables and charts."""
