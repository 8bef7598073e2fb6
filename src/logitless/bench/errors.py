"""The one exception that a bench shows to its user."""


class BenchError(ValueError):
    """Something the user can act on: `str(error)` is one line that says what was wrong and what would work."""
