"""The contract of `linear_token_loss` beside its digits: masks, arguments, transforms, impossible targets, refusals."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.ops.api import linear_logprobs, linear_token_loss
from problems import TOKEN_LOSS_HERE, in_layout, peaked
from token_loss_oracle import SMALL_BLOCKS, assert_close, clipped, loss_of, weighted_nll

# What one pass has alone: the others are a sum over statistics, whose own tests ask the same of them.
one_pass = pytest.mark.parametrize("implementation", ["one_pass"])
every = pytest.mark.parametrize("implementation", TOKEN_LOSS_HERE)
blocked = pytest.mark.parametrize("implementation", [x for x in TOKEN_LOSS_HERE if x != "reference"])


def log_of_weight(logprob, weight):
    """NaN, value and slope, wherever the weight is below 0."""
    return -jnp.log(weight) * logprob


@every
def test_masked_tokens_may_hold_anything(implementation):
    problem = peaked(37, 24, 301, "float32")
    masked = ~problem.mask
    bad = jnp.where(problem.mask[:, None], problem.hidden, jnp.nan).at[jnp.argmin(problem.mask)].set(jnp.inf)
    weights = jnp.asarray(np.random.default_rng(1).uniform(1.5, 3.0, 37), jnp.float32)

    def both(hidden, targets, weights, mask):
        run = {"layout": "VD", "implementation": implementation, "block_sizes": SMALL_BLOCKS, "mask": mask}
        return jax.value_and_grad(
            lambda h, w: linear_token_loss(h, w, targets, log_of_weight, (weights,), **run), (0, 1), has_aux=True
        )(hidden, problem.lm_head)

    clean = both(problem.hidden, problem.targets, weights, problem.mask)
    targets = jnp.where(problem.mask, problem.targets, -100)
    for fill in (-1.0, jnp.nan, jnp.inf, 0.0):
        given = jnp.where(problem.mask, weights, fill)
        for mask in (problem.mask, problem.mask.astype(jnp.int32) * -3, problem.mask.astype(jnp.bfloat16)):
            spoilt = both(bad, targets, given, mask)
            jax.tree.map(np.testing.assert_array_equal, spoilt, clean)
    (value, logprobs), (d_hidden, d_lm_head) = clean
    assert np.isfinite(value) and np.isfinite(d_lm_head).all() and np.abs(d_lm_head).max() > 0
    assert (np.asarray(logprobs)[masked] == 0).all() and (np.asarray(d_hidden)[masked] == 0).all()
    run = {"layout": "VD", "implementation": "reference", "mask": problem.mask}
    expected = linear_logprobs(problem.hidden, problem.lm_head, problem.targets, **run)
    assert_close(logprobs, expected, rtol=1e-5)
    assert_close(value, -(np.log(weights) * np.asarray(expected)).sum(), rtol=1e-5)


@every
@pytest.mark.parametrize("layout", ["DV", "VD"])
def test_all_tokens_masked(implementation, layout):
    problem = peaked(5, 3, 7, "bfloat16")
    options = {"mask": jnp.zeros(5, bool), "layout": layout, "implementation": implementation, "bias": problem.bias}
    inputs = (jnp.full_like(problem.hidden, jnp.nan), in_layout(problem.lm_head, layout), problem.bias)

    def loss(hidden, lm_head, bias):
        run = options | {"bias": bias}
        return linear_token_loss(hidden, lm_head, problem.targets, weighted_nll, (jnp.nan,), **run)

    (value, logprobs), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*inputs)
    assert value.dtype == jnp.float32 and value == 0 and (logprobs == 0).all()
    for gradient, x in zip(gradients, inputs, strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype and (gradient == 0).all()


@one_pass
@pytest.mark.parametrize("shape", [(), (2, 0, 3), (2, 3), (2, 3, 4)])
def test_any_leading_axes(implementation, shape):
    rng = np.random.default_rng(0)
    hidden, lm_head = jnp.asarray(rng.normal(size=(*shape, 6)), jnp.float32), jnp.ones((6, 40), jnp.float32)
    targets, weights = (jnp.asarray(rng.integers(1, 40, shape), dtype) for dtype in (jnp.int32, jnp.float32))

    def loss(hidden, lm_head):
        run = {"implementation": implementation, "mask": jnp.ones(shape, bool)}
        return linear_token_loss(hidden, lm_head, targets, weighted_nll, (weights,), **run)

    (value, logprobs), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, lm_head)
    assert value.shape == () and logprobs.shape == shape and value.dtype == logprobs.dtype == jnp.float32
    assert_close(logprobs, np.full(shape, -np.log(40)))
    assert_close(value, np.log(40) * np.asarray(weights).sum(), rtol=1e-5)
    d_z = np.asarray(weights)[..., None] * (1 / 40 - np.eye(40)[np.asarray(targets)])
    assert gradients[0].shape == hidden.shape
    assert_close(gradients[0], d_z.sum(-1, keepdims=True) * np.ones(6), atol=1e-4)
    assert_close(gradients[1], np.asarray(hidden).reshape(-1, 6).T @ d_z.reshape(-1, 40), rtol=1e-4, atol=1e-5)


def typed(logprob, on, times, kind, total):
    """Bool, integer and float arguments of one token, and a number for all of them."""
    weight = jnp.where(on, times.astype(logprob.dtype), jnp.where(kind == 200, 0.25, 2.0).astype(logprob.dtype))
    return -weight * logprob / total


@every
def test_arguments_of_any_dtype_and_single_numbers(implementation):
    problem = peaked(37, 24, 301, "float32")
    rng = np.random.default_rng(2)
    on, times, kind = rng.random(37) < 0.5, rng.integers(-3, 4, 37), rng.choice([7, 200], 37)
    weights = np.where(on, times, np.where(kind == 200, 0.25, 2.0)) / 7
    wanted = jax.value_and_grad(loss_of(problem, implementation, jnp.asarray(weights, jnp.float32)), (0, 1))

    def loss(hidden, lm_head, total):
        arguments = (jnp.asarray(on), jnp.asarray(times, jnp.int8), np.asarray(kind, np.uint8), total)
        run = {"layout": "VD", "implementation": implementation, "block_sizes": SMALL_BLOCKS}
        # The mask that keeps all makes the arguments travel.
        run |= {"mask": jnp.ones(37, bool)}
        return linear_token_loss(hidden, lm_head, problem.targets, typed, arguments, **run)[0]

    for total in (7, np.float32(7)):
        value, gradients = jax.value_and_grad(loss, (0, 1))(problem.hidden, problem.lm_head, total)
        expected = wanted(problem.hidden, problem.lm_head)
        assert_close(value, expected[0], rtol=1e-5)
        for x, y in zip(gradients, expected[1], strict=True):
            assert_close(x, y, rtol=1e-4, atol=1e-5)


@every
def test_python_numbers_give_way_to_the_dtype_of_the_logprob(x64, implementation):
    problem = peaked(5, 3, 7, "float32")
    for number in (2, 2.0):
        assert loss_of(problem, implementation, number)(*problem[:2]).dtype == jnp.float32


@every
def test_no_gradient_flows_to_the_arguments(implementation):
    problem = peaked(11, 6, 90, "float32")

    def loss(hidden, weights, total):
        run = {"layout": "VD", "implementation": implementation}
        arguments = (weights, jnp.ones(11), total)
        return linear_token_loss(hidden, problem.lm_head, problem.targets, clipped, arguments, **run)[0]

    inputs = (problem.hidden, jnp.linspace(-3.0, -1.0, 11), jnp.asarray(7.0))
    d_hidden, d_weights, d_total = jax.grad(loss, (0, 1, 2))(*inputs)
    assert np.abs(d_hidden).max() > 0 and (d_weights == 0).all() and d_total == 0
    alone = jax.grad(loss, (1, 2))(*inputs)
    assert (alone[0] == 0).all() and alone[1] == 0


@one_pass
@pytest.mark.slow
def test_jit_vmap_scan_and_remat_agree_with_eager(implementation):
    problems = [peaked(11, 6, 90, "float32", seed) for seed in range(3)]
    hidden, targets, mask = (jnp.stack([p[i] for p in problems]) for i in (0, 2, 4))
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(3, 11)) * (np.arange(11) % 3 > 0), jnp.float32)
    lm_head = problems[0].lm_head

    def loss(hidden, lm_head, targets, mask, weights):
        run = {"layout": "VD", "implementation": implementation, "block_sizes": {"block_n": 4, "block_v": 32}}
        return linear_token_loss(hidden, lm_head, targets, weighted_nll, (weights,), mask=mask, softcap=30.0, **run)[0]

    both = jax.value_and_grad(loss, (0, 1))
    batch = (targets, mask, weights)
    eager = [both(hidden[i], lm_head, *(x[i] for x in batch)) for i in range(3)]
    eager = jax.tree.map(lambda *x: jnp.stack(x), *eager)
    axes = (0, None, 0, 0, 0)
    vmapped = jax.vmap(both, axes)(hidden, lm_head, *batch)
    remat = jax.jit(jax.vmap(jax.value_and_grad(jax.checkpoint(loss), (0, 1)), axes))(hidden, lm_head, *batch)

    def through_scan(hidden, lm_head):
        def step(total, x):
            return total + loss(x[0], lm_head, *x[1:]), None

        return jax.lax.scan(step, jnp.zeros(()), (hidden, *batch))[0]

    def through_vmap(hidden, lm_head):
        return jax.vmap(loss, axes)(hidden, lm_head, *batch).sum()

    for other in (vmapped, remat):
        jax.tree.map(functools.partial(assert_close, rtol=1e-4, atol=1e-5), other, eager)
    for through in (through_scan, through_vmap):
        value, gradients = jax.jit(jax.value_and_grad(through, (0, 1)))(hidden, lm_head)
        assert_close(value, eager[0].sum(), rtol=1e-5)
        assert_close(gradients[0], eager[1][0], rtol=1e-4, atol=1e-5)
        assert_close(gradients[1], eager[1][1].sum(0), rtol=1e-4, atol=1e-5)


@one_pass
def test_vmap_over_heads_over_weights_and_over_numbers(implementation):
    problem = peaked(11, 6, 90, "float32")
    heads = jnp.stack([problem.lm_head, 2 * problem.lm_head])
    weights = jnp.stack([jnp.ones(11), jnp.where(jnp.arange(11) < 6, 0.0, 2.0)])
    each = (heads, weights)

    def both(head, weights):
        return jax.value_and_grad(loss_of(problem, implementation, weights), (0, 1))(problem.hidden, head)

    expected = jax.tree.map(lambda *x: jnp.stack(x), *(both(*(x[i] for x in each)) for i in range(2)))
    jax.tree.map(functools.partial(assert_close, rtol=1e-4, atol=1e-5), jax.vmap(both)(*each), expected)
    numbers = jax.vmap(lambda x: both(problem.lm_head, x)[1][0])(jnp.asarray([1.0, 0.0, -2.0]))
    assert_close(numbers, jnp.asarray([1.0, 0.0, -2.0])[:, None, None] * expected[1][0][0][None], rtol=1e-4, atol=1e-5)


@every
def test_a_training_step_may_donate_the_head(implementation):
    problem = peaked(11, 6, 90, "float32")

    def step(lm_head, hidden):
        value, gradient = jax.value_and_grad(loss_of(problem, implementation), 1)(hidden, lm_head)
        return lm_head - 0.1 * gradient, value

    head = problem.lm_head + 0.0
    new, value = jax.jit(step, donate_argnums=0)(head, problem.hidden)
    assert head.is_deleted()
    expected, expected_value = jax.jit(step)(problem.lm_head, problem.hidden)
    assert_close(new, expected)
    assert_close(value, expected_value)


def test_forward_mode_and_second_derivatives_raise():
    problem = peaked(5, 3, 7, "float32")
    for name in ("one_pass", "chunked"):
        loss = loss_of(problem, name)
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda h, loss=loss: loss(h, problem.lm_head), (problem.hidden,), (problem.hidden,))
        with pytest.raises(NotImplementedError, match=f"'{name}' has no second derivative; use .*'reference'"):
            jax.hessian(lambda h, loss=loss: loss(h, problem.lm_head))(problem.hidden)
    reference = loss_of(problem, "reference")
    assert jnp.isfinite(jax.hessian(lambda h: reference(h, problem.lm_head))(problem.hidden)).all()


@blocked
@pytest.mark.parametrize("option", ["temperature", "softcap", "logit_scale"])
def test_a_gradient_of_a_scalar_is_refused_not_zero(implementation, option):
    problem = peaked(5, 3, 7, "float32")

    def loss(x):
        return loss_of(problem, implementation, **{option: x})(*problem[:2])

    with pytest.raises(NotImplementedError, match=f"'{implementation}' does not differentiate.*stop_gradient"):
        jax.grad(loss)(1.5)
    assert jnp.isfinite(jax.jit(loss)(1.5)) and jnp.isnan(jax.jit(loss)(-1.5))


def squared(logprob):
    """Its slope is NaN where the log-probability is."""
    return logprob * logprob


@every
def test_16_a_target_outside_the_vocabulary(implementation):
    problem = peaked(11, 6, 90, "float32")

    def loss(hidden, lm_head, targets, mask):
        run = {"layout": "VD", "implementation": implementation, "block_sizes": SMALL_BLOCKS, "mask": mask}
        return linear_token_loss(hidden, lm_head, targets, squared, **run)

    both = jax.value_and_grad(loss, (0, 1), has_aux=True)
    traced, others = jax.jit(both), jnp.arange(11) != 4
    (value, wanted), expected = traced(*problem[:3], others)
    assert np.isfinite(value)
    for wrong in (90, -1):
        targets = problem.targets.at[4].set(wrong)
        with pytest.raises(
            ValueError, match=rf"linear_token_loss: targets\[4\] is {wrong}, outside the vocabulary of 90"
        ):
            both(*problem[:2], targets, None)
        (value, logprobs), gradients = traced(*problem[:2], targets, jnp.ones(11, bool))
        assert np.isnan(value) and np.isnan(logprobs).tolist() == [i == 4 for i in range(11)]
        assert_close(logprobs[others], wanted[others], rtol=1e-5)
        for x, y in zip(gradients, expected, strict=True):
            assert_close(x, y, rtol=1e-4, atol=1e-4)


@every
def test_a_target_without_probability_sends_nothing_back(implementation):
    problem = peaked(11, 6, 90, "float32")
    bias = jnp.zeros(90).at[problem.targets[4]].set(-jnp.inf)
    shared = np.asarray(problem.targets) == int(problem.targets[4])

    def loss(hidden, lm_head, bias, mask):
        run = {
            "layout": "VD",
            "implementation": implementation,
            "block_sizes": SMALL_BLOCKS,
            "bias": bias,
            "mask": mask,
        }
        return linear_token_loss(hidden, lm_head, problem.targets, weighted_nll, (1.0,), **run)

    both = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    (value, logprobs), gradients = both(*problem[:2], bias, None)
    assert value == jnp.inf and (np.asarray(logprobs) == -np.inf).tolist() == shared.tolist()
    _, expected = both(*problem[:2], bias, jnp.asarray(~shared))
    for x, y in zip(gradients, expected, strict=True):
        assert np.isfinite(x).all()
        assert_close(x, y, rtol=1e-4, atol=1e-4)


@one_pass
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_row_without_a_finite_logit_spoils_no_other(implementation, dtype):
    lm_head, targets = jnp.asarray([[1.0, -1.0], [1.0, 2.0]], dtype), jnp.asarray([0, 1, 1])
    hidden = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], dtype)
    spoilt = hidden.at[1, 1].set(-jnp.inf)

    def loss(hidden, mask):
        # One block: its other rows share the unit of float16 with the spoilt one.
        run = {"implementation": implementation, "mask": mask, "block_sizes": {"block_n": 3}}
        return linear_token_loss(hidden, lm_head, targets, weighted_nll, (100.0,), **run)

    gradient, logprobs = jax.grad(loss, has_aux=True)(spoilt, None)
    expected, wanted = jax.grad(loss, has_aux=True)(hidden, jnp.asarray([True, False, True]))
    assert np.isnan(logprobs[1])
    for x, y in ((logprobs, wanted), (gradient, expected)):
        np.testing.assert_allclose(np.asarray(x)[[0, 2]], np.asarray(y)[[0, 2]], rtol=1e-5)


@every
def test_bad_input_is_refused_with_what_was_given_and_what_is_needed(implementation):
    hidden, head, targets = jnp.ones((2, 3, 4)), jnp.ones((4, 7)), jnp.zeros((2, 3), jnp.int32)
    nll = weighted_nll
    run = functools.partial(linear_token_loss, implementation=implementation)
    with pytest.raises(ValueError, match=r"token_args\[1\] of shape \(3,\), targets of shape \(2, 3\); each must have"):
        run(hidden, head, targets, lambda x, a, b: -x, (1.0, jnp.ones(3)))
    with pytest.raises(ValueError, match=r"token_args\[0\] of shape \(6,\), targets of shape \(2, 3\)"):
        run(hidden, head, targets, nll, (jnp.ones(6),))
    wrong: tuple[Any, ...] = (
        lambda x: jnp.stack([x, x]),
        lambda x: x > 0,
        lambda x: jnp.int32(1),
        lambda x: (x, x),
        lambda x: None,
    )
    for bad in wrong:
        with pytest.raises(
            ValueError, match="token_loss gives .*for one token; it must give one floating-point number"
        ):
            run(hidden, head, targets, bad)
    with pytest.raises(ValueError, match=r"hidden of shape \(2, 3, 4\), targets of shape \(2, 4\)"):
        run(hidden, head, jnp.zeros((2, 4), jnp.int32), nll, (1.0,))
    with pytest.raises(ValueError, match=r"mask of shape \(2, 2\), targets of shape \(2, 3\)"):
        run(hidden, head, targets, nll, (1.0,), mask=jnp.ones((2, 2)))
    with pytest.raises(ValueError, match=r"temperature=0; it must be a finite number above 0"):
        run(hidden, head, targets, nll, (1.0,), temperature=0.0)
    with pytest.raises(TypeError, match=r"linear_token_loss: sharding is 'data'; give a logitless.HeadSharding"):
        run(hidden, head, targets, nll, (1.0,), sharding="data")  # pyright: ignore[reportArgumentType]


def test_unknown_names():
    arguments = (jnp.ones((2, 4)), jnp.ones((4, 7)), jnp.zeros(2, jnp.int32), weighted_nll, (1.0,))
    known = "unknown; known: auto, one_pass, reference, chunked, .*; did you mean 'one_pass'"
    with pytest.raises(ValueError, match=known):
        linear_token_loss(*arguments, implementation="onepass")
    with pytest.raises(NotImplementedError, match="one_pass.*use linear_token_loss, or another implementation"):
        linear_logprobs(*arguments[:3], implementation="one_pass")
    with pytest.raises(ValueError, match=r"block_m"):
        linear_token_loss(*arguments, block_sizes={"block_m": 8})
    auto, own = (linear_token_loss(*arguments, implementation=name)[0] for name in ("auto", "one_pass"))
    assert auto == own


@every
def test_a_traced_value_from_around_the_loss_is_refused(implementation):
    problem = peaked(5, 3, 7, "float32")

    def loss(total, hidden):
        return loss_of(problem, implementation, token_loss=lambda x, w: -x * w / total)(hidden, problem.lm_head)

    for traced in (jax.jit(jax.grad(loss, 1)), jax.grad(loss, 0)):
        with pytest.raises(
            ValueError, match="token_loss reads a traced value from outside itself; give it in token_args"
        ):
            traced(2.0, problem.hidden)
    assert_close(loss(jnp.asarray(2.0), problem.hidden), loss(1.0, problem.hidden) / 2)
