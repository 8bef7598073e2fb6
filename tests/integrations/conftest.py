"""Settings of JAX that other packages expect."""

import jax
import pytest


@pytest.fixture
def lenient_jax(strict_jax):
    """Dtypes and ranks are promoted, as these packages need it; set after the strict settings, and so inside them."""
    del strict_jax
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
