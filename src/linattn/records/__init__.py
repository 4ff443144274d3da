"""How files and folders are written: whole or not at all, and by one process at a time; the standard library alone."""
