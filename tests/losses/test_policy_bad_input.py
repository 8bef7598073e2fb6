"""What `policy_loss` refuses, and what it says."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from policy_inputs import as_jax, case_f

from logitless import bnpo_loss, dapo_loss, dr_grpo_loss, grpo_loss, policy_loss

REF = {"ref_logprobs": jnp.zeros((2, 3))}
ROLLOUT = {"rollout_logprobs": jnp.zeros((2, 3))}
ENTROPY = {"entropy": jnp.ones((2, 3))}


def _call(loss: Any = policy_loss, **options: Any) -> Any:
    arrays = as_jax(case_f(), "float32")
    arrays |= {name: options.pop(name) for name in list(options) if name in arrays}
    old, advantages, mask = arrays["old_logprobs"], arrays["advantages"], arrays["mask"]
    return loss(arrays["logprobs"], old, advantages, mask, **options)


def _needs(message: str, *parts: str) -> None:
    for part in ("policy_loss", *parts):
        assert part in message, f"{part!r} is not in: {message}"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        *[
            ({"delta": 2.0, "surrogate": s}, ("delta=2.0", f"surrogate='{s}'"))
            for s in ("none", "cispo", "sapo", "vespo")
        ],
        *[
            ({"ratio_level": level, "surrogate": s}, (f"ratio_level='{level}'", f"surrogate='{s}'"))
            for level in ("sequence", "sequence_token")
            for s in ("cispo", "sapo", "vespo")
        ],
        (
            {"surrogate": "vespo", "rollout_level": "sequence"} | ROLLOUT,
            ("rollout_level='sequence'", "surrogate='vespo'"),
        ),
        *[({"kl": kl, "kl_coef": 0.1}, (f"kl='{kl}'", "ref_logprobs")) for kl in ("k1", "k2", "k3")],
        ({"kl": "k3"}, ("kl='k3'", "ref_logprobs")),
        ({"kl_coef": 0.1}, ("kl_coef=0.1", "kl='none'")),
        ({"kl_coef": 0.1} | REF, ("kl_coef=0.1", "kl='none'")),
        ({"kl_bias_correction": True} | REF, ("kl_bias_correction=True", "kl='none'")),
        ({"kl_clamp": 1.0} | REF, ("kl_clamp=1.0", "kl='none'")),
        ({"entropy_coef": 0.1}, ("entropy_coef=0.1", "entropy=None")),
        ({"top_entropy_quantile": 0.2}, ("top_entropy_quantile=0.2", "entropy=None")),
        ({"aggregation": "constant"}, ("aggregation='constant'", "max_completion_length")),
        ({"max_completion_length": 4}, ("max_completion_length=4", "aggregation='sequence_mean'")),
        *[
            ({"total": 4, "aggregation": a}, ("total=4", f"aggregation='{a}'"))
            for a in ("sequence_mean", "token_mean", "sequence_sum")
        ],
        (
            {"total": 4, "aggregation": "constant", "max_completion_length": 4},
            ("total=4", "aggregation='constant'"),
        ),
        ({"clip_low": 0.1, "surrogate": "sapo"}, ("clip_low=0.1", "surrogate='sapo'")),
        ({"clip_high": 0.1, "surrogate": "none"}, ("clip_high=0.1", "surrogate='none'")),
        ({"cispo_max": 2.0}, ("cispo_max=2.0", "surrogate='clip'")),
        ({"tau_positive": 2.0}, ("tau_positive=2.0", "surrogate='clip'")),
        ({"tau_negative": 2.0}, ("tau_negative=2.0", "surrogate='clip'")),
        *[({f"vespo_{k}": 7.0}, (f"vespo_{k}=7.0", "surrogate='clip'")) for k in ("k_pos", "k_neg")],
        *[({f"vespo_{k}": 7.0}, (f"vespo_{k}=7.0", "surrogate='clip'")) for k in ("lambda_pos", "lambda_neg")],
        ({"rollout_level": "sequence"}, ("rollout_level='sequence'", "rollout_logprobs=None")),
        ({"rollout_mode": "mask"}, ("rollout_mode='mask'", "rollout_logprobs=None")),
        ({"rollout_max": 3.0}, ("rollout_max=3.0", "rollout_logprobs=None")),
        ({"rollout_min": 0.5} | ROLLOUT, ("rollout_min=0.5", "rollout_mode='truncate'")),
    ],
    ids=str,
)
def test_options_that_exclude_each_other(options, names):
    with pytest.raises(ValueError) as error:
        _call(**options)
    _needs(str(error.value), *names)


@pytest.mark.parametrize(
    ("option", "value", "more"),
    [
        # Case 64
        *[("clip_low", x, {}) for x in (-0.1, 1.2, float("nan"))],
        *[("clip_high", x, {}) for x in (-0.1, float("nan"))],
        *[("delta", x, {}) for x in (0.0, -1.0)],
        ("cispo_max", 0.0, {"surrogate": "cispo"}),
        ("tau_positive", 0.0, {"surrogate": "sapo"}),
        ("tau_negative", -1.0, {"surrogate": "sapo"}),
        ("kl_clamp", 0.0, {"kl": "k3", "kl_coef": 0.1} | REF),
        ("rollout_max", 0.0, ROLLOUT),
        ("rollout_min", -0.5, {"rollout_mode": "mask"} | ROLLOUT),
        *[("top_entropy_quantile", x, ENTROPY) for x in (0.0, 1.5, -0.2)],
        ("total", -1, {"aggregation": "given_total"}),
        ("max_completion_length", 0, {"aggregation": "constant"}),
    ],
)
def test_numbers_out_of_range(option, value, more):
    with pytest.raises(ValueError) as error:
        _call(**{option: value}, **more)
    _needs(str(error.value), f"{option}={value}", "it must be")


def test_a_lower_bound_of_weights_above_the_upper():
    with pytest.raises(ValueError) as error:
        _call(rollout_mode="mask", rollout_min=2.5, rollout_max=2.0, **ROLLOUT)
    _needs(str(error.value), "rollout_min=2.5", "rollout_max=2.0")


@pytest.mark.parametrize(
    ("option", "value"), [("clip_low", 0.0), ("clip_low", 1.0), ("clip_high", 0.0), ("clip_high", 9.0), ("delta", 1e-3)]
)
def test_numbers_at_the_edge_of_their_range(option, value):
    assert np.isfinite(_call(**{option: value}).loss)


@pytest.mark.parametrize(
    ("option", "given", "nearest"),
    [
        ("ratio_level", "sequences", "sequence"),
        ("surrogate", "clipp", "clip"),
        ("kl", "k33", "k3"),
        ("aggregation", "tokens_mean", "token_mean"),
        ("rollout_level", "tok", "token"),
        ("rollout_mode", "truncated", "truncate"),
    ],
)
def test_unknown_names_come_with_the_nearest(option, given, nearest, monkeypatch):
    # The check of annotations, which only tests have, would speak first.
    loss = getattr(policy_loss, "__wrapped__", policy_loss)
    with pytest.raises(ValueError) as error:
        _call(loss, **{option: given})
    _needs(str(error.value), f"{option}={given!r}", f"did you mean {nearest!r}?")


@pytest.mark.parametrize("name", ["mask", "old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy", "segment_ids"])
@pytest.mark.parametrize("shape", [(2, 2), (3,), (2, 1), (1, 3), (3, 2)])
def test_another_shape_names_both(name, shape):
    # Case 26: nothing is broadcast
    array = jnp.ones(shape, jnp.int32 if name in ("mask", "segment_ids") else jnp.float32)
    options: dict[str, Any] = {name: array}
    if name == "segment_ids":
        options["advantages"] = jnp.ones((2, 3))
    with pytest.raises(ValueError) as error:
        _call(**options)
    _needs(str(error.value), f"{name} of shape {shape}", "logprobs of shape (2, 3)")


@pytest.mark.parametrize("shape", [(2, 1), (1,), (3,), (1, 3), (2, 3, 1), ()])
def test_advantages_of_the_wrong_rank_or_shape(shape):
    with pytest.raises(ValueError) as error:
        _call(advantages=jnp.ones(shape))
    _needs(str(error.value), f"advantages of shape {shape}", "logprobs of shape (2, 3)")


def test_advantages_of_one_column_where_there_is_one_token():
    one: dict[str, Any] = {name: jnp.ones((2, 1)) for name in ("logprobs", "old_logprobs", "mask")}
    assert policy_loss(**one, advantages=jnp.ones((2, 1))).loss == -1
    assert policy_loss(**one, advantages=jnp.ones(2)).loss == -1


@pytest.mark.parametrize("shape", [(3,), (1, 2, 3), ()])
def test_logprobs_of_another_rank(shape):
    x = jnp.ones(shape)
    with pytest.raises(ValueError) as error:
        policy_loss(x, x, jnp.ones(1), x)
    _needs(str(error.value), f"logprobs of shape {shape}", "[B, T]")


def test_packed_rows_need_an_advantage_a_token():
    with pytest.raises(ValueError) as error:
        _call(segment_ids=jnp.ones((2, 3), jnp.int32))
    _needs(str(error.value), "advantages of shape (2,)", "segment_ids", "[B, T]")


def test_a_mask_of_words():
    loss = getattr(policy_loss, "__wrapped__", policy_loss)
    with pytest.raises(TypeError, match="mask"):
        _call(loss, mask=np.array([["yes", "yes", "no"]] * 2))


@pytest.mark.parametrize(
    ("loss", "options", "names"),
    [
        (grpo_loss, {"kl_coef": 0.1}, ("kl='k3'", "ref_logprobs")),
        (bnpo_loss, {"kl_coef": 0.1}, ("kl='k3'", "ref_logprobs")),
        (dapo_loss, {"total": -3}, ("total=-3",)),
        (dr_grpo_loss, {"max_completion_length": 0}, ("max_completion_length=0",)),
        (grpo_loss, {"kl_bias_correction": True}, ("kl_bias_correction=True", "kl='none'")),
        (dapo_loss, {"entropy_coef": 0.1}, ("entropy_coef=0.1", "entropy=None")),
        (bnpo_loss, {"rollout_max": 3.0}, ("rollout_max=3.0", "rollout_logprobs=None")),
    ],
)
def test_presets_refuse_likewise(loss, options, names):
    with pytest.raises(ValueError) as error:
        _call(loss, **options)
    _needs(str(error.value), *names)


@pytest.mark.parametrize("loss", [grpo_loss, bnpo_loss, dapo_loss])
def test_presets_do_not_swallow_unknown_options(loss):
    with pytest.raises(TypeError, match="clip_hihg"):
        _call(loss, clip_hihg=0.3)


def test_dr_grpo_needs_its_constant():
    with pytest.raises(TypeError, match="max_completion_length"):
        _call(dr_grpo_loss)
