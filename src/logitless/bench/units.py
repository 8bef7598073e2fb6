"""Numbers and tables in words."""

from collections.abc import Sequence


def size(bytes_: float | int | None) -> str:
    """A memory size to three digits, in units of 1000."""
    if bytes_ is None:
        return "unknown"
    for unit in ("B", "kB", "MB", "GB"):
        if bytes_ < 999.5 or unit == "GB":
            return f"{bytes_:.3g} {unit}"
        bytes_ /= 1000
    raise AssertionError


def duration(time_ms: float) -> str:
    """A time to three digits."""
    return f"{time_ms / 1000:.3g} s" if time_ms >= 999.5 else f"{time_ms:.3g} ms"


def factor(ratio: float) -> str:
    """A ratio to two digits."""
    return f"{ratio:.2g}x" if ratio < 0.1 else f"{ratio:.2f}x"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its header."""
    header, *cells = rows
    # A pipe in a cell would open a new column.
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
        for row in [header, ("---",) * len(header), *cells]
    )
