"""`plan_function` with the real compiler: memory to the byte, failures as answers, and nothing left behind."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from logitless import linear_grpo_loss, linear_logprobs
from logitless.plan import CHIPS, CompilerMissing, ProgramPlan, largest, plan_function, planner, topology
from logitless.plan.bundles import ALLOCATIONS, BUNDLES, SLOTS
from logitless.plan.compiler import compiled, versions

libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="the compiler: pip install '.[tpu]'")
TPUS = [name for name, chip in CHIPS.items() if chip.platform == "tpu"]


def shape(*dims: int, dtype=jnp.float32, sharding=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


def sum_of_products(x, y):
    return jnp.tanh(x @ y).sum()


def twice(x, rows):
    """A Mosaic kernel over blocks of so many rows."""

    def kernel(x, y):
        y[...] = jnp.tanh(x[...]) * 2

    spec = pl.BlockSpec((rows, 512), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel, grid=(x.shape[0] // rows,), in_specs=[spec], out_specs=spec, out_shape=x, name="twice"
    )
    return call(x)


@libtpu
@pytest.mark.parametrize("chip", TPUS)
def test_a_small_program_compiles_for_every_chip(chip):
    plan = plan_function(lambda x: (x @ x) * 2, (shape(512, 512, dtype=jnp.bfloat16),), chip)
    assert plan.fits and plan.reason is None and plan.topology == chip
    assert (plan.argument_bytes, plan.output_bytes) == (512 * 512 * 2, 512 * 512 * 2)
    assert plan.total_bytes == plan.temp_bytes + 2 * 512 * 512 * 2 and plan.hbm_bytes == CHIPS[chip].hbm_bytes
    assert plan.flops == 2 * 512**3
    # Slower than the peak, and not by orders of magnitude.
    peak_ms = plan.flops / CHIPS[chip].flops_per_s * 1e3
    assert peak_ms < plan.expected_ms < 50 * peak_ms and 0.02 < plan.mxu_use < 1
    assert plan.record()["kind"] == "compiler estimate, not a measurement"


@libtpu
def test_memory_is_what_the_program_holds_and_an_array_that_is_donated_counts_once():
    def step(x):
        # Sorted along rows: no fusion can do without the whole result.
        return jnp.sort(x, axis=1)[:, ::-1] + 1.0

    kept = plan_function(step, (shape(4096, 2048),), "v6e")
    donated = plan_function(step, (shape(4096, 2048),), "v6e", donate_argnums=(0,))
    array = 4096 * 2048 * 4
    assert (kept.argument_bytes, kept.output_bytes, kept.alias_bytes) == (array, array, 0)
    assert donated.alias_bytes == array and donated.total_bytes <= kept.total_bytes - array + kept.temp_bytes
    assert kept.total_bytes == kept.temp_bytes + 2 * array


@libtpu
def test_a_loss_is_planned_with_the_blocks_of_the_chip_and_not_of_this_machine():
    def plan(implementation):
        args = (
            shape(4, 1024, 64),
            shape(64, 20_000),
            shape(4, 1024, dtype=jnp.int32),
            shape(4, 1024),
            shape(4),
            shape(4, 1024),
        )

        def loss(hidden, lm_head, targets, old, advantages, mask):
            return linear_grpo_loss(hidden, lm_head, targets, old, advantages, mask, implementation=implementation).loss

        return plan_function(jax.value_and_grad(loss, (0, 1)), args, "v6e")

    reference, chunked = plan("reference"), plan("chunked")
    assert chunked.temp_bytes < reference.temp_bytes / 2
    # Logits of 328 MB, and a tile of 2,048 x 4,096 in their place.
    assert reference.temp_bytes > 4096 * 20_000 * 4
    # The blocks of tokens that carry a gradient are counted with their bound: 4 products, some columns met twice.
    assert not [note for note in chunked.notes if "unknown" in note]
    product = 2 * 4096 * 64 * 20_000
    assert 4 <= chunked.flops / product < 4.2
    assert 3 <= reference.flops / product < 3.1


@libtpu
def test_devices_of_a_mesh_are_planned_one_by_one_and_collectives_counted():
    mesh = AbstractMesh((4,), ("data",))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def loss(w, x):
        return (jnp.tanh(x @ w) ** 2).sum()

    args = (shape(512, 256, sharding=whole), shape(4096, 512, sharding=split))
    plan = plan_function(jax.grad(loss), args, "v6e:2x2")
    # A quarter of the tokens and all of the weight on each; its gradient is summed over all four.
    assert plan.argument_bytes == 512 * 256 * 4 + 1024 * 512 * 4
    # A sum that every device gets: scattered, then gathered.
    assert plan.collective_bytes == 2 * 3 / 4 * 512 * 256 * 4
    assert plan.topology == "v6e:2x2"
    with pytest.raises(ValueError, match=r"a mesh of 4 devices \(data=4\), topology v6e:2x4 of 8"):
        plan_function(jax.grad(loss), args, "v6e:2x4")
    with pytest.raises(ValueError, match=r"v6e:2x4 has 8 devices, but no argument is sharded"):
        plan_function(jnp.sin, (shape(8),), "v6e:2x4")
    other = shape(4096, 512, sharding=NamedSharding(AbstractMesh((2, 2), ("a", "b")), P("a")))
    with pytest.raises(ValueError, match="2 different meshes"):
        plan_function(jax.grad(loss), (args[0], other), "v6e:2x2")


class Parameters(NamedTuple):
    """A tree of the caller's own."""

    w: Any
    unused: Any


@libtpu
def test_trees_numbers_and_unused_arguments_are_what_they_are_for_jit():
    def step(parameters, rate):
        return Parameters(parameters.w - rate * parameters.w, jnp.zeros(3)), {
            "norm": jnp.sum(parameters.w, dtype=jnp.float32)
        }

    parameters = Parameters(shape(1024, 512, dtype=jnp.bfloat16), shape(1024, 1024))
    plan = plan_function(step, (parameters, 1e-4), "v6e", donate_argnums=0)
    array = 1024 * 512 * 2
    # A Python number does not widen bfloat16, and what the function does not read is no argument of its program.
    assert array <= plan.argument_bytes < array + 5000 and array <= plan.output_bytes < array + 5000
    assert plan.alias_bytes == array
    with pytest.raises(ValueError, match="donate_argnums names argument 2; there are 2"):
        plan_function(step, (parameters, 1e-4), "v6e", donate_argnums=(0, 2))


@libtpu
@pytest.mark.slow
@pytest.mark.parametrize("where", ["v4:2x2x1", "v5p:2x2x1", "7x:2x2x1", "v6e:2x4"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_over_every_chip_and_of_every_axis_type(where, kind):
    devices = topology(where).devices
    mesh = AbstractMesh((2, devices // 2), ("a", "b"), axis_types=(kind, kind))
    x = shape(64, 128, sharding=NamedSharding(mesh, P(("a", "b"))))
    plan = plan_function(lambda x: jnp.tanh(x) * 2, (x,), where)
    # Rows are padded to the eight of a tile.
    assert plan.fits and plan.argument_bytes == max(8, 64 // devices) * 128 * 4


@libtpu
def test_a_product_with_a_batch_counts_once():
    x = shape(16, 256, 256, dtype=jnp.bfloat16)
    plan = plan_function(lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), (x, x), "v6e")
    assert plan.flops == 2 * 16 * 256**3 and plan.mxu_use < 1


@libtpu
def test_what_jax_cannot_lower_is_an_answer_and_what_the_function_refuses_is_an_error():
    plan = plan_function(lambda x: jnp.linalg.eig(x)[0], (shape(8, 8),), "v6e")
    assert not plan.fits and plan.reason.startswith("not lowered for v6e: ") and plan.temp_bytes is None
    with pytest.raises(ValueError, match="must hold D = 5"):
        plan_function(
            lambda h, w, t: linear_logprobs(h, w, t), (shape(2, 5), shape(4, 7), shape(2, dtype=jnp.int32)), "v6e"
        )


@libtpu
def test_what_does_not_fit_is_an_answer_with_the_bytes_it_wants():
    plan = plan_function(lambda x: jnp.sort(jnp.tile(x, (200_000, 1)) * 2, axis=0), (shape(1, 100_000),), "v5e")
    assert not plan.fits and plan.reason == "out of HBM" and plan.total_bytes > 80e9 > plan.hbm_bytes
    assert plan.expected_ms is None
    small = plan_function(jnp.sin, (shape(1024, 1024),), "v6e", reserve_bytes=CHIPS["v6e"].hbm_bytes)
    assert not small.fits and small.reason == "out of HBM beside the reserve" and small.temp_bytes == 0


@libtpu
def test_a_kernel_is_planned_by_its_schedule_and_one_that_takes_too_much_vmem_is_refused_by_the_compiler():
    x = shape(131_072, 512)
    plan = plan_function(lambda x: twice(x, 256), (x,), "v6e")
    (one,) = plan.kernels
    assert one.name.startswith("twice") and one.grid == (512,) and one.runs == 1 and not one.unknown
    # Each row is read once and written once: bound by its copies.
    assert one.dma_ms == pytest.approx(2 * 131_072 * 512 * 4 / 1.64e12 * 1e3)
    assert plan.expected_ms > one.dma_ms > one.schedule_ms / 2
    memory = plan_function(lambda x: twice(x, 256), (x,), "v6e", schedules=False)
    assert memory.total_bytes == plan.total_bytes and memory.expected_ms is None and not memory.kernels
    assert "the schedules of its kernels were not asked for" in memory.notes[-1]
    large = plan_function(lambda x: twice(x, 32_768), (x,), "v6e")
    assert not large.fits and "vmem" in large.reason.lower() and "\n" not in large.reason


@libtpu
def test_of_the_compilers_many_passes_only_what_is_read_is_written_out(monkeypatch):
    written = set()

    @contextmanager
    def watched(*args, **kwargs):
        with compiled(*args, **kwargs) as result:
            assert result.schedules is not None
            written.update(path.name for path in result.schedules.glob("*twice*"))
            yield result

    monkeypatch.setattr(planner, "compiled", watched)
    plan_function(lambda x: twice(x, 8), (shape(64, 512),), "v6e", use_cache=False)
    kinds = {re.sub(r".*twice[^-]*-\d+-", "", name) for name in written}
    assert {BUNDLES, SLOTS, ALLOCATIONS} <= kinds and len(kinds) <= 4


@libtpu
def test_answers_are_kept_and_a_corrupt_one_is_made_anew(own_cache, monkeypatch):
    def plan(**more):
        return plan_function(sum_of_products, (shape(256, 128), shape(128, 256)), "v6e", **more)

    first = plan(use_cache=False)
    assert not own_cache.exists()
    first = plan()
    (entry,) = own_cache.iterdir()
    monkeypatch.setattr(planner, "compiled", lambda *args, **kwargs: pytest.fail("compiled again"))
    kept = plan(reserve_bytes=5)
    assert kept.compile_s == 0 and kept.reserve_bytes == 5
    assert kept.cached and not first.cached
    assert kept.record() | {"compile_s": first.compile_s, "reserve_bytes": 0, "cached": False} == first.record()
    monkeypatch.setattr(planner, "compiled", compiled)
    for content in ("{", "[]", '{"topology": "v6e"}'):
        entry.write_text(content)
        with pytest.warns(UserWarning, match="dropped a corrupt entry of the cache"):
            assert plan().total_bytes == first.total_bytes
        assert json.loads(entry.read_text())["total_bytes"] == first.total_bytes
    # Another size, another entry.
    plan_function(sum_of_products, (shape(256, 64), shape(64, 256)), "v6e")
    assert len(list(own_cache.iterdir())) == 2


@libtpu
def test_a_compile_that_takes_too_long_is_stopped_and_not_remembered(own_cache):
    plan = plan_function(sum_of_products, (shape(256, 128), shape(128, 256)), "v6e", timeout_s=0.05)
    assert not plan.fits and plan.reason == "not compiled within 0.05 s (timeout_s)"
    assert not own_cache.exists() and not _children()


def _children() -> list[str]:
    """Command lines of compilers that run on this machine for this test."""
    lines = []
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = status.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"compile_child.py") for word in words) and os.environ["LOGITLESS_CACHE"].encode() in (
            status.with_name("environ").read_bytes()
        ):
            lines.append(b" ".join(words).decode())
    return lines


SLOW = """
import signal
# As in a terminal: what starts in the background of a shell ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
import jax, jax.numpy as jnp
from logitless.plan import plan_function
def f(x):
    for _ in range(60):
        x = jnp.sort(jnp.tanh(x @ x), axis=1)
    return x
print("start", flush=True)
plan_function(f, (jax.ShapeDtypeStruct((2048, 2048), jnp.float32),), "v6e")
print("done", flush=True)
"""


@libtpu
@pytest.mark.parametrize("signal", ["INT", "KILL"])
def test_no_process_and_no_folder_outlives_a_plan_that_is_stopped(tmp_path, signal):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = os.environ | {"TMPDIR": str(scratch), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, "-c", SLOW], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None and run.stdout.readline() == b"start\n"
        _wait(lambda: _children(), "no compiler was started")
        subprocess.run(["kill", f"-{signal}", str(run.pid)], check=True)
        assert run.wait(20) != 0
        assert b"done" not in run.stdout.read()
    _wait(lambda: not _children(), "the compiler outlived the plan")
    _wait(lambda: not list(scratch.iterdir()), "its files outlived the plan")


def _wait(holds, message: str) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, message
        time.sleep(0.05)


@libtpu
def test_two_plans_at_once_do_not_meet():
    code = (
        "import sys, jax, jax.numpy as jnp\nfrom logitless.plan import plan_function\n"
        "x = jax.ShapeDtypeStruct((512, int(sys.argv[1])), jnp.float32)\n"
        "print(plan_function(jnp.sin, (x,), 'v6e').argument_bytes)"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(n)], env=environment, stdout=subprocess.PIPE, text=True)
        for n in (128, 256)
    ]
    assert [int(run.communicate(timeout=120)[0]) for run in runs] == [512 * 128 * 4, 512 * 256 * 4]


def test_a_missing_compiler_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(
        "logitless.plan.compiler._NEEDED", {"tpu": ("jax", "no-such-package"), "cuda": ("no-such-card",)}
    )
    with pytest.raises(
        CompilerMissing, match=r"no-such-package not installed for platform tpu: pip install 'logitless\[tpu\]'"
    ):
        plan_function(jnp.sin, (shape(8),), "v6e")
    with pytest.raises(
        CompilerMissing, match=r"no-such-card not installed for platform cuda: name an environment .*python"
    ):
        plan_function(jnp.sin, (shape(8),), "h100")
    with pytest.raises(CompilerMissing, match="cannot run python='/no/such/python'"):
        plan_function(jnp.sin, (shape(8),), "v6e", python="/no/such/python")
    assert isinstance(CompilerMissing("x"), ValueError)


def test_versions_are_those_of_the_interpreter_that_is_named(monkeypatch):
    monkeypatch.setattr("logitless.plan.compiler._NEEDED", {"tpu": ("jax", "numpy")})
    assert versions("tpu") == {"jax": jax.__version__, "numpy": np.__version__}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v6", r"topology='v6' is unknown; known: v4, v5e, v5p, v6e, 7x, h100, a100, b200; did you mean 'v6e'"),
        ("v6e:8", r"a topology of v6e gives chips along 2 axes, such as 'v6e:2x2'"),
        ("v5p:2x2", r"a topology of v5p gives chips along 3 axes, such as 'v5p:2x2x1'"),
        ("v6e:0x2", "chips along 2 axes"),
        ("h100:2", "a topology of h100 gives one card"),
    ],
)
def test_an_unknown_topology_is_refused_with_the_known_ones(name, says):
    with pytest.raises(ValueError, match=says):
        topology(name)


def test_topologies_by_every_name():
    assert str(topology("V6E")) == "v6e" and topology("v6e").devices == 1
    assert topology("v6e:16x16").devices == 256 and topology("v4:2x2x1").devices == 8
    assert str(topology("tpu7x:2x2x1")) == "7x:2x2x1" and topology("7x:2x2x1").compiler_name == "tpu7x:2x2x1"
    assert topology("v5p").compiler_name == "v5p:2x2x1"
    assert str(topology("v6e:1x1")) == "v6e"


@libtpu
def test_a_topology_that_the_compiler_does_not_know_is_refused():
    mesh = AbstractMesh((15,), ("data",))
    with pytest.raises(ValueError, match=r"the compiler knows no topology v6e:3x5; 2x2 is one"):
        plan_function(jnp.sin, (shape(15, 8, sharding=NamedSharding(mesh, P("data"))),), "v6e:3x5")


def made(total_bytes):
    """A planner in which a program of n takes `total_bytes(n)`; and what it was asked."""
    asked = []

    def plan(fn, args, where, **options):
        asked.append(args[0])
        total = total_bytes(args[0])
        fits = total <= 1000
        return ProgramPlan(where, fits, None if fits else "out of HBM", 1000, total_bytes=total)

    return plan, asked


@pytest.mark.parametrize("right", [1, 2, 3, 5, 17, 100, 126, 127])
@pytest.mark.parametrize("form", ["line", "steps", "unknown"])
def test_the_largest_size_is_found_by_few_plans(monkeypatch, right, form):
    per = 1000 // right

    def total(n):
        units = n // 64
        if form == "line":
            return units * per
        if form == "steps":
            return 900 if units <= right else 5000
        return 10 if units <= right else 10**9

    right = 1000 // per if form == "line" else right
    plan, asked = made(total)
    monkeypatch.setattr(planner, "plan_function", plan)
    told = []
    size, best = largest(
        lambda n: (abs, (n,)), "v6e", step=64, most=64 * 127, tell=lambda n, plan: told.append((n, plan.fits))
    )
    assert size == 64 * min(right, 127) and best.fits and best.total_bytes == total(size)
    assert [n for n, _ in told] == asked and len(set(asked)) == len(asked)
    # Two for a line, one to see that it holds and one that the next does not; else two for each halving.
    assert len(asked) <= (5 if form == "line" else 14)


def test_the_search_ends_where_a_size_is_refused_for_another_reason(monkeypatch):
    def plan(fn, args, where, **options):
        refused = args[0] > 32
        return ProgramPlan(
            where, not refused, "not compiled within 5 s" if refused else None, 1000, total_bytes=args[0]
        )

    monkeypatch.setattr(planner, "plan_function", plan)
    size, best = largest(lambda n: (abs, (n,)), "v6e", step=16, most=4096)
    assert 0 < size <= 32 and best.fits and best.notes[-1].startswith("stopped at size ") and "5 s" in best.notes[-1]


def test_a_size_that_never_fits_and_steps_without_sense(monkeypatch):
    plan, _ = made(lambda n: 5000)
    monkeypatch.setattr(planner, "plan_function", plan)
    size, best = largest(lambda n: (abs, (n,)), "v6e", step=8, most=64)
    assert size == 0 and not best.fits and best.reason == "out of HBM"
    for step, most in ((0, 8), (16, 8)):
        with pytest.raises(ValueError, match=f"step={step}, most={most}"):
            largest(lambda n: (abs, (n,)), "v6e", step=step, most=most)


@libtpu
def test_the_largest_array_that_fits_is_that_of_the_arithmetic():
    # x and sin(x): 2 n KiB of a device less its reserve.
    size, plan = largest(
        lambda n: (jnp.sin, (shape(n, 256),)),
        "v6e",
        step=1024,
        most=2**25,
        reserve_bytes=CHIPS["v6e"].hbm_bytes - 100 * 2**20,
    )
    assert size == 51_200 and plan.total_bytes == 100 * 2**20
