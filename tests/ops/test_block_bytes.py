"""`block_bytes`: the most bytes of logits that any implementation holds, whatever other sizes are given."""

import jax
import jax.numpy as jnp
import pytest

from logitless._arrays import tracing_for
from logitless.losses.linear import linear_cross_entropy, linear_policy_loss
from logitless.losses.linear_distillation import linear_distillation_loss
from logitless.ops.api import linear_token_loss, linear_token_stats, token_stats
from problems import equations, peaked
from token_loss_oracle import weighted_nll

N, D, V = 1201, 24, 3000
PROBLEM = peaked(N, D, V, "float32")


def tiles(loss, *args) -> set[tuple[int, ...]]:
    """Shapes of every array of two axes, none of them hidden columns: blocks of logits and what is as large."""
    jaxpr = jax.make_jaxpr(jax.grad(loss, tuple(range(len(args)))))(*args)
    shapes = {v.aval.shape for e in equations(jaxpr.jaxpr) for v in e.outvars}
    return {shape for shape in shapes if len(shape) == 2 and not {1, D, N} & set(shape)}


def largest(loss, *args) -> int:
    """Bytes of the largest of them in float32."""
    return max(4 * a * b for a, b in tiles(loss, *args))


SIZES = [{}, {"block_n": 300}, {"block_n": 7}, {"block_v": 500}, {"block_v": 50}, {"block_n": 20, "block_v": 30}]


@pytest.mark.parametrize("given", [2**12, 2**15, 400_000])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_block_of_logits_stays_within_its_bytes(sizes, given):
    blocks = {**sizes, "block_bytes": given}
    run = {"layout": "VD", "implementation": "chunked", "block_sizes": blocks}

    def loss(h, w):
        return linear_token_stats(h, w, PROBLEM.targets, outputs=("logprobs", "entropy"), **run).entropy.sum()

    def divergence(h, w):
        return linear_distillation_loss(h, w, h, w, kind="reverse_kl", **run)

    assert largest(loss, *PROBLEM[:2]) <= given
    # Nor does it waste them.
    assert largest(loss, *PROBLEM[:2]) >= given // 2 or sizes
    if given > 2**12:
        # Two tiles of logits live at a time.
        assert largest(divergence, *PROBLEM[:2]) <= given // 2


@pytest.mark.parametrize("given", [2**15, 400_000])
def test_one_pass_keeps_as_many_rows_as_its_bytes_hold_beside_a_tile(given):
    blocks = {"block_bytes": given, "block_v": 500}

    def loss(h, w):
        options = {"layout": "VD", "implementation": "one_pass", "block_sizes": blocks}
        return linear_token_loss(h, w, PROBLEM.targets, weighted_nll, (1.0,), **options)[0]

    shapes = tiles(loss, *PROBLEM[:2])
    tokens = given // (4 * (V + 500))
    assert shapes == {(V, tokens), (500, tokens)}


@pytest.mark.parametrize("given", [2**15, 400_000])
def test_a_block_of_given_logits_stays_within_its_bytes(given):
    logits = jnp.zeros((N, V))

    def stats(x):
        return token_stats(x, PROBLEM.targets, outputs=("lse",), block_sizes={"block_bytes": given}).lse

    jaxpr = jax.make_jaxpr(stats)(logits)
    sliced = {v.aval.shape for e in equations(jaxpr.jaxpr) if e.primitive.name == "dynamic_slice" for v in e.outvars}
    (width,) = {shape[1] for shape in sliced if len(shape) == 2}
    assert given / 2 <= 4 * N * width <= given


def test_auto_leaves_one_pass_where_its_bytes_are_too_few():
    rows = 4 * (V + V // 4)

    def shapes(implementation, given):
        options = {"layout": "VD", "implementation": implementation, "block_sizes": {"block_bytes": given}}

        def loss(h, w):
            return linear_cross_entropy(h, w, PROBLEM.targets, **options)

        def policy(h, w):
            out = linear_policy_loss(
                h[None], w, PROBLEM.targets[None], None, jnp.ones(1), jnp.ones((1, N), bool), **options
            )
            return out.loss

        found = tiles(loss, *PROBLEM[:2]), tiles(policy, *PROBLEM[:2])
        assert found[0] == found[1]
        return found[0]

    assert any(V in shape for shape in shapes("auto", 64 * rows))
    assert not any(V in shape for shape in shapes("auto", 64 * rows - 1))
    assert any(V in shape for shape in shapes("one_pass", 2 * rows))
    with pytest.raises(ValueError, match=f"block_bytes={rows - 1} hold the logits of 0 tokens over V = 3000"):
        shapes("one_pass", rows - 1)


def test_bytes_that_hold_no_block_are_refused():
    for sizes, needed in (({"block_bytes": 3}, 4), ({"block_n": 20, "block_v": 30, "block_bytes": 2399}, 2400)):
        with pytest.raises(ValueError, match=rf"linear_token_stats: block_sizes=.* has {needed} bytes of float32"):
            linear_token_stats(*PROBLEM[:3], layout="VD", block_sizes=sizes)


def test_auto_is_chunked_on_a_tpu_and_one_pass_is_what_was_asked_for():
    def shapes(implementation):
        def loss(h, w):
            return linear_cross_entropy(h, w, PROBLEM.targets, layout="VD", implementation=implementation)

        with tracing_for("tpu", "TPU v6 lite"):
            return tiles(loss, *PROBLEM[:2])

    assert not any(V in shape for shape in shapes("auto"))
    assert any(V in shape for shape in shapes("one_pass"))
