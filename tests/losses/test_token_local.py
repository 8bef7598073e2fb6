"""Losses that go in one pass: equal to two passes in value, metrics and every gradient; the others are refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_linear import PAIRS, _case

from logitless import (
    audit,
    linear_cross_entropy,
    linear_dft_loss,
    linear_grpo_loss,
    linear_logprobs,
    linear_policy_loss,
)
from logitless.losses.token_local import with_slope_of

LOCAL = ("policy", "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")


def _run(linear, implementation, options, *, packed=False):
    """Loss, metrics, and gradients of hidden states, head, bias, `kl_coef` and the advantages' factor."""
    case = _case(3)
    if not packed:
        case.pop("segment_ids", None)
    more = {name: case[name] for name in ("ref_logprobs", "rollout_logprobs", "segment_ids") if name in case} | options

    def loss(hidden, lm_head, bias, kl_coef):
        return linear(
            hidden,
            lm_head,
            case["targets"],
            case["old_logprobs"],
            case["advantages"],
            case["mask"],
            layout="VD",
            bias=bias,
            kl="k3",
            kl_coef=kl_coef,
            implementation=implementation,
            **more,
        )

    arrays = (case["hidden"], case["lm_head"], case["bias"], jnp.asarray(0.3))
    return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*map(jnp.asarray, arrays))


def _assert_same(ours, theirs):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12), ours, theirs)


@pytest.mark.parametrize("name", LOCAL)
def test_one_pass_equals_two(x64, name):
    linear, _, more = PAIRS[name]
    one, two = (_run(linear, implementation, more) for implementation in ("one_pass", "chunked"))
    _assert_same(one, two)
    assert float(jnp.abs(one[1][3])) > 0, "kl_coef lost its gradient"


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("corrected", [False, True])
def test_rollout_weights_and_corrected_kl_in_one_pass(x64, mode, corrected):
    options = {"rollout_mode": mode, "rollout_max": 1.2, "kl_bias_correction": corrected, "delta": 1.5}
    one, two = (_run(linear_policy_loss, implementation, options) for implementation in ("one_pass", "chunked"))
    _assert_same(one, two)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "given_total", "constant", "sequence_sum"])
def test_every_aggregation_in_one_pass(x64, aggregation):
    options = {"aggregation": aggregation} | ({"max_completion_length": 6} if aggregation == "constant" else {})
    one, two = (_run(linear_policy_loss, implementation, options) for implementation in ("one_pass", "chunked"))
    _assert_same(one, two)


def test_on_policy_and_traced_options(x64):
    case = _case(4)

    def loss(implementation, hidden, clip_high):
        rest = (case["targets"], None, case["advantages"], case["mask"])
        options = {"layout": "VD", "clip_high": clip_high, "implementation": implementation}
        return linear_grpo_loss(hidden, case["lm_head"], *rest, **options).loss

    one, two = (
        jax.jit(jax.value_and_grad(lambda h, c, i=i: loss(i, h, c), (0, 1)))(case["hidden"], 0.1)
        for i in ("one_pass", "chunked")
    )
    _assert_same(one, two)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ratio_level": "sequence"}, "ratio_level='sequence'"),
        ({"ratio_level": "sequence_token"}, "ratio_level='sequence_token'"),
        ({"surrogate": "vespo"}, "surrogate='vespo'"),
        ({"rollout_level": "sequence"}, "rollout_level='sequence'"),
        ({"entropy_coef": 0.1}, "entropy_coef=0.1"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5"),
    ],
    ids=str,
)
def test_what_is_not_local_is_refused_by_one_pass_and_left_to_chunked_by_auto(x64, options, says):
    with pytest.raises(NotImplementedError, match=rf"linear_policy_loss: .*'one_pass'.*{re.escape(says)}.*'chunked'"):
        _run(linear_policy_loss, "one_pass", options)
    _assert_same(_run(linear_policy_loss, "auto", options), _run(linear_policy_loss, "chunked", options))


def test_statistics_have_no_one_pass():
    with pytest.raises(NotImplementedError, match="linear_token_stats: implementation 'one_pass'.*linear_token_loss"):
        linear_logprobs(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.array([0, 1]), implementation="one_pass")


@pytest.mark.parametrize("loss", [linear_cross_entropy, linear_dft_loss])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_labels_in_one_pass(x64, loss, reduction):
    case = _case(5)
    labels = jnp.where(jnp.asarray(case["mask"]), jnp.asarray(case["targets"]), -100)
    weights = jnp.asarray(np.random.default_rng(0).random(labels.shape))

    def run(implementation):
        def f(hidden, lm_head, bias, weights):
            options = {"layout": "VD", "bias": bias, "implementation": implementation, "reduction": reduction}
            return loss(hidden, lm_head, labels, weights=weights, **options)

        return jax.value_and_grad(f, (0, 1, 2, 3))(case["hidden"], case["lm_head"], case["bias"], weights)

    one, two = run("one_pass"), run("chunked")
    _assert_same(one, two)
    assert float(jnp.max(jnp.abs(one[1][3]))) > 0, "the weights lost their gradient"


@pytest.mark.parametrize(
    ("loss", "options", "says"),
    [
        (linear_cross_entropy, {"label_smoothing": 0.1}, "label_smoothing or z_loss"),
        (linear_cross_entropy, {"z_loss": 0.1}, "label_smoothing or z_loss"),
        (linear_cross_entropy, {"reduction": "none"}, "reduction='none'"),
        (linear_dft_loss, {"reduction": "none"}, "reduction='none'"),
    ],
    ids=["smoothing", "z-loss", "token losses", "token losses of dft"],
)
def test_label_losses_that_are_no_such_sum(loss, options, says):
    inputs = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.array([0, 1])
    with pytest.raises(NotImplementedError, match=rf"{loss.__name__}: .*{re.escape(says)}"):
        loss(*inputs, implementation="one_pass", **options)
    np.testing.assert_array_equal(loss(*inputs, **options), loss(*inputs, implementation="chunked", **options))


def test_a_label_without_probability_is_an_infinite_loss_and_no_nan_gradient():
    hidden, lm_head, bias = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.array([-jnp.inf, 0.0, 0.0, 0.0])

    def loss(hidden, implementation):
        return linear_cross_entropy(hidden, lm_head, jnp.array([0, 1]), bias=bias, implementation=implementation)

    one, two = (jax.value_and_grad(loss)(hidden, name) for name in ("one_pass", "chunked"))
    assert one[0] == two[0] == jnp.inf
    np.testing.assert_allclose(one[1], two[1], atol=1e-7)


def test_auto_takes_one_pass_where_it_may_and_holds_no_logits():
    arrays = jnp.ones((4, 64, 32)), jnp.ones((32, 1000))
    rest = jnp.zeros((4, 64), jnp.int32), None, jnp.ones(4), jnp.ones((4, 64), bool)

    def program(**options):
        return str(jax.make_jaxpr(jax.grad(lambda h: linear_grpo_loss(h, arrays[1], *rest, **options).loss))(arrays[0]))

    assert program() == program(implementation="one_pass")
    assert program(entropy_coef=0.1) == program(entropy_coef=0.1, implementation="chunked")
    report = audit(
        lambda h, w: linear_grpo_loss(h, w, *rest).loss,
        *arrays,
        vocab_size=1000,
        num_tokens=256,
        differentiate=(0, 1),
    )
    assert report.ok, str(report)


def test_with_slope_of_adds_gradients_and_keeps_the_value():
    value, slopes = jax.value_and_grad(lambda x, y: with_slope_of(3 * x, 5 * y), (0, 1))(2.0, jnp.inf)
    assert value == 6.0
    assert slopes == (3.0, 5.0)


@pytest.mark.parametrize("as_array", [jnp.asarray, np.asarray])
def test_numbers_given_as_arrays(as_array):
    inputs = jnp.ones((1, 2, 3)), jnp.zeros((3, 4)), jnp.array([[0, 3]]), None, jnp.array([0.5]), jnp.array([[1, 1]])
    options = {"clip_low": as_array(0.1), "kl_coef": as_array(0.0), "total": as_array(4), "aggregation": "given_total"}
    assert linear_policy_loss(*inputs, kl="none", **options).loss == -0.25
