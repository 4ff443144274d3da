"""The ways to call attention, one file each: `run(case)` draws a case, makes its calls and compares them."""
