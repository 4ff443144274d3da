def merge_stream(*arguments: float) -> None:
    """Rows over a stream with merged keys, and what is kept of it: 17 addresses, 18 sizes and a number, in the order of
    `Stream` in the C file.
    """
