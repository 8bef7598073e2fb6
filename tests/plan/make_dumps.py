"""Writes the stored dumps that test_schedule.py reads: small Pallas kernels, compiled for a v6e by an installed libtpu.

Run it once for each libtpu version, from the repository root, with a Python that has `jax[tpu]`; no TPU is needed:

    python tests/plan/make_dumps.py tests/plan/dumps

The dumps land in `tests/plan/dumps/<version of libtpu>/`, cut to what the reader reads.
"""

import gzip
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

from logitless.plan.bundles import ALLOCATIONS, BUNDLES, SLOTS

GRID = (3, 5)
BLOCK = 128
LOOP_TRIPS = 7


def set_environment(dump):
    """What compiling without a TPU needs, before jax loads."""
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["TPU_ACCELERATOR_TYPE"] = "v6e-4"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"


def kernels():
    """Bodies by name; each is called with (x, w, out, accumulator) refs and both grid indices."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    last = GRID[1] - 1

    def product(x, w):
        return jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)

    def sweep(x, w, out, acc, i, j):
        @pl.when(j == 0)
        def _zero():
            acc[...] = jnp.zeros_like(acc)

        acc[...] += product(x, w)

        @pl.when(j == last)
        def _write():
            out[...] = acc[...].astype(out.dtype)

    def always(x, w, out, acc, i, j):
        acc[...] = jnp.zeros_like(acc)
        acc[...] += product(x, w)
        out[...] = acc[...].astype(out.dtype)

    def tail(x, w, out, acc, i, j):
        @pl.when(j < last)
        def _full():
            acc[...] = product(x, w)

        @pl.when(j == last)
        def _masked():
            keep = jax.lax.broadcasted_iota(jnp.int32, acc.shape, 1) < 100
            acc[...] = jnp.where(keep, product(x, w), 0.0)

    def full(x, w, out, acc, i, j):
        acc[...] = product(x, w)

    def loop(x, w, out, acc, i, j):
        @pl.loop(0, LOOP_TRIPS)
        def _step(k):
            acc[...] = acc[...] * 2.0 + k.astype(jnp.float32)

    def nested(x, w, out, acc, i, j):
        @pl.loop(0, LOOP_TRIPS)
        def _outer(k):
            @pl.loop(0, i + 1)
            def _inner(m):
                acc[...] = acc[...] * 2.0 + (k + m).astype(jnp.float32)

    def data(x, w, out, acc, i, j):
        peak = jnp.max(x[...].astype(jnp.float32))

        @pl.when(peak > 3.0)
        def _large():
            acc[...] = product(x, w)

        @pl.when(jnp.logical_not(peak > 3.0))
        def _small():
            acc[...] = acc[...] + 1.0

    def branch(x, w, out, acc, i, j):
        peak = jnp.max(x[...].astype(jnp.float32))
        acc[...] = jax.lax.cond(peak > 3.0, lambda: product(x, w), lambda: jnp.ones(acc.shape, jnp.float32))

    def endless(x, w, out, acc, i, j):
        peak = jnp.max(x[...].astype(jnp.float32)).astype(jnp.int32)

        @pl.loop(0, peak)
        def _step(k):
            acc[...] = acc[...] * 2.0 + 1.0

    def either(x, w, out, acc, i, j):
        def large():
            acc[...] = product(x, w)

        def small():
            out[...] = jnp.ones(out.shape, out.dtype)

        jax.lax.cond(jnp.max(x[...].astype(jnp.float32)) > 3.0, large, small)

    def spills(x, w, out, acc, i, j):
        # Eight tiles of 16 registers live through the loop, twice what there is.
        def turn(_, tiles):
            return tuple(a * b + 1.0 for a, b in zip(tiles, tiles[1:] + tiles[:1], strict=True))

        tiles = jax.lax.fori_loop(0, LOOP_TRIPS, turn, tuple(acc[...] + k for k in range(8)))
        acc[...] = sum(tiles)

    bodies = (sweep, always, tail, full, loop, nested, data, branch, either, endless, spills)
    return {body.__name__: body for body in bodies}


def compile_kernel(name, body, dynamic=False):
    """Compiles one kernel for a v6e; on demand with a dynamic outer axis of the grid."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental import topologies
    from jax.experimental.pallas import tpu as pltpu

    def kernel(x, w, out, acc):
        body(x, w, out, acc, pl.program_id(0), pl.program_id(1))

    def call(count, x, w):
        return pl.pallas_call(
            kernel,
            grid=(count, GRID[1]) if dynamic else GRID,
            in_specs=[
                pl.BlockSpec((BLOCK, BLOCK), lambda i, j: (i, j)),
                pl.BlockSpec((BLOCK, BLOCK), lambda i, j: (j, 0)),
            ],
            out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((GRID[0] * BLOCK, BLOCK), jnp.bfloat16),
            scratch_shapes=[pltpu.VMEM((BLOCK, BLOCK), jnp.float32)],
            name=f"kernel_{name}",
        )(x, w)

    device = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices[0]
    on_chip = jax.sharding.SingleDeviceSharding(device)
    shapes = [
        ((), jnp.int32),
        ((GRID[0] * BLOCK, GRID[1] * BLOCK), jnp.bfloat16),
        ((GRID[1] * BLOCK, BLOCK), jnp.bfloat16),
    ]
    jax.jit(call).lower(*(jax.ShapeDtypeStruct(s, d, sharding=on_chip) for s, d in shapes)).compile()


def store(written, stored):
    """Keeps what the reader reads: compressed, of the allocations only their declarations."""
    stored.mkdir(parents=True)
    for kind in (BUNDLES, SLOTS, ALLOCATIONS):
        for path in written.glob(f"*-kernel_*-{kind}"):
            if "schedule-analysis" in path.name:
                continue
            text = path.read_text(encoding="utf-8")
            if kind == ALLOCATIONS:
                text = "".join(
                    line for line in text.splitlines(keepends=True) if "#allocation" in line and "space=" in line
                )
            name = path.name.partition("-")[2]
            (stored / f"{name}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def main(dumps):
    with tempfile.TemporaryDirectory() as folder:
        set_environment(folder)
        for name, body in kernels().items():
            compile_kernel(name, body)
        compile_kernel("dynamic", kernels()["sweep"], dynamic=True)
        store(Path(folder), Path(dumps) / importlib.metadata.version("libtpu"))


if __name__ == "__main__":
    main(sys.argv[1])
