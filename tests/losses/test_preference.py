"""Preference losses against numpy float64: values, gradients, what counts, infinities, from hidden states."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, central_differences
from policy_inputs import as_jax, assert_same
from preference_inputs import ARRAYS, CASES, CHOSEN, CLOSE, LOSSES, MASK, OPTIONS, REJECTED, B, expected_loss, odds, run

from logitless import LossOutput, add_metrics, linear_logprobs, mean_metrics
from logitless.losses.preference import (
    cpo_loss,
    dpo_loss,
    kto_loss,
    log1mexp,
    orpo_loss,
    sequence_logprobs,
    simpo_loss,
)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_values_and_gradients_equal_numpy(x64, name, options):
    value, _, gradients = run(name, options)
    assert value.dtype == "float64"
    assert_close(value, expected_loss(name, ARRAYS, options), **CLOSE)
    for moved, gradient in gradients.items():
        expected = np.zeros_like(ARRAYS[moved])
        if moved in LOSSES[name].moves:
            expected = central_differences(
                lambda x, m=moved: expected_loss(name, ARRAYS | {m: x}, options), ARRAYS[moved]
            )
        assert_close(gradient, expected, rtol=1e-7, atol=1e-9, what=f"gradient by {moved}")


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_104_every_option_alone_changes_the_value(x64, name, options):
    assert abs(float(run(name, options)[0]) - float(run(name, {})[0])) > 5e-4


@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        # A margin of 1: softplus of -0.1; the square of 1 - 5; 1 - 0.1
        ("dpo", {}, 0.6443966600735709),
        ("dpo", {"label_smoothing": 0.1}, 0.6543966600735709),
        ("dpo", {"kind": "ipo"}, 16.0),
        ("ipo", {}, 16.0),
        ("dpo", {"kind": "hinge"}, 0.9),
        # softplus of -(2 - 0.5); softplus of -0.1, and 1
        ("simpo", {}, 0.2014132779827524),
        ("cpo", {}, 1.6443966600735709),
        # odds of 1/2 are 1, of 1/3 are 1/2: 1 + 0.1 ln(3/2)
        ("orpo", {}, 1.0405465108108164),
        # Sigmoid of -0.1 times 1 - 0.5
        ("kto", {}, 0.4875026035157896),
    ],
)
def test_goldens(dtype, name, options, value):
    one = {n: np.array([x]) for n, x in {"chosen": -1.0, "rejected": -2.0, "chosen_nll": 1.0}.items()}
    one |= {"ref_chosen": np.zeros(1), "ref_rejected": np.zeros(1)}
    one |= {"logprobs": np.zeros(1), "ref_logprobs": -np.ones(1), "desirable": np.array([True]), "kl": np.array(0.5)}
    if name == "orpo":
        one |= {"chosen": np.log([0.5]), "rejected": np.log([1 / 3])}
    loss = run(name, options, one, dtype)[0]
    assert loss.dtype == dtype
    assert_close(loss, value, rtol=1e-14 if dtype == "float64" else 3e-7)


def test_metrics_are_sums_and_counts_over_what_counts(x64):
    h_chosen, h_rejected = np.array([-0.4, -0.8, -0.1]) * 0.5, np.array([0.2, -0.3, -0.1]) * 0.5
    pairs = {
        "reward_chosen": (h_chosen.sum(), 3),
        "reward_rejected": (h_rejected.sum(), 3),
        "reward_margin": ((h_chosen - h_rejected).sum(), 3),
        "accuracy": (0, 3),
    }
    options = {"beta": 0.5, "mask": MASK}
    _same_metrics(run("dpo", options)[1], pairs)
    _same_metrics(run("ipo", options)[1], pairs)
    pairs = {
        "reward_chosen": (-2.3, 3),
        "reward_rejected": (-1.55, 3),
        "reward_margin": (-0.75, 3),
        "accuracy": (1, 3),
    }
    _same_metrics(run("simpo", options)[1], pairs)
    _same_metrics(run("cpo", options)[1], pairs | {"nll": (4.6, 3)})
    log_odds = sum(math.log(odds(CHOSEN[i]) / odds(REJECTED[i])) for i in (0, 2, 3))
    _same_metrics(run("orpo", options)[1], pairs | {"nll": (4.6, 3), "log_odds": (log_odds, 3)})
    good_and_bad = {"reward_chosen": (-0.6, 2), "reward_rejected": (-0.05, 1), "kl": (0.9, 3)}
    _same_metrics(run("kto", options)[1], good_and_bad)
    assert mean_metrics(run("kto", options)[1])["kl"] == pytest.approx(0.3)


def _same_metrics(metrics: dict[str, Any], expected: Mapping[str, tuple[float, float]]) -> None:
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(metrics[name], value, **CLOSE, what=name)


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_and_references_carry_no_gradient(x64, name):
    loss, given = LOSSES[name], as_jax(ARRAYS)
    fixed = [n for n in loss.takes if n not in (*loss.moves, "desirable")]
    _, _, gradients = run(name, {})
    for n in fixed:
        assert not np.any(gradients[n]), n

    def metrics(*arrays: Any) -> Any:
        return jax.tree.reduce(jnp.add, loss.call(*arrays).metrics)

    positions = tuple(i for i, n in enumerate(loss.takes) if n != "desirable")
    for gradient in jax.grad(metrics, positions)(*[given[n] for n in loss.takes]):
        assert not np.any(gradient)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [0, 4])
def test_76_nothing_that_counts_gives_zero(dtype, name, size):
    nan = {n: np.full(size, np.nan) for n in ARRAYS if n not in ("desirable", "kl")} | {"desirable": np.ones(size)}
    options = {} if size == 0 else {"mask": np.zeros(size)}
    value, metrics, gradients = run(name, options, nan, dtype)
    assert value.dtype == dtype and value == 0
    for n, gradient in gradients.items():
        assert_close(gradient, np.zeros(() if n == "kl" else size), what=n)
    for n, metric in metrics.items():
        assert_close(metric, (0, 0), what=n)


@pytest.mark.parametrize("wild", [np.nan, np.inf, -np.inf, 1e4])
@pytest.mark.parametrize("name", LOSSES)
def test_what_the_mask_leaves_out_is_not_read(x64, name, wild):
    floats = [n for n in LOSSES[name].takes if n not in ("desirable", "kl")]
    changed = {n: np.where(MASK, ARRAYS[n], wild) for n in floats}
    assert_same(run(name, {"mask": MASK}, changed), run(name, {"mask": MASK}))
    kept = {n: ARRAYS[n][MASK != 0] for n in (*floats, "desirable")}
    assert_same(run(name, {"mask": MASK.astype(bool)})[:2], run(name, {}, kept)[:2], rtol=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_order_of_the_batch_and_micro_batches(x64, name):
    order = np.array([3, 0, 4, 2, 1])
    rows = [n for n in LOSSES[name].takes if n != "kl"]
    value, metrics, gradients = run(name, {})
    shuffled = run(name, {}, {n: ARRAYS[n][order] for n in rows})
    expected = {n: x if n == "kl" else x[order] for n, x in gradients.items()}
    assert_same(shuffled, (value, metrics, expected), **CLOSE)
    parts = [run(name, {}, {n: ARRAYS[n][part] for n in rows}) for part in (slice(0, 2), slice(2, 5))]
    assert_same(add_metrics(*[part[1] for part in parts]), metrics, **CLOSE)
    assert_close(0.4 * parts[0][0] + 0.6 * parts[1][0], value, **CLOSE)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_jit_and_vmap(x64, name, options):
    loss, given = LOSSES[name], as_jax(ARRAYS)
    arrays = [given[n] for n in loss.takes]
    plain = loss.call(*arrays, **options)
    numbers = {n: x for n, x in options.items() if n not in ("kind", "mask")}
    rest = {n: x for n, x in options.items() if n not in numbers}
    traced = jax.jit(lambda arrays, numbers: loss.call(*arrays, **numbers, **rest))(arrays, numbers)
    assert_same(traced, plain, **CLOSE)
    twice = [jnp.stack([x, jnp.flip(x)]) for x in arrays]
    many = jax.vmap(lambda *arrays: loss.call(*arrays, **options))(*twice)
    for i in range(2):
        single = loss.call(*[x[i] for x in twice], **options)
        assert_same(jax.tree.map(lambda x, i=i: x[i], many), single, **CLOSE)


@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", LOSSES)
def test_narrow_inputs_accumulate_in_float32(name, narrow):
    arrays = {n: np.asarray(x.astype(jnp.dtype(narrow)), np.float64) for n, x in ARRAYS.items() if x.dtype == "float64"}
    value, metrics, gradients = run(name, {}, dtype=narrow)
    assert {x.dtype.name for x in jax.tree.leaves((value, metrics))} == {"float32"}
    assert {g.dtype.name for g in gradients.values()} == {narrow}
    assert_close(value, expected_loss(name, ARRAYS | arrays, {}), rtol=1e-6)


def test_arrays_of_two_dtypes_and_numbers_of_any(x64):
    half = jnp.asarray(CHOSEN, "bfloat16")
    for beta in (np.float64(0.5), np.float32(0.5), jnp.float32(0.5), jnp.asarray(0.5, "bfloat16")):
        out = dpo_loss(half, jnp.asarray(REJECTED, "float32"), half, half, beta=beta)
        assert out.loss.dtype == "float32"
    assert dpo_loss(half, REJECTED, half, half).loss.dtype == "float64"


@pytest.mark.parametrize("margin", [1e4, -1e4, 3e30, -3e30])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_extreme_margins(dtype, margin, smoothing):
    def f(x: jax.Array) -> jax.Array:
        zero = jnp.zeros_like(x)
        return dpo_loss(x, zero, zero, zero, beta=1.0, label_smoothing=smoothing).loss

    value, gradient = jax.value_and_grad(f)(jnp.array([margin], dtype))
    assert_close(value, abs(margin) * (smoothing if margin > 0 else 1 - smoothing), rtol=1e-6)
    assert_close(gradient, [smoothing if margin > 0 else smoothing - 1], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [("dpo", np.inf, -0.1), ("simpo", np.inf, -2.0), ("cpo", np.inf, -0.1), ("orpo", np.inf, -0.1), ("kto", 1.0, 0.0)],
)
def test_a_chosen_completion_without_probability(dtype, name, value, gradient):
    one = {n: x[:1] for n, x in ARRAYS.items() if n != "kl"} | {"chosen": np.array([-np.inf])}
    loss, metrics, gradients = run(name, {}, one | {"logprobs": one["chosen"]}, dtype)
    assert_close(loss, value)
    assert_close(gradients[LOSSES[name].moves[0]], [gradient], rtol=1e-6)
    assert not any(np.isnan(x) for x in jax.tree.leaves(metrics))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("smoothing", [{}, {"label_smoothing": 0.1}])
def test_equal_infinities_cancel(dtype, name, smoothing):
    options = {} if name in ("ipo", "orpo", "kto") else smoothing
    both = {n: np.full(B, -np.inf) for n in ARRAYS if n not in ("desirable", "kl", "chosen_nll")}
    loss, _, gradients = run(name, options, both, dtype)
    zeros = {n: np.zeros(B) for n in both}
    if name == "orpo":
        zeros = {n: np.full(B, -1.0) for n in both}
    assert_close(loss, run(name, options, zeros, dtype)[0], rtol=1e-6)
    for n in ("chosen", "rejected", "logprobs"):
        if n in gradients:
            assert_close(gradients[n], np.zeros(B), what=n)


def test_a_traced_smoothing_of_zero_on_an_infinite_margin():
    chosen, zero = jnp.array([jnp.inf]), jnp.zeros(1)
    f = jax.jit(lambda s: jax.value_and_grad(lambda x: simpo_loss(x, zero, label_smoothing=s).loss)(chosen))
    value, gradient = f(0.0)
    assert value == 0 and gradient == 0


@pytest.mark.parametrize(
    ("a", "value", "slope"),
    [
        # Certainty counts as a probability of 1 - epsilon, where the gradient stops
        (0.0, math.log(2.0**-23), 0.0),
        (-1e-9, math.log(2.0**-23), 0.0),
        (-1e-4, -9.21039037, -9999.5),
        (-1.0, -0.45867515, -0.58197671),
        (-np.inf, 0.0, 0.0),
    ],
)
def test_100_log1mexp_in_float32(a, value, slope):
    result, gradient = jax.value_and_grad(log1mexp)(jnp.float32(a))
    assert_close(result, value, rtol=1e-6)
    assert_close(gradient, slope, rtol=1e-6)


@pytest.mark.parametrize("a", [0.0, -1e-9, 1e-7, -1e-4])
@pytest.mark.parametrize("certain", ["chosen", "rejected"])
def test_100_orpo_of_a_certain_completion(dtype, a, certain):
    arrays = {"chosen": np.full(B, -0.5), "rejected": np.full(B, -0.5), "chosen_nll": np.zeros(B)}
    value, _, gradients = run("orpo", {}, arrays | {certain: np.full(B, a)}, dtype)
    assert np.isfinite(value) and (value < 0.02 if certain == "chosen" else value > 0.8)
    for n, sign in (("chosen", -1), ("rejected", 1)):
        assert np.all(np.isfinite(gradients[n])) and np.all(sign * gradients[n] > 0), n


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("wild", [np.nan, np.inf, -np.inf, 1e4])
def test_sequence_logprobs_reads_counted_tokens_only(dtype, mean, wild):
    logprobs = np.array([[-1.0, wild, -2.5], [wild, wild, wild], [-0.5, -0.25, wild]])
    mask = np.array([[1, 0, 2], [0, 0, 0], [1, 1, 0]])

    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(sequence_logprobs(x, mask, mean=mean) * jnp.array([1.0, 1.0, 3.0], dtype))

    x = jnp.asarray(logprobs, dtype)
    value = sequence_logprobs(x, mask, mean=mean)
    assert value.dtype == dtype
    assert_close(value, np.array([-3.5, 0.0, -0.75]) / ([2, 1, 2] if mean else [1, 1, 1]))
    expected = np.array([[1, 0, 1], [0, 0, 0], [3, 3, 0]]) / (2 if mean else 1)
    assert_close(jax.grad(f)(x), expected, what="gradient")


@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
def test_sequence_logprobs_adds_in_float32(narrow):
    x = jnp.full((1, 4099), -1.0, narrow)
    assert sequence_logprobs(x, jnp.ones(x.shape, bool)) == -4099
    assert sequence_logprobs(x, jnp.ones(x.shape, bool), mean=True).dtype == "float32"
    assert sequence_logprobs(x[:, :0], jnp.ones((1, 0), bool), mean=True) == 0
    assert sequence_logprobs(x[:0], jnp.ones((0, 4099), bool)).shape == (0,)


def test_sequence_logprobs_of_a_token_without_probability():
    x = jnp.array([[-1.0, -jnp.inf]])
    assert sequence_logprobs(x, jnp.ones((1, 2))) == -jnp.inf
    assert sequence_logprobs(x, jnp.array([[1, 0]])) == -1


@pytest.mark.parametrize("block_sizes", [{"block_n": 1, "block_v": 1}, {"block_n": 3, "block_v": 4}, {"block_v": 32}])
@pytest.mark.parametrize("layout", ["DV", "VD"])
@pytest.mark.parametrize("name", LOSSES)
def test_102_from_hidden_states_for_any_block_size(x64, name, layout, block_sizes):
    rng = np.random.default_rng(5)
    b, t, d, v = 3, 4, 5, 11
    hidden, lm_head = rng.normal(size=(2 * b, t, d)), rng.normal(size=(d, v))
    targets, mask = rng.integers(0, v, (2 * b, t)), rng.random((2 * b, t)) < 0.7
    mask[:, 0] = True
    ref = jnp.asarray(rng.normal(-3, 1, 2 * b))
    mean = name in ("simpo", "orpo", "ipo")

    def loss(token_logprobs: Any) -> LossOutput:
        sums = sequence_logprobs(token_logprobs, mask, mean=mean)
        arrays = {"chosen": sums[:b], "rejected": sums[b:], "ref_chosen": ref[:b], "ref_rejected": ref[b:]}
        arrays |= {"chosen_nll": -sums[:b], "logprobs": sums, "ref_logprobs": ref}
        arrays |= {"desirable": np.arange(2 * b) < b, "kl": jnp.array(0.2)}
        smooth = {"label_smoothing": 0.1} if name in ("dpo", "simpo", "cpo") else {}
        return LOSSES[name].call(*[arrays[n] for n in LOSSES[name].takes], **smooth)

    def in_blocks(hidden: jax.Array, lm_head: jax.Array) -> LossOutput:
        w = lm_head if layout == "DV" else lm_head.T
        options: dict[str, Any] = {"layout": layout, "block_sizes": block_sizes, "implementation": "chunked"}
        return loss(linear_logprobs(hidden, w, targets, mask=mask, **options))

    def naive(hidden: jax.Array, lm_head: jax.Array) -> LossOutput:
        log_p = jax.nn.log_softmax(hidden @ lm_head, axis=-1)
        return loss(jnp.take_along_axis(log_p, jnp.asarray(targets)[..., None], axis=-1)[..., 0])

    ours, expected = (
        jax.value_and_grad(f, (0, 1), has_aux=True)(jnp.asarray(hidden), jnp.asarray(lm_head))
        for f in (in_blocks, naive)
    )
    assert_same(ours, expected, rtol=1e-10, atol=1e-12)


def test_cpo_takes_a_mean_over_tokens_or_no_likelihood(x64):
    chosen, rejected = jnp.asarray(CHOSEN), jnp.asarray(REJECTED)
    preference = expected_loss("cpo", ARRAYS, {"nll_coef": 0.0})
    out = cpo_loss(chosen, rejected, 1.5, nll_coef=0.5)
    assert_close(out.loss, preference + 0.75, **CLOSE)
    assert_close(out.metrics["nll"], (1.5 * B, B))
    out = cpo_loss(chosen, rejected, None, nll_coef=0.0)
    assert_close(out.loss, preference, **CLOSE)
    assert "nll" not in out.metrics
    # A likelihood that does not count may be anything.
    assert_close(cpo_loss(chosen, rejected, jnp.full(B, jnp.inf), nll_coef=0).loss, preference, **CLOSE)
    assert_close(
        orpo_loss(chosen, rejected, 2.0).loss, expected_loss("orpo", ARRAYS | {"chosen_nll": np.full(B, 2.0)}, {})
    )


@pytest.mark.parametrize("kl", [-0.7, 0.0, 0.4])
def test_kto_takes_kl_from_zero_on(x64, kl):
    value, metrics, _ = run("kto", {}, {"kl": np.array(kl)})
    assert_close(value, expected_loss("kto", ARRAYS | {"kl": np.array(kl)}, {}), **CLOSE)
    assert_close(metrics["kl"], (max(kl, 0.0) * B, B))
    assert kto_loss(ARRAYS["logprobs"], ARRAYS["ref_logprobs"], ARRAYS["desirable"], kl).loss == value
