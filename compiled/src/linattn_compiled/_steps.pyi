def step(*arguments: float) -> None:
    """One token folded into sums, and its row: 15 addresses, 10 sizes and 3 numbers, in the order of `Step` in the C
    file.
    """
