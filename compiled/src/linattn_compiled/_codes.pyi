def read_codes(*arguments: float) -> None:
    """Rows over keys and values in few bits: 17 addresses, 14 sizes and a number, in the order of `Reading` in the C
    file.
    """
