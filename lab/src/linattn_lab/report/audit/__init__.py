"""An audit: its rows summed up, put into words, tables and charts."""
