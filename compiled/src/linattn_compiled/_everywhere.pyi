def merge_everywhere(*arguments: float) -> None:
    """Rows over merged keys with every key in view: 12 addresses, 13 sizes and the scale, in the order of `Everywhere`
    in the C file.
    """
