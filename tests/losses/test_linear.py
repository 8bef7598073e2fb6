"""Policy losses from hidden states: equal to the loss of log-probabilities from logits that are held."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, fixture
from policy_inputs import AGGREGATIONS, POLICIES, as_jax, assert_same, everything

from logitless import (
    LossOutput,
    bnpo_loss,
    cispo_loss,
    dapo_loss,
    dr_grpo_loss,
    grpo_loss,
    gspo_loss,
    linear_bnpo_loss,
    linear_cispo_loss,
    linear_dapo_loss,
    linear_dr_grpo_loss,
    linear_grpo_loss,
    linear_gspo_loss,
    linear_logprobs,
    linear_luspo_loss,
    linear_policy_loss,
    linear_sapo_loss,
    linear_vespo_loss,
    luspo_loss,
    policy_loss,
    sapo_loss,
    vespo_loss,
)

PAIRS: dict[str, tuple[Callable[..., LossOutput], Callable[..., LossOutput], dict[str, Any]]] = {
    "policy": (linear_policy_loss, policy_loss, {}),
    "grpo": (linear_grpo_loss, grpo_loss, {}),
    "bnpo": (linear_bnpo_loss, bnpo_loss, {}),
    "dr_grpo": (linear_dr_grpo_loss, dr_grpo_loss, {"max_completion_length": 6}),
    "dapo": (linear_dapo_loss, dapo_loss, {"total": 9}),
    "gspo": (linear_gspo_loss, gspo_loss, {}),
    "gspo-token": (linear_gspo_loss, gspo_loss, {"token_level": True}),
    "cispo": (linear_cispo_loss, cispo_loss, {"total": 9, "cispo_max": 1.1}),
    "sapo": (linear_sapo_loss, sapo_loss, {"tau_negative": 1.3}),
    "luspo": (linear_luspo_loss, luspo_loss, {}),
    "vespo": (linear_vespo_loss, vespo_loss, {"vespo_k_neg": 2.5}),
}
B, T, D, V = 3, 4, 5, 11
HEAD_OPTIONS = {"temperature": 0.7, "softcap": 3.0, "logit_scale": 1.5}
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def _case(seed: int = 0) -> dict[str, Any]:
    """Hidden states of a peaked softmax, a head `[V, D]`, and what the loss takes beside them."""
    rng = np.random.default_rng(seed)
    lm_head = rng.normal(size=(V, D))
    targets = rng.integers(0, V, (B, T))
    hidden = rng.normal(size=(B, T, D))
    hidden[0] = 2 * lm_head[targets[0]]
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 1, 1, 1]])
    arrays = {
        "hidden": hidden,
        "lm_head": lm_head,
        "bias": rng.normal(size=V),
        "targets": targets,
        "mask": mask,
        "advantages": np.array([1.0, -0.5, -1.2]),
    }
    logprobs = np.asarray(_naive(as_jax(arrays), {})[0])
    arrays |= {
        name: logprobs + rng.normal(0, 0.3, (B, T)) for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    }
    return as_jax(arrays)


def _naive(arrays: dict[str, Any], head: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies from logits `[B, T, V]` that are held."""
    z = jnp.einsum("btd,vd->btv", arrays["hidden"], arrays["lm_head"]) * head.get("logit_scale", 1.0)
    z = z + arrays["bias"][None, None, :] * head.get("logit_scale", 1.0)
    if "softcap" in head:
        z = head["softcap"] * jnp.tanh(z / head["softcap"])
    log_p = jax.nn.log_softmax(z / head.get("temperature", 1.0), axis=-1)
    logprobs = jnp.take_along_axis(log_p, jnp.asarray(arrays["targets"])[..., None], axis=-1)[..., 0]
    return logprobs, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def _both(
    arrays: dict[str, Any],
    options: dict[str, Any],
    *,
    linear: Callable[..., LossOutput] = linear_policy_loss,
    plain: Callable[..., LossOutput] = policy_loss,
    head: dict[str, Any] | None = None,
    layout: str = "VD",
    how: dict[str, Any] | None = None,
) -> tuple[Any, Any]:
    """Loss, metrics and gradients by hidden, head and bias: from hidden states, and the naive way."""
    head, how = head or {}, how or {}
    weights = {name: arrays[name] for name in ("hidden", "lm_head", "bias")}
    rest = {name: arrays[name] for name in ("ref_logprobs", "rollout_logprobs", "segment_ids") if name in arrays}
    after = (arrays["old_logprobs"], arrays["advantages"], arrays["mask"])

    def from_hidden(weights: dict[str, jax.Array]) -> LossOutput:
        w = weights["lm_head"] if layout == "VD" else weights["lm_head"].T
        more = {"bias": weights["bias"], "layout": layout} | head | how | options | rest
        return linear(weights["hidden"], w, arrays["targets"], *after, **more)

    def naive(weights: dict[str, jax.Array]) -> LossOutput:
        logprobs, entropy = _naive(arrays | weights, head)
        reads = {"entropy_coef", "top_entropy_quantile"} & options.keys()
        return plain(logprobs, *after, **options, **rest, entropy=entropy if reads else None)

    def run(f: Callable[..., LossOutput]) -> Any:
        return jax.value_and_grad(f, has_aux=True)(weights)

    return run(from_hidden), run(naive)


@pytest.mark.parametrize(("name", "layout"), [*[(name, "VD") for name in PAIRS], ("policy", "DV")])
def test_presets_equal_the_naive_composition(x64, name, layout):
    linear, plain, more = PAIRS[name]
    options = {"kl": "k3", "kl_coef": 0.1} | more
    if name not in ("cispo", "sapo", "vespo"):
        options["clip_high"] = 0.1
    ours, naive = _both(_case(), options, linear=linear, plain=plain, head=HEAD_OPTIONS, layout=layout)
    assert_same(ours, naive, **CLOSE)
    assert_close(np.where(_case()["mask"][..., None], 0.0, ours[1]["hidden"]), np.zeros((B, T, D)), atol=0.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("policy", ["clip", "sequence-clip", "vespo"])
def test_policies_and_aggregations(x64, policy, aggregation):
    # the entropy bonus goes through the hidden states
    ours, naive = _both(_case(1), everything(policy, aggregation))
    assert_same(ours, naive, **CLOSE)


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"clip", "sequence-clip", "vespo"}))
def test_every_other_policy(x64, policy):
    ours, naive = _both(_case(1), everything(policy))
    assert_same(ours, naive, **CLOSE)


@pytest.mark.parametrize("options", [{"entropy_coef": 0.05}, {"top_entropy_quantile": 0.4}], ids=str)
def test_entropy_from_hidden_states(x64, options):
    ours, naive = _both(_case(2), options, head=HEAD_OPTIONS)
    assert_same(ours, naive, **CLOSE)
    without, _ = _both(_case(2), {}, head=HEAD_OPTIONS)
    assert np.max(np.abs(ours[1]["lm_head"] - without[1]["lm_head"])) > 1e-4


@pytest.mark.parametrize(
    "how", [{"implementation": "reference"}, {"block_sizes": {"block_n": 2, "block_v": 3}}], ids=str
)
def test_implementation_and_block_size_change_nothing(x64, how):
    # Case 80
    ours, naive = _both(_case(3), everything("clip"), how=how)
    assert_same(ours, naive, **CLOSE)


def test_row_order_changes_nothing(x64):
    # Case 80
    arrays, order = _case(4), np.array([2, 0, 1])
    moved = {name: x if name in ("lm_head", "bias") else x[order] for name, x in arrays.items()}
    (value, gradients), _ = _both(arrays, everything("clip"))
    (moved_value, moved_gradients), _ = _both(moved, everything("clip"))
    assert_same(moved_value, value, **CLOSE)
    assert_same(moved_gradients, gradients | {"hidden": gradients["hidden"][order]}, **CLOSE)


def test_packed_rows(x64):
    arrays = _case(5) | {"segment_ids": np.array([[1, 1, 2, 2], [3, 0, 0, 0], [1, 2, 2, 0]])}
    arrays["advantages"] = jnp.asarray(np.random.default_rng(0).normal(size=(B, T)))
    ours, naive = _both(arrays, everything("sequence-clip"))
    assert_same(ours, naive, **CLOSE)
    # padding is skipped like a masked token
    poisoned = arrays | {"hidden": jnp.asarray(arrays["hidden"]).at[2, 3].set(jnp.nan)}
    assert_same(_both(poisoned, everything("sequence-clip"))[0], ours)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_hidden_states_may_hold_anything(x64, poison):
    # Case 52, through the head; and targets that are no token
    arrays = _case(6)
    counts = jnp.asarray(arrays["mask"] != 0)
    wild = arrays | {"hidden": jnp.where(counts[..., None], arrays["hidden"], poison)}
    wild["targets"] = np.where(arrays["mask"], arrays["targets"], -1)
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
        wild[name] = jnp.where(counts, arrays[name], poison)
    ours, naive = _both(arrays, everything("clip"))
    assert_same(_both(wild, everything("clip"))[0], ours)
    assert_same(ours, naive, **CLOSE)


def test_nothing_counts():
    dtype = "float32"
    arrays = {name: jnp.asarray(x, dtype) if x.dtype.kind == "f" else x for name, x in _case_arrays().items()}
    zeros = np.zeros((B, T), int)
    for name in ("hidden",):
        arrays[name] = jnp.full_like(arrays[name], jnp.nan)
    ours, _ = _both(arrays | {"mask": zeros}, everything("clip"))
    (loss, metrics), gradients = ours
    assert_close(loss, 0.0, atol=0.0)
    assert_close(metrics["entropy"], (0, 0))
    for name, gradient in gradients.items():
        assert gradient.dtype == dtype
        assert_close(gradient, np.zeros(arrays[name].shape), atol=0.0, what=name)


def _case_arrays() -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        return {name: np.asarray(x) for name, x in _case(7).items()}


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_rows_or_no_tokens(shape):
    empty = jnp.zeros(shape)
    after = (jnp.zeros(shape, jnp.int32), empty, jnp.zeros(shape[:1]), jnp.ones(shape))

    def f(h: jax.Array, w: jax.Array) -> LossOutput:
        return linear_grpo_loss(h, w, *after, entropy_coef=0.1)

    (loss, _), gradients = jax.value_and_grad(f, (0, 1), has_aux=True)(jnp.zeros((*shape, D)), jnp.ones((D, V)))
    assert loss == 0
    assert_close(gradients[1], np.zeros((D, V)), atol=0.0)


def test_frozen_head(x64):
    arrays = _case(8)
    ours, _ = _both(arrays, everything("clip"))
    rest = {name: arrays[name] for name in ("ref_logprobs", "rollout_logprobs", "bias")} | everything("clip")
    after = (arrays["targets"], arrays["old_logprobs"], arrays["advantages"], arrays["mask"])

    def f(h: jax.Array) -> LossOutput:
        return linear_policy_loss(h, arrays["lm_head"], *after, layout="VD", **rest)

    (loss, _), grad = jax.value_and_grad(f, has_aux=True)(arrays["hidden"])
    assert_close(loss, ours[0][0], rtol=1e-12)
    assert_close(grad, ours[1]["hidden"], rtol=1e-10, atol=1e-12)


def test_temperature_belongs_to_policy_old_and_reference(x64):
    # Case 50
    f = fixture()
    expected = [[-0.50521966, -3.37025096, -2.56486337], [-1.7122582, -1.48602676, -4.0410106]]
    h, w = jnp.asarray(f["hidden"]), jnp.asarray(f["lm_head"])
    logprobs = linear_logprobs(h, w, f["targets"], layout="VD", temperature=0.7)
    assert_close(logprobs, expected, rtol=0.0, atol=6e-9)
    options: dict[str, Any] = {"layout": "VD", "temperature": 0.7, "ref_logprobs": logprobs, "kl_coef": 0.1}
    output = linear_grpo_loss(h, w, f["targets"], logprobs, jnp.asarray(f["advantages"]), f["mask"], **options)
    metrics = output.metrics
    assert_close((metrics["ratio_min"], metrics["ratio_max"]), (1, 1), rtol=0.0, atol=0.0, what="ratio")
    assert_close(metrics["kl"], (0, 3), rtol=0.0, atol=0.0, what="kl")
    assert_close(output.loss, -0.25, rtol=1e-12)


def test_reported_numbers_from_hidden_states(dtype):
    # section C's plain goldens, through the head
    f = as_jax(fixture(), dtype)
    options: dict[str, Any] = {"layout": "VD", "clip_low": 0.2, "clip_high": 0.2}
    args = (f["hidden"], f["lm_head"], f["targets"], f["old_logprobs"], f["advantages"], f["mask"])
    tolerance: dict[str, Any] = {"rtol": 0.0, "atol": 1e-9} if dtype == "float64" else {"rtol": 2e-6, "atol": 0.0}
    assert_close(linear_grpo_loss(*args, **options).loss, -0.1532531801, **tolerance)
    assert_close(linear_bnpo_loss(*args, **options).loss, -0.4529750231, **tolerance)
    assert_close(linear_dapo_loss(*args, **options).loss, -0.4529750231, **tolerance)
    assert_close(linear_dapo_loss(*args, **options, total=10).loss, -0.1358925069, **tolerance)
    assert_close(linear_dr_grpo_loss(*args, **options, max_completion_length=4).loss, -0.1698656337, **tolerance)
    with_kl = linear_grpo_loss(*args, **options, kl_coef=0.1, ref_logprobs=f["ref_logprobs"])
    assert_close(with_kl.loss, -0.1489191990, **tolerance)


@pytest.mark.parametrize("name", PAIRS)
def test_refusals(name):
    linear, _, more = PAIRS[name]
    h, w, x = jnp.ones((2, 3, 4)), jnp.ones((4, 5)), jnp.ones((2, 3))
    targets, advantages = jnp.zeros((2, 3), jnp.int32), jnp.ones(2)

    def call(**changes: Any) -> None:
        given = {"old": x, "advantages": advantages, "mask": x} | changes
        args = (given.pop("old"), given.pop("advantages"), given.pop("mask"))
        linear(h, w, targets, *args, **more, **given)

    call()
    with pytest.raises(ValueError, match=r"mask of shape \(2, 2\), targets of shape \(2, 3\)"):
        call(mask=jnp.ones((2, 2)))
    with pytest.raises(ValueError, match=r"old_logprobs of shape \(2, 2\), logprobs of shape \(2, 3\)"):
        call(old=jnp.ones((2, 2)))
    for shape in ((2, 2), (1, 3), (3,)):
        with pytest.raises(ValueError, match=re.escape(f"segment_ids of shape {shape}, mask of shape (2, 3)")):
            call(segment_ids=jnp.ones(shape, jnp.int32), advantages=x)
    with pytest.raises(TypeError, match="linear_.*'entropy'; it is computed from the hidden states"):
        call(entropy=x)
    with pytest.raises(TypeError, match=r"linear_\w+: got an unexpected keyword argument 'beta'; .* kl_coef"):
        call(beta=0.1)
    with pytest.raises(TypeError, match=r"linear_\w+: got .*'kl_cof'; did you mean 'kl_coef'"):
        call(kl_cof=4)
    with pytest.raises(ValueError, match=r"kl='k3' needs ref_logprobs"):
        call(kl_coef=0.1, kl="k3")
    with pytest.raises(ValueError, match=r"temperature=0"):
        call(temperature=0.0)
    with pytest.raises(ValueError, match=r"linear_\w+: implementation='one_pas' is unknown; .* mean 'one_pass'"):
        call(implementation="one_pas")
