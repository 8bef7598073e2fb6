"""The one exception that training shows to its user."""


class TrainError(ValueError):
    """Something the user can act on: `str(error)` is one line that says what was wrong and what would work."""
