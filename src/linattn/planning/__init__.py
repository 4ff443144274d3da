"""Methods in their written forms, what they cost, how wrong they are, and when they pay."""
