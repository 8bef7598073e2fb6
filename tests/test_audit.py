"""Planted programs, one per leak and one per thing that only looks like a leak."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from audit_programs import BLOCK, FUSED, LEAKS, TRAPS, B, D, N, T, V, blocked, dense, problem, transposed
from logitless.audit import AuditReport, Leak, assert_logitless, audit
from logitless.ops.api import linear_logprobs


def run(fn, *args, n=N, v=V, **options) -> AuditReport:
    return audit(fn, *args, vocab_size=v, num_tokens=n, **options)


@pytest.mark.parametrize("trap", TRAPS)
def test_the_dense_program_is_caught_at_every_trap(trap):
    n, d, v = TRAPS[trap]
    report = run(dense, *problem(n, d, v), n=n, v=v)
    assert {leak.where for leak in report.traced} == {"forward", "gradient"}
    assert {leak.where for leak in report.materialised} == {"forward", "gradient"}
    assert all(set(leak.shape) == {n, v} for leak in report.traced if len(leak.shape) == 2)


@pytest.mark.parametrize("trap", TRAPS)
def test_the_blocked_program_passes_at_every_trap(trap):
    n, d, v = TRAPS[trap]
    report = run(functools.partial(blocked, block=v // 8), *problem(n, d, v), n=n, v=v)
    assert report.ok, str(report)


@pytest.mark.parametrize("trap", ["usual", "N == D", "D > N", "D == V"])
def test_the_blocked_program_passes_without_integer_arguments(trap):
    n, d, v = TRAPS[trap]
    hidden, lm_head, _ = problem(n, d, v)
    targets = np.zeros(n, np.int32)

    def sum_of_blocks(hidden, lm_head):
        return blocked(hidden, lm_head, targets, v // 8).sum()

    def lse(hidden, lm_head):
        return jax.nn.logsumexp(hidden @ lm_head, axis=-1).sum()

    report = run(sum_of_blocks, hidden, lm_head, n=n, v=v)
    assert report.ok, str(report)
    assert not run(lse, hidden, lm_head, n=n, v=v).ok


@pytest.mark.parametrize("trap", TRAPS)
def test_tokens_taken_in_another_order_are_still_tokens(trap):
    n, d, v = TRAPS[trap]

    def ordered(fn, hidden, lm_head, targets):
        # Indexing ties neither the rows of hidden nor the targets to the order, so N == D == V cannot be decided.
        order = jnp.arange(n)[::-1]
        return fn(hidden[order], lm_head, targets[order])

    if trap != "N == D == V":
        report = run(functools.partial(ordered, functools.partial(blocked, block=v // 8)), *problem(n, d, v), n=n, v=v)
        assert report.ok, str(report)
    report = run(functools.partial(ordered, dense), *problem(n, d, v), n=n, v=v, compile_program=False)
    assert {leak.where for leak in report.traced} == {"forward", "gradient"}


def test_a_head_gradient_in_place_of_logits_is_told_apart_where_n_equals_d():
    # Of the three [32, 512] arrays of the dense program's backward pass one is d_lm_head.
    report = run(dense, *problem(32, 32, 512), n=32)
    flagged = [leak for leak in report.traced if leak.primitive == "dot_general"]
    assert [leak.where for leak in flagged] == ["forward", "gradient"]


@pytest.mark.parametrize("leak", LEAKS, ids=lambda fn: fn.__name__)
def test_a_planted_leak_is_caught(leak):
    report = run(leak, *problem())
    assert {found.where for found in report.traced} == {"forward", "gradient"}, str(report)
    if leak not in FUSED:
        assert report.materialised, str(report)


@pytest.mark.parametrize("leak", LEAKS, ids=lambda fn: fn.__name__)
def test_a_planted_leak_is_caught_where_n_equals_d(leak):
    report = run(leak, *problem(16, 16, V), n=16, compile_program=False)
    assert {found.where for found in report.traced} == {"forward", "gradient"}, str(report)
    with pytest.raises(AssertionError, match="holds logits"):
        assert_logitless(leak, *problem(16, 16, V), vocab_size=V, num_tokens=16, compile_program=False)


def test_the_source_line_is_the_planted_one():
    report = run(transposed, *problem(), differentiate=())
    line = transposed.__code__.co_firstlineno + 1
    for leaks in (report.traced, report.materialised):
        assert leaks
        assert {leak.source for leak in leaks} == {f"{transposed.__code__.co_filename}:{line}"}


def test_a_saved_softmax_is_caught_in_the_gradient_only_where_it_is():
    @jax.custom_vjp
    def saves(hidden, lm_head, targets):
        return blocked(hidden, lm_head, targets)

    def fwd(hidden, lm_head, targets):
        return blocked(hidden, lm_head, targets), (hidden, lm_head, jax.nn.softmax(hidden @ lm_head))

    def bwd(residuals, d_logprobs):
        hidden, lm_head, p = residuals
        return -(p * d_logprobs[:, None]) @ lm_head.T, -hidden.T @ (p * d_logprobs[:, None]), None

    saves.defvjp(fwd, bwd)
    report = run(saves, *problem())
    assert {leak.where for leak in report.traced} == {"gradient"}
    assert {leak.where for leak in report.materialised} == {"gradient"}


@pytest.mark.parametrize("symbolic_zeros", [False, True])
def test_a_leak_in_a_custom_vjp_backward_pass_is_caught(symbolic_zeros):
    @jax.custom_vjp
    def hides(hidden, lm_head, targets):
        return blocked(hidden, lm_head, targets)

    def fwd(hidden, lm_head, targets):
        if symbolic_zeros:
            hidden, lm_head, targets = hidden.value, lm_head.value, targets.value
        return blocked(hidden, lm_head, targets), (hidden, lm_head, targets)

    def bwd(residuals, d_logprobs):
        return *jax.vjp(lambda h, w: dense(h, w, residuals[2]), *residuals[:2])[1](d_logprobs), None

    hides.defvjp(fwd, bwd, symbolic_zeros=symbolic_zeros)
    report = run(hides, *problem())
    assert {leak.where for leak in report.traced} == {"gradient"}
    assert {leak.where for leak in report.materialised} == {"gradient"}
    assert run(hides, *problem(), differentiate=()).ok


def test_a_fused_one_hot_is_traced_and_not_materialised():
    def every_eighth(hidden, lm_head, targets):
        return (targets[:, None] == jnp.arange(lm_head.shape[1])[None])[:, ::8].astype(jnp.float32)

    report = run(every_eighth, *problem(), differentiate=())
    assert report.traced
    assert not report.materialised
    options: dict[str, Any] = {"vocab_size": V, "num_tokens": N, "differentiate": ()}
    assert_logitless(every_eighth, *problem(), traced=False, **options)
    with pytest.raises(AssertionError, match="traced=False"):
        assert_logitless(every_eighth, *problem(), **options)


def test_dead_logits_are_no_leak():
    def dead(hidden, lm_head, targets):
        _ = jnp.sin(hidden @ lm_head)
        unused, values = jax.jit(lambda h, w, t: (h @ w, blocked(h, w, t)))(hidden, lm_head, targets)
        kept, _ = jax.lax.scan(lambda c, _: (c, hidden @ lm_head), values, None, length=2)
        return kept

    assert run(dead, *problem()).ok


def test_a_feature_axis_does_not_make_a_block_a_leak():
    def products(hidden, lm_head, targets):
        return (hidden[:, :, None] * lm_head[None, :, :BLOCK]).sum(1).max(-1)

    assert run(products, *problem(), differentiate=(), compile_program=False).ok


class LossOutput(NamedTuple):
    loss: Any
    metrics: dict[str, Any]


def test_a_loss_output_is_differentiated_by_its_loss():
    def loss(params, targets, scale, mode):
        logprobs = blocked(params["hidden"], params["lm_head"], targets)
        return LossOutput(-logprobs.mean() * scale, {mode: (logprobs.sum(), jnp.int32(3))})

    hidden, lm_head, targets = problem()
    params = {"hidden": hidden, "lm_head": lm_head, "none": None}
    report = run(loss, params, targets, 2.0, "kl")
    assert report.ok, str(report)
    gradient_bytes = 4 * (N * D + D * V)
    assert report.output_bytes is not None and report.output_bytes > gradient_bytes

    def leaky(params, targets, scale, mode):
        return LossOutput(-dense(params["hidden"], params["lm_head"], targets).mean() * scale, {mode: jnp.float32(0)})

    assert {leak.where for leak in run(leaky, params, targets, 2.0, "kl").traced} == {"forward", "gradient"}


def test_differentiate_names_the_arguments():
    frozen = run(blocked, *problem(), differentiate=0)
    trained = run(blocked, *problem(), differentiate=(0, -2))
    assert frozen.output_bytes is not None and trained.output_bytes is not None
    assert trained.output_bytes - frozen.output_bytes >= 4 * D * V


@pytest.mark.parametrize("d", [D, N])
@pytest.mark.parametrize("layout", ["DV", "VD"])
def test_leading_axes_and_both_layouts(layout, d):
    struct = jax.ShapeDtypeStruct
    head = struct((d, V) if layout == "DV" else (V, d), jnp.bfloat16)
    args = (struct((B, T, d), jnp.bfloat16), head, struct((B, T), jnp.int32))

    def flat(fn, hidden, lm_head, targets):
        lm_head = lm_head if layout == "DV" else lm_head.T
        return fn(hidden.reshape(N, d).astype(jnp.float32), lm_head.astype(jnp.float32), targets.reshape(N)).reshape(
            B, T
        )

    report = run(functools.partial(flat, blocked), *args)
    assert report.ok, str(report)
    assert not run(functools.partial(flat, dense), *args).ok
    three = run(lambda h, w, t: dense(h, w if layout == "DV" else w.T, t), *args)
    assert (B, T, V) in {leak.shape for leak in three.traced}


def test_closed_over_arrays_are_arguments():
    lm_head = np.ones((D, V), np.float32)
    hidden, _, targets = problem()
    assert run(lambda h, t: blocked(h, lm_head, t), hidden, targets).ok
    assert not run(lambda h, t: dense(h, lm_head, t), hidden, targets).ok


def test_a_head_given_in_tiles_has_a_vocabulary_axis():
    hidden, _, targets = problem()
    tiles = jax.ShapeDtypeStruct((D, V // 128, 128), jnp.float32)

    def tiled_dense(hidden, tiles, targets):
        logits = jnp.einsum("nd,dab->nab", hidden, tiles)
        return logits[jnp.arange(N), targets // 128, targets % 128] - jax.nn.logsumexp(logits, axis=(1, 2))

    def tiled_blocked(hidden, tiles, targets):
        return blocked(hidden, tiles.reshape(D, V), targets)

    assert (N, V // 128, 128) in {leak.shape for leak in run(tiled_dense, hidden, tiles, targets).traced}
    report = run(tiled_blocked, hidden, tiles, targets)
    assert report.ok, str(report)


def _scaled_rows(logits, targets):
    """A loss of given logits whose gradient is built row block by row block, in one buffer."""

    def tile(i):
        rows = jax.lax.dynamic_slice_in_dim(logits, i * 4, 4)
        hot = jax.lax.dynamic_slice_in_dim(targets, i * 4, 4)[:, None] == jnp.arange(logits.shape[1])[None]
        return rows, hot

    @jax.custom_vjp
    def lse(logits):
        def step(total, i):
            return total + jax.nn.logsumexp(tile(i)[0], axis=-1).sum(), None

        return jax.lax.scan(step, 0.0, jnp.arange(logits.shape[0] // 4))[0]

    def bwd(logits, d_loss):
        def body(i, out):
            rows = jax.lax.dynamic_slice_in_dim(logits, i * 4, 4)
            return jax.lax.dynamic_update_slice_in_dim(out, d_loss * jax.nn.softmax(rows), i * 4, 0)

        return (jax.lax.fori_loop(0, logits.shape[0] // 4, body, jnp.zeros(logits.shape)),)

    lse.defvjp(lambda logits: (lse(logits), logits), bwd)
    return lse(logits)


def test_logits_that_are_an_argument_are_no_leak_and_their_gradient_may_be_allowed():
    args = jax.ShapeDtypeStruct((N, V), jnp.float32), jax.ShapeDtypeStruct((N,), jnp.int32)
    assert run(_scaled_rows, *args, differentiate=()).ok
    three = jax.ShapeDtypeStruct((B, T, V), jnp.float32), args[1]
    report = run(lambda x, t: _scaled_rows(x.reshape(N, V), t), *three, differentiate=())
    assert report.ok, str(report)
    assert {leak.where for leak in run(_scaled_rows, *args).traced} == {"gradient"}
    report = run(_scaled_rows, *args, allow_outputs=True)
    assert report.ok, str(report)
    assert_logitless(_scaled_rows, *args, vocab_size=V, num_tokens=N, allow_outputs=True)
    report = run(lambda x, t: jnp.sort(x)[:, 3].sum() + _scaled_rows(x, t), *args, allow_outputs=True)
    assert report.traced and report.materialised


def test_a_pallas_kernel_is_judged_by_what_it_returns():
    def kernel(h_ref, w_ref, out_ref):
        out_ref[...] = jnp.max(h_ref[...] @ w_ref[...], axis=-1)

    def full_kernel(h_ref, w_ref, out_ref):
        out_ref[...] = h_ref[...] @ w_ref[...]

    def rowmax(hidden, lm_head):
        call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((N,), jnp.float32), interpret=True)
        return call(hidden, lm_head)

    def full(hidden, lm_head):
        call = pl.pallas_call(full_kernel, out_shape=jax.ShapeDtypeStruct((N, V), jnp.float32), interpret=True)
        return call(hidden, lm_head).max(-1)

    hidden, lm_head, _ = problem()
    options: dict[str, Any] = {"differentiate": (), "compile_program": False}
    report = run(rowmax, hidden, lm_head, **options)
    assert report.ok and report.temp_bytes is None and "not compiled" in str(report)
    assert [leak.primitive for leak in run(full, hidden, lm_head, **options).traced] == ["pallas_call"]


SHARDED = """
import functools, jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from test_audit import blocked, dense, run
mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
for n, d, v in [(64, 16, 512), (64, 64, 512), (64, 8, 512)]:
    def struct(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    args = (struct((n, d), jnp.float32, P("data")), struct((d, v), jnp.float32, P(None, "tensor")),
            struct((n,), jnp.int32, P("data")))
    def local(fn, h, w, t):
        return jax.lax.psum(fn(h, w, t % w.shape[1]), "tensor")
    def tokens(fn, h, w, t):
        return fn(h, jax.lax.all_gather(w, "tensor", axis=1, tiled=True), t)
    for body in (local, tokens):
        def sharded(fn, h, w, t, body=body):
            specs = (P("data"), P(None, "tensor"), P("data"))
            return jax.shard_map(functools.partial(body, fn), mesh=mesh, in_specs=specs, out_specs=P("data"),
                                 check_vma=False)(h, w, t)
        report = run(functools.partial(sharded, functools.partial(blocked, block=64)), *args, n=n, v=v)
        assert report.ok, (body, n, d, str(report))
        report = run(functools.partial(sharded, dense), *args, n=n, v=v)
        assert {x.where for x in report.traced} == {"forward", "gradient"}, (body, n, d, str(report))
        assert report.materialised, (body, n, d, str(report))
    report = run(dense, *args, n=n, v=v)
    assert report.traced and report.materialised, (n, d, str(report))
print("sharded ok")
"""


@pytest.mark.slow
def test_a_shard_counts_by_its_share():
    paths = [str(Path(__file__).parent)]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    code = f"import sys; sys.path[:0] = {paths!r}\n{SHARDED}"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sharded ok" in done.stdout


@pytest.mark.parametrize("sizes", [(0, 8), (8, 0), (-1, 8)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        audit(dense, *problem(), vocab_size=sizes[0], num_tokens=sizes[1])


def test_a_wrong_vocabulary_size_is_refused():
    with pytest.raises(ValueError, match="no argument or closed-over array has a vocabulary axis"):
        audit(dense, *problem(), vocab_size=V * 4, num_tokens=N)


def test_a_position_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no argument at position 3"):
        run(dense, *problem(), differentiate=(0, 3))


def test_the_report_reads_well():
    report = run(dense, *problem(), differentiate=())
    text = str(report)
    assert f"float32[{N}, {V}]" in text and "audit_programs.py:" in text and "temporaries" in text
    leak = Leak((2, 3), "float32", 24, "exp", "forward", "a.py:1")
    assert str(leak) == "float32[2, 3]  0.0 MiB  exp  in the forward  at a.py:1"
    with pytest.raises(AssertionError, match="linear_logprobs"):
        assert_logitless(dense, *problem(), vocab_size=V, num_tokens=N)


# The op itself, through its door.


@pytest.mark.parametrize("d", [D, N])
@pytest.mark.parametrize("layout", ["DV", "VD"])
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_linear_logprobs(implementation, layout, d):
    struct = jax.ShapeDtypeStruct
    head = struct((d, V) if layout == "DV" else (V, d), jnp.float32)
    args = struct((B, T, d), jnp.float32), head, struct((B, T), jnp.int32), struct((V,), jnp.float32)

    def logprobs(hidden, lm_head, targets, bias):
        blocks = {"block_n": 16, "block_v": BLOCK} if implementation == "chunked" else None
        return linear_logprobs(
            hidden, lm_head, targets, bias=bias, layout=layout, implementation=implementation, block_sizes=blocks
        )

    report = run(logprobs, *args)
    if implementation == "chunked":
        assert report.ok, str(report)
    else:
        assert {leak.where for leak in report.traced} == {leak.where for leak in report.materialised}
        assert {leak.where for leak in report.traced} == {"forward", "gradient"}
