"""The contract of the door: shapes, masks, transforms, skipping, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.audit import assert_logitless
from logitless.ops.api import (
    linear_logprobs,
    linear_token_stats,
    token_logprobs,
    token_stats,
)
from problems import HERE, LOGITS_HERE, assert_in_budget, dynamic_loops, peaked

every = pytest.mark.parametrize("implementation", HERE)
blocked = pytest.mark.parametrize("implementation", [name for name in HERE if name != "reference"])
SMALL = {"block_n": 8, "block_v": 50}


def assert_close(x, y, **kwargs):
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), **{"rtol": 2e-5, "atol": 2e-6, **kwargs})


def logprob_sum(problem, implementation, **options):
    run = {"layout": "VD", "implementation": implementation, "block_sizes": SMALL, **options}
    return lambda h, w: linear_logprobs(h, w, problem.targets, **run).sum()


@every
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3), (2, 0, 3), (2, 3, 4)])
def test_any_leading_axes(implementation, shape):
    rng = np.random.default_rng(0)
    hidden, lm_head = jnp.asarray(rng.normal(size=(*shape, 6)), jnp.float32), jnp.ones((6, 40), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 40, shape), jnp.int32)
    run = functools.partial(linear_token_stats, outputs=("logprobs", "lse", "entropy", "mean_logits"))
    out = run(hidden, lm_head, targets, implementation=implementation)
    for value in out:
        assert value.shape == shape and value.dtype == jnp.float32
    assert_close(out.logprobs, np.full(shape, -np.log(40)))
    gradient = jax.grad(lambda h: run(h, lm_head, targets, implementation=implementation).lse.sum())(hidden)
    assert gradient.shape == hidden.shape
    flat = token_stats(hidden @ lm_head, targets, implementation=implementation)
    assert flat.entropy.shape == shape


@every
def test_masked_tokens_may_hold_anything_and_give_zero(implementation):
    problem = peaked(37, 24, 301, "float32")
    bad = jnp.where(problem.mask[:, None], problem.hidden, jnp.nan)
    bad = bad.at[jnp.argmin(problem.mask)].set(jnp.inf)
    targets = jnp.where(problem.mask, problem.targets, -100)

    def run(hidden, lm_head, targets, mask):
        out = linear_token_stats(
            hidden,
            lm_head,
            targets,
            mask=mask,
            layout="VD",
            outputs=("logprobs", "lse", "entropy", "mean_logits"),
            implementation=implementation,
            block_sizes=SMALL,
        )
        return sum(x.sum() for x in out), out

    def both(hidden, targets, mask):
        gradients, out = jax.grad(run, (0, 1), has_aux=True)(hidden, problem.lm_head, targets, mask)
        return out, gradients

    clean_out, clean = both(problem.hidden, problem.targets, problem.mask)
    for mask in (problem.mask, problem.mask.astype(jnp.int32) * -3, problem.mask.astype(jnp.bfloat16)):
        out, gradients = both(bad, targets, mask)
        for x, y in zip((*out, *gradients), (*clean_out, *clean), strict=True):
            np.testing.assert_array_equal(x, y)
        for x in out:
            assert (np.asarray(x)[~np.asarray(problem.mask)] == 0).all()
    assert (np.asarray(gradients[0])[~np.asarray(problem.mask)] == 0).all()


@every
def test_all_tokens_masked(implementation):
    problem = peaked(5, 3, 7, "bfloat16")
    mask = jnp.zeros(5, bool)
    value, gradients = jax.value_and_grad(logprob_sum(problem, implementation, mask=mask), (0, 1))(
        problem.hidden, problem.lm_head
    )
    assert value == 0
    for gradient, x in zip(gradients, problem[:2], strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype and (gradient == 0).all()


@blocked
def test_tokens_with_zero_cotangents_are_never_computed(implementation):
    # Only a token whose block is never run can hold NaN without spoiling the head's gradient.
    problem = peaked(37, 24, 301, "float32")
    weights = jnp.where(problem.mask, 1.5, 0.0)
    spoilt = jnp.where(problem.mask[:, None], problem.hidden, jnp.nan)

    def loss(hidden, lm_head):
        run = {"layout": "VD", "implementation": implementation, "block_sizes": SMALL}
        return jnp.vdot(weights, jnp.where(problem.mask, linear_logprobs(hidden, lm_head, problem.targets, **run), 0.0))

    for x, y in zip(
        jax.grad(loss, (0, 1))(spoilt, problem.lm_head),
        jax.grad(loss, (0, 1))(problem.hidden, problem.lm_head),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


@blocked
def test_the_number_of_token_blocks_is_decided_at_run_time(implementation):
    problem = peaked(64, 8, 200, "float32")
    loss = logprob_sum(problem, implementation)
    assert not dynamic_loops(loss, *problem[:2])
    assert dynamic_loops(jax.grad(loss), *problem[:2])
    masked = logprob_sum(problem, implementation, mask=problem.mask)
    assert dynamic_loops(masked, *problem[:2])


@blocked
@pytest.mark.parametrize("layout", ["DV", "VD"])
def test_40_a_frozen_head_costs_no_gradient(implementation, layout):
    problem = peaked(64, 16, 4096, "float32")
    head = problem.lm_head if layout == "VD" else problem.lm_head.T

    def compiled(argnums):
        loss = logprob_sum(problem, implementation, layout=layout, block_sizes={"block_v": 256})
        program = jax.jit(jax.grad(loss, argnums)).lower(problem.hidden, head).compile()
        text = program.as_text()
        assert text is not None
        return program, text

    frozen, text = compiled(0)
    trained, trained_text = compiled((0, 1))
    assert text.count(" dot(") == 3 and trained_text.count(" dot(") == 4
    head_bytes = head.size * 4
    memory = frozen.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < head_bytes
    # Nothing that the frozen program makes has the head's shape, in either order of axes.
    made = [line for line in text.splitlines() if "parameter(" not in line and "get-tuple-element" not in line]
    assert not any(f"= f32[{a},{b}]" in line for line in made for a, b in [head.shape, head.shape[::-1]])


@blocked
def test_the_program_holds_no_logits(implementation):
    problem = peaked(64, 24, 900, "bfloat16")
    for mask in (None, problem.mask):
        loss = logprob_sum(problem, implementation, mask=mask, block_sizes=None)
        assert_logitless(loss, problem.hidden, problem.lm_head, vocab_size=900, num_tokens=64)


@every
def test_44_a_token_does_not_depend_on_its_batch(implementation):
    problem = peaked(37, 24, 301, "float32")
    run = functools.partial(linear_logprobs, layout="VD", implementation=implementation)
    alone = run(problem.hidden[:1], problem.lm_head, problem.targets[:1])
    for size in (3, 8, 37):
        for block_n in (1, 2, 64):
            some = run(problem.hidden[:size], problem.lm_head, problem.targets[:size], block_sizes={"block_n": block_n})
            assert_close(some[:1], alone, rtol=1e-5)


@every
def test_jit_vmap_scan_and_remat_agree_with_eager(implementation):
    problems = [peaked(11, 6, 90, "float32", seed) for seed in range(3)]
    hidden, targets, mask = (jnp.stack([p[i] for p in problems]) for i in (0, 2, 4))
    lm_head = problems[0].lm_head

    def loss(hidden, lm_head, targets, mask):
        run = {"layout": "VD", "implementation": implementation, "block_sizes": {"block_n": 4, "block_v": 32}}
        out = linear_token_stats(hidden, lm_head, targets, mask=mask, softcap=30.0, **run)
        return out.logprobs.sum() + 0.3 * out.entropy.sum()

    both = jax.value_and_grad(loss, (0, 1))
    eager = [both(hidden[i], lm_head, targets[i], mask[i]) for i in range(3)]
    eager = jax.tree.map(lambda *x: jnp.stack(x), *eager)
    vmapped = jax.vmap(both, in_axes=(0, None, 0, 0))(hidden, lm_head, targets, mask)
    each = jax.lax.map(lambda x: both(x[0], lm_head, *x[1:]), (hidden, targets, mask))
    remat = jax.vmap(jax.value_and_grad(jax.checkpoint(loss), (0, 1)), in_axes=(0, None, 0, 0))
    remat = jax.jit(remat)(hidden, lm_head, targets, mask)

    def through_scan(hidden, lm_head):
        def step(total, x):
            return total + loss(x[0], lm_head, *x[1:]), None

        return jax.lax.scan(step, jnp.zeros(()), (hidden, targets, mask))[0]

    scanned = jax.jit(jax.value_and_grad(through_scan, (0, 1)))(hidden, lm_head)
    for other in (vmapped, each, remat):
        jax.tree.map(functools.partial(assert_close, rtol=1e-4, atol=1e-5), other, eager)
    assert_close(scanned[0], eager[0].sum(), rtol=1e-5)
    assert_close(scanned[1][0], eager[1][0], rtol=1e-4, atol=1e-5)
    assert_close(scanned[1][1], eager[1][1].sum(0), rtol=1e-4, atol=1e-5)


@every
def test_vmap_over_heads(implementation):
    problem = peaked(11, 6, 90, "float32")
    heads = jnp.stack([problem.lm_head, 2 * problem.lm_head])
    loss = logprob_sum(problem, implementation)
    values, gradients = jax.vmap(jax.value_and_grad(loss, 1), in_axes=(None, 0))(problem.hidden, heads)
    for i in range(2):
        value, gradient = jax.value_and_grad(loss, 1)(problem.hidden, heads[i])
        assert_close(values[i], value)
        assert_close(gradients[i], gradient, rtol=1e-4, atol=1e-5)


@blocked
def test_forward_mode_and_second_derivatives_raise(implementation):
    problem = peaked(5, 3, 7, "float32")
    loss = logprob_sum(problem, implementation)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda h: loss(h, problem.lm_head), (problem.hidden,), (problem.hidden,))
    with pytest.raises(NotImplementedError, match="second derivative; use implementation='reference'"):
        jax.hessian(lambda h: loss(h, problem.lm_head))(problem.hidden)
    with pytest.raises(NotImplementedError, match="second derivative"):
        jax.hessian(lambda z: token_logprobs(z, problem.targets, implementation=implementation).sum())(jnp.ones((5, 7)))


@blocked
@pytest.mark.parametrize("option", ["temperature", "softcap", "logit_scale"])
def test_a_gradient_of_a_scalar_is_refused_not_zero(implementation, option):
    problem = peaked(5, 3, 7, "float32")

    def loss(x):
        return logprob_sum(problem, implementation, **{option: x})(problem.hidden, problem.lm_head)

    with pytest.raises(NotImplementedError, match="stop_gradient"):
        jax.grad(loss)(1.5)
    assert jnp.isfinite(jax.jit(loss)(1.5)) and jnp.isnan(jax.jit(loss)(-1.5))


@every
def test_logits_dtype_rounds_the_logits(implementation):
    problem = peaked(11, 6, 90, "float32")
    run = functools.partial(linear_logprobs, layout="VD", implementation=implementation)
    rounded = run(problem.hidden, problem.lm_head, problem.targets, logits_dtype="bfloat16")
    logits = (problem.hidden @ problem.lm_head.T).astype(jnp.bfloat16).astype(jnp.float32)
    assert_close(rounded, token_logprobs(logits, problem.targets), rtol=1e-5)
    assert not np.allclose(rounded, run(problem.hidden, problem.lm_head, problem.targets), rtol=1e-5)


def test_30_bf16_logits_lose_nothing_beyond_their_own_rounding():
    logits = (peaked(11, 6, 90, "float32").hidden @ peaked(11, 6, 90, "float32").lm_head.T).astype(jnp.bfloat16)
    targets = jnp.arange(11)
    for implementation in LOGITS_HERE:
        run = functools.partial(token_stats, implementation=implementation)
        for x, y in zip(run(logits, targets)[:3], run(logits.astype(jnp.float32), targets)[:3], strict=True):
            np.testing.assert_array_equal(x, y)
        gradient = jax.grad(lambda z, run=run: run(z, targets).logprobs.sum())(logits)
        assert gradient.dtype == jnp.bfloat16


@every
def test_mixed_dtypes_give_each_gradient_its_own(implementation):
    problem = peaked(11, 6, 90, "float32")
    hidden = problem.hidden.astype(jnp.bfloat16)
    gradients = jax.grad(logprob_sum(problem, implementation), (0, 1))(hidden, problem.lm_head)
    assert gradients[0].dtype == jnp.bfloat16 and gradients[1].dtype == jnp.float32


@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(0, 9),
    d=st.integers(1, 5),
    v=st.integers(1, 11),
    block_n=st.integers(1, 10),
    block_v=st.integers(1, 12),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    layout=st.sampled_from(["DV", "VD"]),
    data=st.data(),
)
@pytest.mark.slow
def test_any_sizes_masks_and_blocks_agree_with_the_reference(n, d, v, block_n, block_v, dtype, layout, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    mask = jnp.asarray(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool).reshape(n)
    hidden = jnp.asarray(rng.normal(size=(n, d)), dtype)
    lm_head = jnp.asarray(rng.normal(size=(d, v) if layout == "DV" else (v, d)), dtype)
    targets = jnp.asarray(rng.integers(0, v, n), jnp.int32)

    def loss(hidden, lm_head, implementation):
        sizes = {"block_n": block_n, "block_v": block_v}
        run = {"layout": layout, "implementation": implementation, "block_sizes": sizes, "mask": mask}
        out = linear_token_stats(hidden, lm_head, targets, **run)
        return out.logprobs.sum() + out.entropy.sum() + out.lse.sum()

    ours, plain = (
        jax.value_and_grad(loss, (0, 1))(hidden, lm_head, implementation) for implementation in ("chunked", "reference")
    )
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(x, np.float64)) for x in (hidden, lm_head))
        oracle = jax.value_and_grad(loss, (0, 1))(*wide, "reference")
    leaves = zip(*(jax.tree.leaves(result) for result in (ours, plain, oracle)), strict=True)
    for name, (one, two, right) in zip(("loss", "d_hidden", "d_lm_head"), leaves, strict=True):
        # Arrays of a few elements: plain jnp is at times right by luck.
        assert_in_budget(name, one, two, right, ulps=16.0, by_row=False)


HIDDEN, HEAD, TARGETS = jnp.ones((2, 3, 4)), jnp.ones((4, 7)), jnp.zeros((2, 3), jnp.int32)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"targets": jnp.zeros((2, 4), jnp.int32)},
            ValueError,
            r"hidden of shape \(2, 3, 4\), targets of shape \(2, 4\)",
        ),
        ({"lm_head": jnp.ones((7, 4))}, ValueError, r"lm_head of shape \(7, 4\).*layout=\"VD\" would fit"),
        ({"lm_head": jnp.ones((5, 7))}, ValueError, r"lm_head must hold D = 4 on axis 0"),
        ({"lm_head": jnp.ones((4, 0))}, ValueError, r"\(4, 0\).*empty head"),
        ({"hidden": jnp.ones((2, 3, 0)), "lm_head": jnp.ones((0, 7))}, ValueError, r"\(0, 7\).*empty head"),
        ({"lm_head": jnp.ones(4)}, ValueError, r"two axes"),
        ({"bias": jnp.ones(4)}, ValueError, r"bias of shape \(4,\).*\[V\] = \[7\]"),
        ({"mask": jnp.ones((2, 2))}, ValueError, r"mask of shape \(2, 2\), targets of shape \(2, 3\)"),
        ({"targets": jnp.zeros((2, 3))}, TypeError, r"targets is float32"),
        ({"hidden": jnp.ones((2, 3, 4), jnp.int32)}, TypeError, r"hidden is int32"),
        ({"targets": TARGETS.at[1, 0].set(7)}, ValueError, r"targets\[1, 0\] is 7, outside the vocabulary of 7"),
        ({"temperature": 0.0}, ValueError, r"temperature=0; it must be a finite number above 0"),
        ({"temperature": jnp.ones(2)}, ValueError, r"temperature of shape \(2,\)"),
        ({"logit_scale": -1.0}, ValueError, r"logit_scale=-1"),
        ({"softcap": 0.0}, ValueError, r"softcap=0"),
        ({"softcap": float("nan")}, ValueError, r"softcap=nan"),
        ({"implementation": "chunkd"}, ValueError, r"unknown; known: auto, reference, .*; did you mean 'chunked'"),
        ({"layout": "VV"}, ValueError, r"layout='VV' is unknown"),
        ({"outputs": ("logprob",)}, ValueError, r"did you mean 'logprobs'"),
        ({"layout": "dv"}, ValueError, r"layout='dv' is unknown; known: DV, VD; did you mean 'DV'"),
        ({"outputs": ()}, ValueError, r"outputs=\(\)"),
        ({"block_sizes": {"block_m": 8}}, ValueError, r"block_m"),
        ({"block_sizes": {"block_n": 0}}, ValueError, r"block_n.*at least 1"),
        ({"logits_dtype": "int8"}, ValueError, r"logits_dtype='int8'"),
        ({"sharding": "data"}, TypeError, r"sharding is 'data'; give a logitless.HeadSharding"),
    ],
)
def test_bad_input_is_refused_with_what_was_given_and_what_is_needed(change, error, says):
    arguments = {"hidden": HIDDEN, "lm_head": HEAD, "targets": TARGETS, **change}
    with pytest.raises(error, match=says):
        linear_token_stats(**arguments)


def test_logits_level_refusals():
    run = token_stats
    with pytest.raises(ValueError, match=r"logits of shape \(2, 5\), targets of shape \(3,\)"):
        run(jnp.ones((2, 5)), jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="empty vocabulary"):
        run(jnp.ones((2, 0)), jnp.zeros(2, jnp.int32))
    with pytest.raises(TypeError, match="logits is int32"):
        run(jnp.ones((2, 5), jnp.int32), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match=r"targets\[1\] is 5"):
        run(jnp.ones((2, 5)), jnp.array([0, 5]))


def test_auto_never_holds_the_logits():
    problem = peaked(64, 24, 900, "float32")
    assert_logitless(logprob_sum(problem, "auto", block_sizes=None), *problem[:2], vocab_size=900, num_tokens=64)
