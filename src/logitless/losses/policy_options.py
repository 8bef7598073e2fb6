"""Which options of `policy_loss` have a meaning together. A combination without one raises and names both."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import jax.numpy as jnp

from logitless._arrays import Array, IntArray, Scalar, check_keywords, check_name, is_concrete, shape_error

RATIO_LEVELS = ("token", "sequence", "sequence_token")
SURROGATES = ("clip", "cispo", "sapo", "vespo", "none")
KLS = ("none", "k1", "k2", "k3")
AGGREGATIONS = ("sequence_mean", "token_mean", "constant", "given_total", "sequence_sum")
ROLLOUT_LEVELS = ("token", "sequence")
ROLLOUT_MODES = ("truncate", "mask")

if TYPE_CHECKING:
    RatioLevel = Literal["token", "sequence", "sequence_token"]
    Surrogate = Literal["clip", "cispo", "sapo", "vespo", "none"]
    KLName = Literal["none", "k1", "k2", "k3"]
    Aggregation = Literal["sequence_mean", "token_mean", "constant", "given_total", "sequence_sum"]
    Level = Literal["token", "sequence"]
    Mode = Literal["truncate", "mask"]
else:
    # The door refuses an unknown name, and names the nearest one.
    RatioLevel = Surrogate = KLName = Aggregation = Level = Mode = str


class _ReadBy(NamedTuple):
    """An option that changes nothing unless `other` is set to one of `values` (None: to anything)."""

    default: object
    other: str
    values: tuple[str, ...] | None
    why: str


_ESTIMATORS = ("k1", "k2", "k3")
_READ_BY = {
    "clip_low": _ReadBy(0.2, "surrogate", ("clip",), "only 'clip' has clip ranges"),
    "clip_high": _ReadBy(0.2, "surrogate", ("clip",), "only 'clip' has clip ranges"),
    "delta": _ReadBy(None, "surrogate", ("clip",), "only 'clip' has an upper bound of the ratio"),
    "cispo_max": _ReadBy(5.0, "surrogate", ("cispo",), "only 'cispo' reads it"),
    "tau_positive": _ReadBy(1.0, "surrogate", ("sapo",), "only 'sapo' reads it"),
    "tau_negative": _ReadBy(1.05, "surrogate", ("sapo",), "only 'sapo' reads it"),
    "vespo_k_pos": _ReadBy(2.0, "surrogate", ("vespo",), "only 'vespo' reads it"),
    "vespo_lambda_pos": _ReadBy(3.0, "surrogate", ("vespo",), "only 'vespo' reads it"),
    "vespo_k_neg": _ReadBy(3.0, "surrogate", ("vespo",), "only 'vespo' reads it"),
    "vespo_lambda_neg": _ReadBy(2.0, "surrogate", ("vespo",), "only 'vespo' reads it"),
    "kl_coef": _ReadBy(0.0, "kl", _ESTIMATORS, "name an estimator such as kl='k3'"),
    "kl_bias_correction": _ReadBy(False, "kl", _ESTIMATORS, "name an estimator such as kl='k3'"),
    "kl_clamp": _ReadBy(None, "kl", _ESTIMATORS, "name an estimator such as kl='k3'"),
    "total": _ReadBy(None, "aggregation", ("given_total",), "only 'given_total' divides by it"),
    "max_completion_length": _ReadBy(None, "aggregation", ("constant",), "only 'constant' divides by it"),
    "rollout_level": _ReadBy("token", "rollout_logprobs", None, "give the log-probabilities of the rollout engine"),
    "rollout_mode": _ReadBy("truncate", "rollout_logprobs", None, "give the log-probabilities of the rollout engine"),
    "rollout_max": _ReadBy(2.0, "rollout_logprobs", None, "give the log-probabilities of the rollout engine"),
    "rollout_min": _ReadBy(0.0, "rollout_mode", ("mask",), "only 'mask' has a lower bound"),
    "entropy_coef": _ReadBy(0.0, "entropy", None, "give the [B, T] entropies of linear_token_stats"),
    "top_entropy_quantile": _ReadBy(None, "entropy", None, "give the [B, T] entropies of linear_token_stats"),
}
_NAMES = {
    "ratio_level": RATIO_LEVELS,
    "surrogate": SURROGATES,
    "kl": KLS,
    "aggregation": AGGREGATIONS,
    "rollout_level": ROLLOUT_LEVELS,
    "rollout_mode": ROLLOUT_MODES,
}


class CommonOptions(TypedDict, total=False):
    """Options that every preset takes; `policy_loss` explains them."""

    kl_bias_correction: bool
    kl_clamp: float | None
    rollout_logprobs: Array | None
    rollout_level: Level
    rollout_mode: Mode
    rollout_max: float
    rollout_min: float
    entropy: Array | None
    entropy_coef: Scalar
    top_entropy_quantile: float | None
    segment_ids: IntArray | None


class PolicyOptions(CommonOptions, total=False):
    """All options of `policy_loss`."""

    kl: KLName
    ratio_level: RatioLevel
    surrogate: Surrogate
    clip_low: Scalar
    clip_high: Scalar
    delta: Scalar | None
    cispo_max: Scalar
    tau_positive: Scalar
    tau_negative: Scalar
    kl_coef: Scalar
    ref_logprobs: Array | None
    aggregation: Aggregation
    total: Scalar | None
    max_completion_length: int | None
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float


FIXED: dict[str, dict[str, Any]] = {
    "policy_loss": {},
    "grpo_loss": {},
    "bnpo_loss": {"aggregation": "token_mean"},
    "dr_grpo_loss": {"aggregation": "constant"},
    "dapo_loss": {"aggregation": "given_total"},
    "gspo_loss": {"ratio_level": "sequence"},
    "luspo_loss": {"ratio_level": "sequence", "aggregation": "sequence_sum"},
    "cispo_loss": {"surrogate": "cispo", "aggregation": "given_total"},
    "sapo_loss": {"surrogate": "sapo"},
    "vespo_loss": {"surrogate": "vespo", "aggregation": "given_total"},
}
"""What each preset decides; `token_level=True` of gspo makes its ratio level `"sequence_token"`."""


def preset_kl(kl: KLName | None, kl_coef: Scalar) -> KLName:
    """A preset names an estimator only where the divergence counts."""
    return kl or ("none" if is_off(kl_coef) else "k3")


def preset_options(name: str, options: CommonOptions) -> CommonOptions:
    """The options as they are; raises TypeError for one that the preset fixes, or that nobody knows."""
    fixed = f"{name} fixes it: policy_loss takes it as an option"
    hints = dict.fromkeys(PolicyOptions.__annotations__.keys() - CommonOptions.__annotations__.keys(), fixed)
    check_keywords(name, options, CommonOptions.__annotations__, hints)
    return options


def is_off(value: object, default: object = 0.0) -> bool:
    """True where an option stands at its default; a traced number counts as set."""
    if value is None or default is None:
        return value is default
    return is_concrete(value) and bool(value == default)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError for an unknown name, a number out of range, or two options that exclude each other."""
    for option, names in _NAMES.items():
        check_name(name, option, options[option], names)
    _check_ranges(name, options)
    for option, rule in _READ_BY.items():
        other = options[rule.other]
        read = other is not None if rule.values is None else other in rule.values
        if not read and not is_off(options[option], rule.default):
            _exclude(name, f"{option}={options[option]!r}", f"{rule.other}={other!r}", rule.why)
    surrogate, level = options["surrogate"], options["ratio_level"]
    if level != "token" and surrogate in ("cispo", "sapo", "vespo"):
        _exclude(name, f"ratio_level={level!r}", f"surrogate={surrogate!r}", "it is a token-level loss")
    if surrogate == "vespo" and options["rollout_level"] == "sequence":
        _exclude(name, "rollout_level='sequence'", "surrogate='vespo'", "it sums token weights itself")
    if options["aggregation"] == "constant" and options["max_completion_length"] is None:
        raise ValueError(f"{name}: aggregation='constant' needs max_completion_length, the tokens a sequence may have")
    if options["kl"] != "none" and options["ref_logprobs"] is None:
        raise ValueError(f"{name}: kl={options['kl']!r} needs ref_logprobs, [B, T] of the reference policy")


def _check_ranges(name: str, options: Mapping[str, Any]) -> None:
    needs = {
        "clip_low": ("at least 0 and at most 1 (a distance from 1, not a bound)", lambda x: 0 <= x <= 1),
        "clip_high": ("at least 0 (a distance from 1, not a bound)", lambda x: x >= 0),
        "delta": ("above 0", lambda x: x > 0),
        "cispo_max": ("above 0", lambda x: x > 0),
        "tau_positive": ("above 0", lambda x: x > 0),
        "tau_negative": ("above 0", lambda x: x > 0),
        "kl_clamp": ("above 0", lambda x: x > 0),
        "rollout_max": ("above 0", lambda x: x > 0),
        "rollout_min": ("at least 0", lambda x: x >= 0),
        "top_entropy_quantile": ("above 0 and at most 1", lambda x: 0 < x <= 1),
        "total": ("at least 0 (a token count)", lambda x: x >= 0),
        "max_completion_length": ("at least 1", lambda x: x >= 1),
    }
    for option, (needed, holds) in needs.items():
        value = options[option]
        if value is not None and is_concrete(value) and not bool(holds(value)):
            raise ValueError(f"{name}: {option}={value}; it must be {needed}")
    smallest, largest = options["rollout_min"], options["rollout_max"]
    if is_concrete(smallest, largest) and smallest > largest:
        raise ValueError(f"{name}: rollout_min={smallest} lies above rollout_max={largest}; no weight would be left")


def _exclude(name: str, first: str, second: str, why: str) -> None:
    raise ValueError(f"{name}: {first} has no meaning with {second}: {why}")


def check_shapes(name: str, logprobs: Array, arrays: Mapping[str, Array | None], advantages: Array) -> None:
    """Raises ValueError naming both shapes; nothing is broadcast but advantages `[B]`."""
    if jnp.ndim(logprobs) != 2:
        raise shape_error(name, {"logprobs": logprobs}, "it must be [B, T]: one row a sequence")
    for argument, x in arrays.items():
        if x is not None and jnp.shape(x) != jnp.shape(logprobs):
            raise shape_error(name, {argument: x, "logprobs": logprobs}, "both must be [B, T]")
    batch = jnp.shape(logprobs)[0]
    if jnp.shape(advantages) not in ((batch,), jnp.shape(logprobs)):
        raise shape_error(
            name,
            {"advantages": advantages, "logprobs": logprobs},
            "advantages must be [B] (one a sequence) or [B, T] (one a token)",
        )
    if not jnp.issubdtype(jnp.asarray(logprobs).dtype, jnp.floating):
        raise TypeError(f"{name}: logprobs is {jnp.asarray(logprobs).dtype}; log-probabilities are floats, in nats")
    ids = arrays.get("segment_ids")
    if ids is not None and not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name}: segment_ids is {ids.dtype}; they must be integers, 0 for padding")
    if ids is not None and jnp.ndim(advantages) != 2:
        raise shape_error(
            name, {"advantages": advantages}, "with segment_ids they must be [B, T]: a row has many sequences"
        )
