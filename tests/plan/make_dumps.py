"""Writes the stored dumps that test_schedule.py reads: small Pallas kernels, compiled for a v6e by an installed libtpu.

Run it once for each version of libtpu, from the repository root, with a Python that has `jax[tpu]`; no TPU is needed:

    PYTHONPATH=src python tests/plan/make_dumps.py tests/plan/dumps

The dumps land in a folder named for the version, cut to what the reader reads.
"""

import gzip
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from logitless.plan.bundles import ALLOCATIONS, BUNDLES, SLOTS

GRID = (3, 5)
BLOCK = 128
LOOP_TURNS = 7
LAST = GRID[1] - 1


def product(x, w):
    return jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)


def peak(x):
    """A number that only the chip knows."""
    return jnp.max(x[...].astype(jnp.float32))


def sweep(x, w, out, acc, i, j):
    """An accumulator zeroed at the first and written at the last step of the inner axis."""

    @pl.when(j == 0)
    def _zero():
        acc[...] = jnp.zeros_like(acc)

    acc[...] += product(x, w)

    @pl.when(j == LAST)
    def _write():
        out[...] = acc[...].astype(out.dtype)


def tail(x, w, out, acc, i, j):
    """Two copies of one body: full blocks, and the last one masked."""

    @pl.when(j < LAST)
    def _full():
        out[...] = product(x, w).astype(out.dtype)

    @pl.when(j == LAST)
    def _masked():
        keep = jax.lax.broadcasted_iota(jnp.int32, acc.shape, 1) < 100
        out[...] = jnp.where(keep, product(x, w), 0.0).astype(out.dtype)


def full(x, w, out, acc, i, j):
    out[...] = product(x, w).astype(out.dtype)


def loop(x, w, out, acc, i, j):
    @pl.loop(0, LOOP_TURNS)
    def _turn(k):
        acc[...] = acc[...] * 2.0 + k.astype(jnp.float32)


def nested(x, w, out, acc, i, j):
    """A loop in a loop; the inner one turns as often as the grid index says."""

    @pl.loop(0, LOOP_TURNS)
    def _outer(k):
        @pl.loop(0, i + 1)
        def _inner(m):
            acc[...] = acc[...] * 2.0 + (k + m).astype(jnp.float32)


def data(x, w, out, acc, i, j):
    """A product, or less, as the data say."""
    is_large = peak(x) > 3.0

    @pl.when(is_large)
    def _large():
        acc[...] = product(x, w)

    @pl.when(jnp.logical_not(is_large))
    def _small():
        acc[...] = acc[...] + 1.0


def single(x, w, out, acc, i, j):
    """A product or nothing."""

    @pl.when(peak(x) > 3.0)
    def _large():
        acc[...] = product(x, w)


def endless(x, w, out, acc, i, j):
    """A loop that turns as often as the data say."""

    @pl.loop(0, peak(x).astype(jnp.int32))
    def _turn(k):
        acc[...] = acc[...] * 2.0 + 1.0


def spills(x, w, out, acc, i, j):
    """Eight tiles of 16 registers live through the loop, twice what there is."""

    def turn(_, tiles):
        return tuple(a * b + 1.0 for a, b in zip(tiles, tiles[1:] + tiles[:1], strict=True))

    tiles = jax.lax.fori_loop(0, LOOP_TURNS, turn, tuple(acc[...] + k for k in range(8)))
    acc[...] = sum(tiles)


def compile_kernel(name, body, *, dynamic=False):
    """Compiles one kernel for a v6e; on demand with a dynamic outer axis of the grid."""

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
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=on_chip)
    x = jax.ShapeDtypeStruct((GRID[0] * BLOCK, GRID[1] * BLOCK), jnp.bfloat16, sharding=on_chip)
    w = jax.ShapeDtypeStruct((GRID[1] * BLOCK, BLOCK), jnp.bfloat16, sharding=on_chip)
    jax.jit(call).lower(count, x, w).compile()


def compile_all():
    for body in (sweep, tail, full, loop, nested, data, single, endless, spills):
        compile_kernel(body.__name__, body)
    compile_kernel("dynamic", sweep, dynamic=True)


def environment(dump):
    """What compiling without a TPU needs; it is read when jax and libtpu load."""
    return os.environ | {
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true",
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v6e-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def store(written, stored):
    """Keeps what the reader reads, compressed; of the last dump only the declarations of allocations."""
    stored.mkdir(parents=True)
    for kind in (BUNDLES, SLOTS, ALLOCATIONS):
        for path in written.glob(f"*-kernel_*-{kind}"):
            if "schedule-analysis" in path.name:
                continue
            text = path.read_text(encoding="utf-8")
            if kind == ALLOCATIONS:
                text = "".join(line for line in text.splitlines(keepends=True) if "space=" in line)
            name = path.name.partition("-")[2]
            (stored / f"{name}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def main(arguments):
    if arguments == ["--child"]:
        compile_all()
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--child"], env=environment(folder), check=True)
        store(Path(folder), Path(arguments[0]) / importlib.metadata.version("libtpu"))


if __name__ == "__main__":
    main(sys.argv[1:])
