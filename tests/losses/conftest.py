"""Dtypes in which the losses must meet their numbers."""

import jax
import pytest


@pytest.fixture(params=["float64", "float32"])
def dtype(request: pytest.FixtureRequest):
    """Name of the dtype of the inputs; float64 with 64-bit types on."""
    with jax.enable_x64(request.param == "float64"):
        yield request.param
