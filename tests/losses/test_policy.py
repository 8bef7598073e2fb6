"""Properties that every policy loss has, whatever its options."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_close
from policy_inputs import (
    AGGREGATIONS,
    POLICIES,
    as_jax,
    assert_same,
    everything,
    full_f,
    loss_and_grad,
    random_case,
)

from logitless import policy_loss

POISONS = [np.nan, np.inf, -np.inf, 1e4, -1e4]
# One policy of every kind.
FEW = ("clip", "vespo", "sequence-clip", "sequence-token-clip")
ROUNDING: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}


@pytest.mark.parametrize("policy", POLICIES)
def test_masked_values_never_matter(policy):
    # Case 52
    clean = random_case(np.random.default_rng(1), (3, 4))
    clean["mask"][2] = False

    def fill(value: float) -> dict[str, np.ndarray]:
        return {name: x if name == "mask" else np.where(clean["mask"], x, value) for name, x in clean.items()}

    options = everything(policy)
    if policy != "vespo":
        options["rollout_level"] = "sequence"
    options["top_entropy_quantile"] = 0.6
    one = loss_and_grad(fill(0.0), options, dtype="float32", with_entropy=True)
    assert np.isfinite(one[0]), one[0]
    for poison in POISONS:
        assert_same(loss_and_grad(fill(poison), options, dtype="float32", with_entropy=True), one)
    for gradient in one[1].values():
        assert_close(np.where(clean["mask"], 0.0, gradient), np.zeros((3, 4)), rtol=0.0, atol=0.0, what="gradient")
    assert np.any(one[1]["logprobs"] != 0)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
@pytest.mark.parametrize(("policy", "packed"), [*[(policy, False) for policy in FEW], ("sequence-clip", True)])
def test_nothing_counts(policy, packed, shape):
    # Cases 76, 78: no rows, no tokens, or no counted token: loss 0, gradient 0, no NaN anywhere
    arrays = random_case(np.random.default_rng(2), shape)
    arrays = {name: np.full(shape, np.nan) for name in arrays} | {"mask": np.zeros(shape, bool)}
    if packed:
        arrays["segment_ids"] = np.ones(shape, np.int32)
    for aggregation in AGGREGATIONS if policy == "clip" else ("sequence_mean",):
        options = everything(policy, aggregation) | {"top_entropy_quantile": 0.5}
        loss, gradients, metrics = loss_and_grad(arrays, options, dtype="float32", with_entropy=True)
        assert_close(loss, 0.0, atol=0.0, what=f"loss, {aggregation}")
        for gradient in gradients.values():
            assert_close(gradient, np.zeros(shape), atol=0.0, what=f"gradient, {aggregation}")
        for name, value in metrics.items():
            if name not in ("ratio_min", "ratio_max"):
                assert_close(value, (0, 0), what=f"{name}, {aggregation}")
        assert_close((metrics["ratio_min"], metrics["ratio_max"]), (np.inf, -np.inf), what="ratio_min and ratio_max")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("policy", FEW)
def test_order_of_rows_and_tokens_is_free(x64, policy, aggregation):
    # Case 80
    rng = np.random.default_rng(3)
    arrays = random_case(rng, (3, 4))
    options = everything(policy, aggregation)
    rows, tokens = rng.permutation(3), rng.permutation(4)
    moved = {name: x[rows][:, tokens] for name, x in arrays.items()}
    loss, grads, metrics = loss_and_grad(arrays, options, with_entropy=True)
    moved_grads = {name: x[rows][:, tokens] for name, x in grads.items()}
    assert_same(loss_and_grad(moved, options, with_entropy=True), (loss, moved_grads, metrics), **ROUNDING)


# Sequences of the unpacked batch: 3, 2, 1 and 4 tokens, the third fully masked; the last one takes up an id that is
# used in another row.
LENGTHS = [3, 2, 1, 4]
SEGMENT_IDS = np.array([[5, 5, 5, 2, 2, 0], [7, 2, 2, 2, 2, 0]])
STARTS = [(0, 0), (0, 3), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("policy", "aggregation"),
    [*[("sequence-clip", a) for a in AGGREGATIONS], *[(p, "sequence_mean") for p in ("clip", "vespo")]],
)
def test_packing_equals_unpacking(x64, policy, aggregation):
    arrays = random_case(np.random.default_rng(4), (4, 4))
    arrays["mask"] = np.array([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1]])
    packed = {name: np.full((2, 6), np.nan if name != "mask" else 1) for name in arrays}
    options = everything(policy, aggregation)
    if policy != "vespo":
        options["rollout_level"] = "sequence"

    def pack(into: np.ndarray, x: np.ndarray) -> np.ndarray:
        for i, ((b, t), length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
            into[b, t : t + length] = x[i, :length]
        return into

    packed = {name: pack(packed[name], x) for name, x in arrays.items()} | {"segment_ids": SEGMENT_IDS}
    loss, grads, metrics = loss_and_grad(arrays, options, with_entropy=True)
    packed_grads = {name: pack(np.zeros((2, 6)), x) for name, x in grads.items()}
    assert_same(loss_and_grad(packed, options, with_entropy=True), (loss, packed_grads, metrics), **ROUNDING)


def test_a_used_id_starts_a_new_segment(x64):
    arrays = random_case(np.random.default_rng(5), (2, 6)) | {"mask": np.ones((2, 6), int)}
    options = everything("sequence-clip")
    same = loss_and_grad(arrays | {"segment_ids": np.array([[1, 1, 2, 2, 1, 0]] * 2)}, options)
    assert_same(loss_and_grad(arrays | {"segment_ids": np.array([[1, 1, 2, 2, 3, 0]] * 2)}, options), same)


@pytest.mark.parametrize("policy", FEW)
def test_micro_batches_with_a_total_add_up(x64, policy):
    # Case 72
    arrays = random_case(np.random.default_rng(6), (3, 4))
    options = everything(policy) | {"aggregation": "given_total", "total": int(arrays["mask"].sum())}
    loss, grad, metrics = loss_and_grad(arrays, options)
    parts = [loss_and_grad({name: x[i : i + 1] for name, x in arrays.items()}, options) for i in range(3)]
    assert_close(sum(float(part[0]) for part in parts), loss, **ROUNDING)
    assert_close(np.concatenate([part[1] for part in parts]), grad, what="gradient", **ROUNDING)
    for name, value in metrics.items():
        across = [part[2][name] for part in parts]
        if name in ("ratio_min", "ratio_max"):
            assert_close((min if name == "ratio_min" else max)(float(x) for x in across), value, what=name)
        else:
            assert_close(np.sum(np.asarray(across), axis=0), value, what=name, **ROUNDING)
    default = loss_and_grad(arrays, options | {"total": None})
    assert_close(default[0], loss, what="default total", **ROUNDING)


def test_total_of_zero_means_one(x64):
    options = {"aggregation": "given_total", "total": 0}
    one = loss_and_grad(full_f(), options | {"total": 1})
    assert_same(loss_and_grad(full_f(), options), one)
    assert_same(loss_and_grad(full_f(), options | {"total": jnp.asarray(0)}), one)


@pytest.mark.parametrize("policy", POLICIES)
def test_old_none_is_the_policy_itself(policy):
    arrays = random_case(np.random.default_rng(7), (3, 4))
    options = everything(policy)
    itself = loss_and_grad(arrays | {"old_logprobs": arrays["logprobs"]}, options, dtype="float32")
    assert_same(loss_and_grad(arrays | {"old_logprobs": None}, options, dtype="float32"), itself)


@pytest.mark.parametrize("old", ["none", "equal"])
@pytest.mark.parametrize("delta", [None, 1.0])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_on_policy_gradient_survives_a_clip_range_of_zero(dtype, level, delta, old):
    arrays = full_f(advantages=np.array([1.0, -0.5]), mask=np.array([[1, 1, 0], [1, 1, 1]]))
    arrays["old_logprobs"] = None if old == "none" else arrays["logprobs"]
    options = {"ratio_level": level, "clip_low": 0.0, "clip_high": 0.0}
    loss, grad, metrics = loss_and_grad(arrays, options | {"delta": delta}, dtype=dtype)
    assert_close(loss, -0.25, atol=1e-7)
    if delta is None:
        assert_close(grad, [[-0.25, -0.25, 0], [1 / 12] * 3], rtol=1e-6, what="gradient")
    else:
        assert np.all(np.isfinite(grad))
    assert_close(metrics["clip_region"], (0, 5))


@pytest.mark.parametrize("policy", FEW)
def test_jit_equals_eager(x64, policy):
    arrays = as_jax(random_case(np.random.default_rng(8), (3, 4)))
    options = everything(policy)
    names = ("clip_low", "clip_high", "delta", "cispo_max", "kl_coef", "rollout_max", "entropy_coef", "total")
    traced = {name: jnp.asarray(x) for name, x in options.items() if name in names}
    fixed = {name: x for name, x in options.items() if name not in names}
    given = arrays | traced

    @jax.jit
    def f(given):
        return jax.value_and_grad(lambda x: policy_loss(**given | {"logprobs": x}, **fixed), has_aux=True)(
            given["logprobs"]
        )

    (loss, metrics), grad = f(given)
    assert_same((loss, grad, metrics), loss_and_grad(arrays, options), **ROUNDING)


@pytest.mark.parametrize("policy", POLICIES)
def test_bfloat16_is_promoted(policy):
    arrays = as_jax(random_case(np.random.default_rng(9), (3, 4)), "float32")
    half = {name: x.astype(jnp.bfloat16) if name != "mask" else x for name, x in arrays.items()}
    same = {name: x.astype(jnp.float32) if name != "mask" else x for name, x in half.items()}
    options = everything(policy)
    loss, grad, metrics = loss_and_grad(half, options)
    expected = loss_and_grad(same, options)
    assert loss.dtype == jnp.float32 and grad.dtype == jnp.bfloat16
    assert_same((loss, metrics), (expected[0], expected[2]))
    assert_same(grad, expected[1].astype(jnp.bfloat16))


def test_float32_companions_of_float64_logprobs(x64):
    # a reference or a rollout engine of another precision is no error
    arrays = as_jax(random_case(np.random.default_rng(10), (3, 4)))
    others = {name: x.astype(jnp.float32) for name, x in arrays.items() if name not in ("mask", "logprobs")}
    loss, grad, _ = loss_and_grad(arrays | others, everything("clip"))
    expected = loss_and_grad(arrays, everything("clip"))
    assert loss.dtype == jnp.float64
    assert_same((loss, grad), expected[:2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask_dtype", ["bool", "int8", "int32", "uint8", "float32", "bfloat16"])
def test_any_mask_dtype(mask_dtype):
    arrays = random_case(np.random.default_rng(11), (3, 4))
    expected = loss_and_grad(arrays, everything("clip"), dtype="float32")
    mask = jnp.asarray(arrays["mask"]).astype(mask_dtype)
    assert_same(loss_and_grad(arrays | {"mask": mask}, everything("clip"), dtype="float32"), expected)
    if mask_dtype != "bool":
        scale = jnp.asarray(0.5 if "float" in mask_dtype else 3, mask_dtype)
        scaled = loss_and_grad(arrays | {"mask": mask * scale}, everything("clip"), dtype="float32")
        assert_same(scaled, expected)


def test_one_advantage_a_sequence_equals_one_a_token(x64):
    arrays = random_case(np.random.default_rng(12), (3, 4))
    row = arrays["advantages"][:, 0]
    expected = loss_and_grad(arrays | {"advantages": np.repeat(row[:, None], 4, axis=1)}, everything("clip"))
    assert_same(loss_and_grad(arrays | {"advantages": row}, everything("clip")), expected)


def test_numpy_arrays_at_the_door(x64):
    arrays = random_case(np.random.default_rng(13), (3, 4))
    loss = policy_loss(**arrays, **everything("clip"))
    assert_close(loss.loss, loss_and_grad(arrays, everything("clip"))[0], **ROUNDING)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    aggregation=st.sampled_from(sorted(AGGREGATIONS)),
    shape=st.sampled_from([(2, 3), (3, 4)]),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_any_batch_equals_the_oracle(policy, aggregation, shape, seed, data):
    arrays = random_case(np.random.default_rng(seed), shape)
    bits = data.draw(st.lists(st.booleans(), min_size=arrays["mask"].size, max_size=arrays["mask"].size))
    arrays["mask"] = np.array(bits).reshape(shape)
    options = everything(policy, aggregation)
    moving = {name: x for name, x in arrays.items() if name in ("ref_logprobs", "rollout_logprobs", "entropy")}
    args = [arrays[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")]
    with jax.enable_x64(True):
        loss, grad, _ = loss_and_grad(arrays, options)
    assert_close(loss, oracle.policy_loss(*args, **moving, **options), rtol=1e-11, atol=1e-12)
    # A difference quotient across a kink is no gradient; random batches are that close to one about never.
    expected = oracle.policy_gradient(*args, **moving, **options)
    assert_close(grad, expected, rtol=1e-6, atol=1e-7, what="gradient")
