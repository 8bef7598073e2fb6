import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless._arrays import accumulator
from logitless.gradcheck import gradcheck

TOKENS, WIDTH, VOCAB = 61, 24, 131


def problem(dtype=jnp.float32, tokens=TOKENS):
    """Peaked for half of the tokens, a few of them masked."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((tokens, WIDTH)).astype(np.float32)
    lm_head = (rng.standard_normal((WIDTH, VOCAB)) / math.sqrt(WIDTH)).astype(np.float32)
    targets = rng.integers(0, VOCAB, tokens)
    sure = np.arange(0, tokens, 2)
    lm_head[:, targets[sure]] = (20 * hidden[sure] / np.sum(hidden[sure] ** 2, axis=1, keepdims=True)).T
    return {
        "hidden": jnp.asarray(hidden).astype(dtype),
        "lm_head": jnp.asarray(lm_head).astype(dtype),
        "targets": jnp.asarray(targets),
        "weights": jnp.asarray(rng.standard_normal(tokens).astype(np.float32)),
        "mask": jnp.asarray(rng.random(tokens) < 0.8),
    }


def logprobs_of(logits, targets, mask):
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    return jnp.where(mask, logprobs, jnp.zeros_like(logprobs))


def plain(hidden, lm_head, targets, weights, mask):
    wide = accumulator(hidden.dtype)
    logits = jnp.matmul(hidden, lm_head, preferred_element_type=wide)
    logprobs = logprobs_of(logits, targets, mask)
    return -jnp.mean(weights * logprobs), logprobs


def by_hand(backward):
    """`plain` with a gradient written by hand: `backward(hidden, lm_head, d_logits)` gives the two gradients."""

    @jax.custom_vjp
    def op(hidden, lm_head, targets, mask):
        return forward(hidden, lm_head, targets, mask)[0]

    def forward(hidden, lm_head, targets, mask):
        logits = jnp.matmul(hidden, lm_head, preferred_element_type=jnp.float32)
        return logprobs_of(logits, targets, mask), (hidden, lm_head, targets, mask, jax.nn.softmax(logits))

    def pull(residuals, d_logprobs):
        hidden, lm_head, targets, mask, p = residuals
        d_logprobs = jnp.where(mask, d_logprobs, jnp.zeros_like(d_logprobs))
        d_logits = d_logprobs[:, None] * (jax.nn.one_hot(targets, VOCAB, dtype=p.dtype) - p)
        return (*backward(hidden, lm_head, d_logits), None, None)

    op.defvjp(forward, pull)

    def candidate(hidden, lm_head, targets, weights, mask):
        logprobs = op(hidden, lm_head, targets, mask)
        return -jnp.mean(weights * logprobs), logprobs

    return candidate


def right(hidden, lm_head, d_logits):
    d_logits = d_logits.astype(hidden.dtype)
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    return product(d_logits, lm_head.T).astype(hidden.dtype), product(hidden.T, d_logits).astype(lm_head.dtype)


def wrong_sign_of_one_column(hidden, lm_head, d_logits):
    d_hidden, d_lm_head = right(hidden, lm_head, d_logits)
    return d_hidden, d_lm_head.at[:, 7].multiply(-1)


def summed_in_16_bits(hidden, lm_head, d_logits):
    d_hidden, d_lm_head = right(hidden, lm_head, d_logits)
    d_lm_head = jnp.zeros_like(d_lm_head)
    for i in range(hidden.shape[0]):
        d_lm_head = d_lm_head + jnp.outer(hidden[i].astype(jnp.float32), d_logits[i]).astype(d_lm_head.dtype)
    return d_hidden, d_lm_head


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_right_candidate_passes(dtype):
    report = gradcheck(by_hand(right), plain, problem(dtype), block_sizes={"block_v": 64})
    assert report.ok, str(report)
    assert 0 < report.spent <= 1
    assert "passed" in str(report)


def test_a_wrong_sign_is_caught_and_the_worst_element_is_named():
    report = gradcheck(by_hand(wrong_sign_of_one_column), plain, problem())
    assert not report.ok
    (failure,) = report.failures
    worst = next(budget.worst for budget in report.budgets if budget.name == "d_lm_head")
    assert worst is not None
    assert worst.place[1] == 7
    assert worst.candidate == pytest.approx(-worst.oracle, rel=1e-3)
    assert worst.plain == pytest.approx(worst.oracle, rel=1e-3)
    assert failure.startswith("d_lm_head: error")
    assert f"worst element {worst}" in failure
    assert failure in str(report)


def test_a_head_gradient_summed_in_bfloat16_is_caught():
    report = gradcheck(by_hand(summed_in_16_bits), plain, problem(jnp.bfloat16, tokens=256))
    assert [failure.split(":")[0] for failure in report.failures] == ["d_lm_head"]


def test_a_mask_that_the_backward_pass_forgets_is_caught():
    args = problem()

    def forgets(hidden, lm_head, targets, weights, mask):
        loss, logprobs = plain(hidden, lm_head, targets, weights, mask)
        leak = plain(hidden, lm_head, targets, weights, ~mask)[0]
        return loss + leak - jax.lax.stop_gradient(leak), logprobs

    report = gradcheck(forgets, plain, args)
    worst = next(budget.worst for budget in report.budgets if budget.name == "d_hidden")
    assert not report.ok
    assert worst is not None
    assert not args["mask"][worst.place[0]]
    assert worst.oracle == 0.0


def test_a_nan_is_the_worst_element():
    def broken(hidden, lm_head, targets, weights, mask):
        loss, logprobs = plain(hidden, lm_head, targets, weights, mask)
        return loss, logprobs.at[3].set(jnp.nan)

    report = gradcheck(broken, plain, problem())
    assert [failure.split(":")[0] for failure in report.failures] == ["logprobs"]
    assert "worst element [3] candidate nan" in report.failures[0]
    assert report.record()["fwd/logp_max_abs"] == "inf"


def test_a_finite_number_where_the_oracle_has_none_is_caught():
    def minus_infinity(hidden, lm_head, targets, weights, mask):
        loss, logprobs = plain(hidden, lm_head, targets, weights, mask)
        return loss, logprobs.at[3].set(-jnp.inf)

    assert gradcheck(minus_infinity, minus_infinity, problem()).ok
    assert not gradcheck(plain, minus_infinity, problem()).ok


def test_an_oracle_without_a_finite_loss_proves_nothing():
    report = gradcheck(plain, plain, problem() | {"weights": jnp.full(TOKENS, jnp.nan)})
    assert any("the oracle's loss is nan, which proves nothing" in failure for failure in report.failures)


def test_a_wrong_loss_is_caught():
    def off(**args):
        loss, logprobs = plain(**args)
        return loss * 1.01, logprobs

    failed = {failure.split(":")[0] for failure in gradcheck(off, plain, problem()).failures}
    assert failed == {"loss", "d_hidden", "d_lm_head"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda loss, logprobs: (loss, logprobs[:-1]),
            "logprobs: the candidate gave float32[60] where float32[61] is due",
        ),
        (lambda loss, logprobs: (loss.astype(jnp.bfloat16), logprobs), "loss: the candidate gave bfloat16[]"),
        (lambda loss, logprobs: (logprobs, logprobs), "it must give (scalar loss, logprobs)"),
    ],
)
def test_a_result_of_the_wrong_shape_or_dtype_is_a_failure(change, message):
    report = gradcheck(lambda **args: change(*plain(**args)), plain, problem())
    assert any(message in failure for failure in report.failures)


def test_at_logits_level_the_gradient_of_the_logits_is_judged():
    args = problem()
    args = {
        "logits": args["hidden"] @ args["lm_head"],
        "targets": args["targets"],
        "mask": args["mask"],
    }

    def loss(logits, targets, mask):
        logprobs = logprobs_of(logits, targets, mask)
        return -logprobs.mean(), logprobs

    report = gradcheck(loss, loss, args, gates={"dlogits_max_rel": 1e-5})
    assert report.ok
    assert {"dlogits_max_abs", "dlogits_max_rel"} < set(report.record())
    assert report.vocab == VOCAB


def test_the_record_is_flat_json_with_the_logged_names():
    record = gradcheck(plain, plain, problem(), block_sizes={"block_v": 64}).record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert not any(isinstance(value, dict) for value in record.values())
    names = "loss_ref loss_kernel abs_diff_loss fwd/logp_max_abs dhidden_max_abs dhidden_max_rel dlm_head_max_abs"
    assert set(names.split()) | {"shape/vocab", "shape/tokens", "blocks/block_v"} < set(record)
    assert record["shape/vocab"] == VOCAB
    assert record["shape/tokens"] == TOKENS
    assert record["budget/abs_diff_loss/allowed"] > 0


def test_an_absolute_gate_is_judged_on_top_of_the_budget():
    report = gradcheck(plain, plain, problem(), gates={"dhidden_max_abs": 1e-30})
    assert len(report.failures) == 1
    assert "dhidden_max_abs" in report.failures[0]
    assert "above its gate 1e-30" in report.failures[0]


def test_a_floor_replaces_the_default():
    report = gradcheck(by_hand(wrong_sign_of_one_column), plain, problem(), floors={"dlm_head_max_abs": 1e3})
    assert report.ok


def test_of_several_orders_the_largest_error_of_the_plain_loss_counts():
    def plain(hidden):
        first, second, third = hidden
        return first + second + third, hidden

    def candidate(hidden):
        loss, logprobs = plain(hidden)
        return loss + 1.5, logprobs

    exact, lossy = (jnp.asarray(x, jnp.float32) for x in ([1e8, -1e8, 1.0], [1e8, 1.0, -1e8]))
    rest: Any = {"floors": {"abs_diff_loss": 0.0}}
    alone = gradcheck(candidate, plain, {"hidden": exact}, **rest)
    assert [failure.split(":")[0] for failure in alone.failures] == ["loss"]
    report = gradcheck(candidate, plain, {"hidden": exact}, **rest, reordered=[{"hidden": lossy}])
    assert report.ok and report.budgets[0].plain_error == 1.0


def test_a_float32_oracle_needs_no_float64():
    report = gradcheck(plain, plain, problem(jnp.bfloat16), oracle_dtype="float32")
    assert report.ok
    assert report.record()["oracle_dtype"] == "float32"


def test_float64_is_left_as_it_was():
    gradcheck(plain, plain, problem())
    assert jnp.asarray(np.ones(1)).dtype == jnp.float32


def test_no_tokens_at_all():
    def sums(hidden, lm_head, targets, weights, mask):
        logprobs = plain(hidden, lm_head, targets, weights, mask)[1]
        return jnp.sum(logprobs), logprobs

    report = gradcheck(sums, sums, {name: x[:0] if name != "lm_head" else x for name, x in problem().items()})
    assert report.ok
    assert report.tokens == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"differentiate": ["hiden"]}, "differentiate names 'hiden', but args holds hidden, lm_head"),
        ({"differentiate": ["targets"]}, "'targets' is int32; only floating arrays"),
        ({"differentiate": []}, "nothing to differentiate"),
        ({"oracle_dtype": "bfloat16"}, "give 'float64' or 'float32'"),
        ({"factor": 0.0}, "factor is 0.0"),
        ({"gates": {"dhiden": 1.0}}, "gates has dhiden; known here: abs_diff_loss"),
        ({"floors": {"dhidden_max_rel": 1.0}}, "floors has dhidden_max_rel"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        gradcheck(plain, plain, problem(), **options)


def test_a_plain_function_of_the_wrong_kind_is_refused():
    with pytest.raises(ValueError, match=r"must give \(loss, logprobs\), the loss a scalar"):
        gradcheck(plain, lambda **args: (plain(**args)[1], plain(**args)[0]), problem())
