"""The kernels, one a file, and what they share."""
