"""A run of `linattn reproduce`: its claims with their verdicts, as a table and charts."""
