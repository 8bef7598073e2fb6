"""Tunix's models break under strict promotion of dtypes and ranks, and read Flax's variables in a deprecated way."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))


@pytest.fixture(autouse=True)
def strict_jax():
    """Not here."""
