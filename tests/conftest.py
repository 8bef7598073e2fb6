"""Strict settings for every test, and the devices that they run on."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight virtual devices share few cores. One that waits for the others 40 s on a busy machine must not end the process,
# and each may be in a callback of a simulated kernel while one more thread copies its array.
os.environ["XLA_FLAGS"] = f"--xla_cpu_collective_call_terminate_timeout_seconds=600 {os.environ.get('XLA_FLAGS', '')}"
os.environ.setdefault("PJRT_NPROC", "32")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# JAX 0.10.2 hangs at times where several programs with sums over devices are on their way: seen over two processes of
# two devices each, where this alone was no cure; here, in one process, it is a precaution.
jax.config.update("jax_cpu_enable_async_dispatch", False)


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
