"""What `linear_token_loss` runs: blocks that are skipped, products that nobody asked for, logits, residuals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.audit import assert_logitless
from logitless.losses.linear_distillation import linear_distillation_loss
from logitless.ops import one_pass
from logitless.ops.api import linear_logprobs, linear_token_loss
from logitless.ops.blocks import cut_tokens
from problems import dynamic_loops, equations, in_layout, peaked
from token_loss_oracle import assert_close, clipped, loss_of, weighted_nll


def slopes_at_the_probes_are_zero(logprob, weight):
    slope = weight
    for probe in one_pass.PROBES:
        slope *= logprob - probe
    return jax.lax.stop_gradient(slope) * logprob


@pytest.fixture
def tiles(monkeypatch):
    """How many tiles of logits, and of logit gradients, `one_pass` really runs."""
    ran = {"logits_tile": 0, "d_logits_tile": 0}

    def counted(name, original):
        def run(*args):
            jax.debug.callback(lambda: ran.update({name: ran[name] + 1}))
            return original(*args)

        return run

    for name in ran:
        monkeypatch.setattr(one_pass, name, counted(name, getattr(one_pass, name)))
    return ran


@pytest.mark.parametrize(
    ("weights", "mask", "logits", "d_logits"),
    [
        (np.ones(16), None, 16, 16),
        (np.arange(16) % 2, None, 16, 8),
        (np.arange(16) % 8 == 3, None, 16, 4),
        (np.zeros(16), None, 16, 0),
        (np.arange(16) % 2, np.arange(16) % 4 != 1, 12, 4),
        (np.arange(16) % 2, np.arange(16) % 2 == 0, 8, 0),
        (np.ones(16), np.arange(16) == 9, 4, 4),
        (np.ones(16), np.zeros(16), 0, 0),
    ],
    ids=["all", "every other", "two", "none", "masked", "masked out", "one", "all masked"],
)
def test_blocks_without_a_slope_are_not_walked_again(tiles, weights, mask, logits, d_logits):
    # Four blocks of four tokens, four blocks of columns.
    problem = peaked(16, 6, 40, "float32")
    counts = None if mask is None else jnp.asarray(mask, bool)
    options = {"block_sizes": {"block_n": 4, "block_v": 10}, "mask": counts}
    # A new function is a new program, traced with the counters in it.
    run = loss_of(problem, "one_pass", jnp.asarray(weights, jnp.float32), lambda x, weight: -weight * x, **options)
    gradients = jax.grad(run, (0, 1))(*problem[:2])
    jax.effects_barrier()
    assert tiles == {"logits_tile": logits, "d_logits_tile": d_logits}
    plain = loss_of(problem, "reference", jnp.asarray(weights, jnp.float32), mask=counts)
    for x, y in zip(gradients, jax.grad(plain, (0, 1))(*problem[:2]), strict=True):
        assert_close(x, y, rtol=1e-4, atol=2e-5)


def test_a_block_whose_slopes_vanish_at_its_own_logprobs_is_not_walked_again(tiles):
    problem = peaked(16, 6, 40, "float32")
    problem = problem._replace(hidden=problem.hidden / 20)
    logprobs = linear_logprobs(*problem[:3], layout="VD")
    # Ratio 2 and a positive advantage: clipped, which the probes do not show.
    run = {"layout": "VD", "implementation": "one_pass", "block_sizes": {"block_n": 4, "block_v": 10}}
    arguments = (logprobs - jnp.where(jnp.arange(16) < 8, 0.7, 0.1), jnp.ones(16))
    token_loss = lambda x, old, advantage: clipped(x, old, advantage, 1.0)  # noqa: E731 - a new program
    jax.grad(lambda h: linear_token_loss(h, problem.lm_head, problem.targets, token_loss, arguments, **run)[0])(
        problem.hidden
    )
    jax.effects_barrier()
    assert tiles == {"logits_tile": 16, "d_logits_tile": 8}


def test_a_wrong_guess_of_the_probes_costs_no_digits():
    problem = peaked(37, 24, 301, "float32")
    gradients = (
        jax.grad(loss_of(problem, name, 1e-3, slopes_at_the_probes_are_zero), (0, 1))(*problem[:2])
        for name in ("one_pass", "reference")
    )
    for x, y in zip(*gradients, strict=True):
        assert_close(x, y, rtol=1e-3, atol=1e-5 * np.abs(y).max())


@settings(max_examples=40, deadline=None)
@given(data=st.data(), count=st.sampled_from([1, 2, 7, 12]), size=st.sampled_from([1, 3, 4, 20]))
def test_cut_tokens_lists_each_token_that_counts_once_the_last_ones_behind(data, count, size):
    bits = st.lists(st.booleans(), min_size=count, max_size=count)
    mask, last = (data.draw(st.none() | bits) for _ in range(2))
    arrays = [None if x is None else jnp.asarray(x, bool) for x in (mask, last)]
    tokens = cut_tokens(arrays[0], count, size, arrays[1])
    kept = [i for i in range(count) if mask is None or mask[i]]
    behind = [i for i in kept if last is not None and last[i]]
    expected = [i for i in kept if i not in behind] + behind
    order, slots = np.asarray(tokens.order), np.asarray(tokens.slots)
    assert order[: len(kept)].tolist() == expected and (order[len(kept) :] >= count).all()
    assert [slots[i] for i in expected] == list(range(len(kept)))
    assert all(slots[i] >= len(order) for i in range(count) if i not in kept)
    assert tokens.size == size and len(order) % tokens.size == 0 and len(order) < count + tokens.size
    assert tokens.blocks == -(-len(kept) // tokens.size)
    x = jnp.arange(1, count + 1)
    front = tokens.gather(x, -7)
    assert front.tolist() == [i + 1 for i in expected] + [-7] * (len(order) - len(kept))
    assert tokens.scatter(front).tolist() == [i + 1 if i in kept else 0 for i in range(count)]


def test_the_number_of_blocks_walked_is_decided_at_run_time():
    problem = peaked(64, 8, 200, "float32")
    for mask, blocks in ((None, 0), (problem.mask, 1)):
        loss = loss_of(problem, "one_pass", mask=mask)
        assert dynamic_loops(loss, *problem[:2]) == blocks
        assert dynamic_loops(jax.grad(loss, (0, 1)), *problem[:2]) == blocks + 1


def test_a_call_that_nobody_differentiates_is_the_forward_pass_of_chunked():
    problem = peaked(64, 16, 400, "float32")
    for mask in (None, problem.mask):
        texts = []
        for implementation in ("one_pass", "chunked"):
            loss = loss_of(problem, implementation, mask=mask)
            shapes = {v.aval.shape for e in equations(jax.make_jaxpr(loss)(*problem[:2]).jaxpr) for v in e.outvars}
            assert problem.lm_head.shape not in shapes
            texts.append((jax.jit(loss).lower(*problem[:2]).compile().as_text() or "").count(" dot("))
        assert texts == [1, 1]
        assert_close(*(loss_of(problem, name, mask=mask)(*problem[:2]) for name in ("one_pass", "chunked")), rtol=1e-5)


@pytest.mark.parametrize("layout", ["DV", "VD"])
@pytest.mark.parametrize(("wrt", "products"), [((0,), 2), ((1,), 2), ((2,), 1), ((0, 1), 3), ((0, 1, 2), 3)], ids=str)
def test_40_what_is_frozen_costs_no_gradient(layout, wrt, products):
    # 60 tokens in 64 places; no other array has 64 or 4096 of anything.
    problem = peaked(60, 24, 4096, "float32")
    head = in_layout(problem.lm_head, layout)

    def loss(hidden, lm_head, bias):
        sizes = {"block_n": 16, "block_v": 256}
        return loss_of(problem, "one_pass", layout=layout, block_sizes=sizes, bias=bias)(hidden, lm_head)

    program = jax.jit(jax.grad(loss, wrt)).lower(problem.hidden, head, problem.bias).compile()
    text = program.as_text()
    assert text is not None and text.count(" dot(") == products
    made = [line for line in text.splitlines() if "parameter(" not in line and "get-tuple-element" not in line]
    of_the_head = any(f"= f32[{a},{b}]" in line for line in made for a, b in (head.shape, head.shape[::-1]))
    assert of_the_head == (1 in wrt)
    memory = program.memory_analysis()
    assert memory is not None
    if 1 not in wrt:
        # The logits of a block, its loops' carries; not the head's 393,216 bytes.
        assert memory.temp_size_in_bytes < 16 * 4096 * 4 + head.size * 4 // 4
    if layout == "VD":
        # Here the gradient of the hidden states is summed up as [D, places], which the hidden states are not.
        eqns = equations(jax.make_jaxpr(jax.grad(loss, wrt))(problem.hidden, head, problem.bias).jaxpr)
        assert ((24, 64) in {v.aval.shape for e in eqns for v in e.outvars}) == (0 in wrt)


def of_stats(implementation):
    return lambda h, w, t: linear_logprobs(h, w, t, layout="VD", implementation=implementation).sum()


def of_loss(implementation):
    run = {"layout": "VD", "implementation": implementation}
    return lambda h, w, t: linear_token_loss(h, w, t, weighted_nll, (1.0,), **run)[0]


CALLS = {
    "linear_logprobs chunked": of_stats("chunked"),
    "linear_token_loss chunked": of_loss("chunked"),
    "linear_token_loss one_pass": of_loss("one_pass"),
    "linear_distillation_loss": lambda h, w, t: linear_distillation_loss(h, w, 2 * h[::-1], w[::-1], layout="VD"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("frozen", "n"), [("hidden", 9), ("lm_head", 11)])
@pytest.mark.slow
def test_two_calls_of_one_program_that_differ_in_what_is_frozen(call, frozen, n):
    # JAX keeps one tree of residuals for both: the first call once took its choice from the second, and got zeros.
    stop = jax.lax.stop_gradient
    for later in (False, True):
        # A size of its own: what has been differentiated before is kept, and right.
        problem = peaked(n + later, 6, 90, "float32")
        inputs, one = problem[:2], functools.partial(CALLS[call], t=problem.targets)

        def other(h, w, one=one):
            return one(stop(h), w) if frozen == "hidden" else one(h, stop(w))

        if later:
            _, pull = jax.vjp(one, *inputs)
            first = jax.grad(other, 0 if frozen == "lm_head" else 1)(*inputs)
            both = pull(jnp.ones(()))
            place = 0 if frozen == "lm_head" else 1
            both = [x + first if i == place else x for i, x in enumerate(both)]
        else:
            both = jax.grad(lambda h, w, one=one, other=other: one(h, w) + other(h, w), (0, 1))(*inputs)
        expected = (jax.grad(one, (0, 1))(*inputs), jax.grad(other, (0, 1))(*inputs))
        for x, y, z in zip(both, *expected, strict=True):
            assert_close(x, y + z, rtol=1e-4, atol=1e-4)
            assert np.abs(y).max() > 1e-3


@pytest.mark.parametrize(
    ("layout", "n", "v", "masked"),
    [("DV", 512, 2000, False), ("VD", 512, 2000, False), ("VD", 512, 700, True), ("DV", 64, 900, True)],
)
def test_the_program_holds_no_logits(layout, n, v, masked):
    problem = peaked(n, 24, v, "bfloat16" if masked else "float32")
    mask = problem.mask if masked else None
    loss = loss_of(problem, "one_pass", layout=layout, mask=mask, block_sizes=None)
    assert_logitless(loss, problem.hidden, in_layout(problem.lm_head, layout), vocab_size=v, num_tokens=n)
