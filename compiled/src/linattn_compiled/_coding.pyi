def write_codes(*arguments: float) -> None:
    """Rows of numbers as codes in few bits: 9 addresses, 9 sizes and 3 numbers, in the order of `Coding` in the C file."""
