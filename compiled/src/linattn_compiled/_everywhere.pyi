def merge_everywhere(*arguments: float) -> None:
    """Rows over merged keys with every key in view: 8 addresses, 12 sizes and 2 numbers, in the order of `Everywhere` in
    the C file.
    """
