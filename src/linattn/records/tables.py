"""Tables of texts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    columns: tuple[str, ...]  # headings; the first column is left-aligned, the others are numbers
    rows: tuple[tuple[str, ...], ...]  # one text per column
    baselines: int = 0  # how many of the first rows are baselines, set apart from the others

    def markdown(self) -> str:
        """The table as Markdown, the first column to the left and the others to the right."""
        head = f"| {' | '.join(self.columns)} |"
        rule = f"|---|{'---:|' * (len(self.columns) - 1)}"
        return "\n".join([head, rule, *(f"| {' | '.join(row)} |" for row in self.rows)])
