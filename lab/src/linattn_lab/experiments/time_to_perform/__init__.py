"""Claims of "Time to Perform" (Howell 2022)."""
