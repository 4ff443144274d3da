def write_codes(*arguments: float) -> None:
    """Rows of numbers as codes in few bits: 9 addresses, 9 sizes and 3 numbers, in the order of `Coding` in the C file."""

def decode_codes(*arguments: float) -> None:
    """Rows of numbers from codes: 5 addresses and 5 sizes, in the order of `Decoding` in the C file."""
