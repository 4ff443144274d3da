"""Files and folders: written whole or not at all, by one process at a time, and read with every field checked."""
