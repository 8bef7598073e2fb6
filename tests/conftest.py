"""Strict settings for every test, and the devices that they run on."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_jax():
    """No dtype and no rank is promoted in silence."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Thousands of compiled programs in one process have crashed XLA's compiler for the CPU."""
    yield
    jax.clear_caches()


@pytest.fixture
def x64():
    """64-bit inputs, for goldens and oracles; in all threads, for the simulated TPU has threads of its own."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
