"""What the losses must give, from the formulas of the design: numpy float64, one token at a time, no JAX.

Gradients are central differences. An argument `held` stands for the values under a stop-gradient: the differences move
`logprobs` and `entropy` only.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Place = tuple[int, int]


def fixture() -> dict[str, np.ndarray]:
    """Fixture F of the reported cases: hidden states, head, targets, and what plain softmaxes make of them."""
    b, t, d = np.meshgrid(np.arange(2), np.arange(3), np.arange(3), indexing="ij")
    hidden = np.sin(1.0 + 7 * b + 3 * t + d)
    v, d = np.meshgrid(np.arange(5), np.arange(3), indexing="ij")
    lm_head = np.cos(0.5 * v + d)
    targets = (2 * np.arange(2)[:, None] + np.arange(3)[None, :]) % 5
    logits = np.array([[[float(h @ w) for w in lm_head] for h in row] for row in hidden])
    stats = {name: np.zeros((2, 3)) for name in ("logprobs", "lse", "entropy")}
    for i in range(2):
        for j in range(3):
            row = softmax_stats(logits[i, j], int(targets[i, j]))
            for name, array in stats.items():
                array[i, j] = row[name]
    logprobs = stats["logprobs"]
    return {
        "hidden": hidden,
        "lm_head": lm_head,
        "targets": targets,
        "logits": logits,
        "mask": np.array([[1, 1, 0], [1, 0, 0]]),
        "advantages": np.array([1.0, -0.5]),
        "old_logprobs": logprobs - np.array([[0.3, -0.1, 0.5], [0.4, 0.2, -0.6]]),
        "ref_logprobs": logprobs + np.array([[0.2, -0.4, 1.0], [-0.3, 0.1, 2.0]]),
        **stats,
    }


def softmax_stats(z: np.ndarray, target: int) -> dict[str, float]:
    """Log-probability, log-sum-exp, entropy and mean of one row of logits."""
    top = max(float(x) for x in z)
    total = sum(math.exp(float(x) - top) for x in z)
    lse = top + math.log(total)
    probabilities = [math.exp(float(x) - lse) for x in z]
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    return {"logprobs": float(z[target]) - lse, "lse": lse, "entropy": entropy, "mean": float(sum(z)) / len(z)}


def find_sequences(shape: tuple[int, int], segment_ids: np.ndarray | None) -> list[list[Place]]:
    """The places of each sequence: rows, or runs of one non-zero id."""
    if segment_ids is None:
        return [[(b, t) for t in range(shape[1])] for b in range(shape[0])]
    sequences: list[list[Place]] = []
    for b in range(shape[0]):
        last = 0
        for t in range(shape[1]):
            here = int(segment_ids[b, t])
            if here and here != last:
                sequences.append([])
            if here:
                sequences[-1].append((b, t))
            last = here
    return sequences


def divergence(logprob: float, ref: float, kl: str, clamp: float | None) -> float:
    """One token's estimate."""
    x = ref - logprob
    if clamp is not None:
        x = min(max(x, -clamp), clamp)
    return {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - x - 1}[kl]


def policy_loss(
    logprobs: np.ndarray,
    old_logprobs: np.ndarray | None,
    advantages: np.ndarray,
    mask: np.ndarray,
    *,
    held: np.ndarray | None = None,
    ratio_level: str = "token",
    kl: str = "none",
    kl_coef: float = 0.0,
    ref_logprobs: np.ndarray | None = None,
    kl_bias_correction: bool = False,
    kl_clamp: float | None = None,
    aggregation: str = "sequence_mean",
    total: float | None = None,
    max_completion_length: int = 0,
    rollout_logprobs: np.ndarray | None = None,
    rollout_level: str = "token",
    rollout_mode: str = "truncate",
    rollout_max: float = 2.0,
    rollout_min: float = 0.0,
    entropy: np.ndarray | None = None,
    entropy_coef: float = 0.0,
    keep: np.ndarray | None = None,
    segment_ids: np.ndarray | None = None,
    surrogate: str = "clip",
    **knobs: float,
) -> float:
    """The loss; `keep` marks the tokens whose policy term counts, `knobs` are those of the surrogate."""
    held = logprobs if held is None else held
    old = held if old_logprobs is None else old_logprobs
    sequences = find_sequences(logprobs.shape, segment_ids)
    means, sums, token_count = [], [], 0
    for sequence in sequences:
        counted = [place for place in sequence if mask[place]]
        weights = _weights(counted, old, rollout_logprobs, rollout_level, rollout_mode, rollout_max, rollout_min)
        ratios = _ratios(counted, logprobs, held, old, ratio_level)
        losses = []
        for place in counted:
            a = float(advantages[place] if advantages.ndim == 2 else advantages[place[0]])
            loss = 0.0
            if keep is None or keep[place]:
                if surrogate == "vespo":
                    loss = -_vespo(counted, held, old, weights, a, knobs) * a * logprobs[place]
                else:
                    loss = weights[place] * _surrogate(surrogate, ratios[place], float(logprobs[place]), a, knobs)
            if kl != "none":
                assert ref_logprobs is not None
                k = divergence(float(logprobs[place]), float(ref_logprobs[place]), kl, kl_clamp)
                loss += kl_coef * k * (ratios[place][0] if kl_bias_correction else 1.0)
            if entropy is not None:
                loss -= entropy_coef * float(entropy[place])
            losses.append(loss)
        token_count += len(counted)
        sums.append(math.fsum(losses))
        means.append(math.fsum(losses) / len(counted) if counted else 0.0)
    if not sequences:
        return 0.0
    if aggregation == "given_total":
        denominator = token_count if total is None else total
        return math.fsum(sums) / (denominator or 1)
    return {
        "sequence_mean": math.fsum(means) / len(sequences),
        "token_mean": math.fsum(sums) / max(token_count, 1),
        "constant": math.fsum(sums) / max(len(sequences) * max_completion_length, 1),
        "sequence_sum": math.fsum(sums) / len(sequences),
    }[aggregation]


def _ratios(
    counted: list[Place], logprobs: np.ndarray, held: np.ndarray, old: np.ndarray, level: str
) -> dict[Place, tuple[float, float]]:
    """Ratio of every token, and the same under a stop-gradient."""

    def ratio(log_ratio: float) -> float:
        return math.exp(min(log_ratio, 80.0))

    moving = [float(logprobs[p] - old[p]) for p in counted]
    still = [float(held[p] - old[p]) for p in counted]
    if level == "token":
        return {p: (ratio(x), ratio(y)) for p, x, y in zip(counted, moving, still, strict=True)}
    if not counted:
        return {}
    mean, mean_still = sum(moving) / len(counted), sum(still) / len(counted)
    if level == "sequence":
        return dict.fromkeys(counted, (ratio(mean), ratio(mean_still)))
    return {p: (ratio(mean_still + float(logprobs[p] - held[p])), ratio(mean_still)) for p in counted}


def _weights(
    counted: list[Place],
    old: np.ndarray,
    rollout: np.ndarray | None,
    level: str,
    mode: str,
    largest: float,
    smallest: float,
) -> dict[Place, float]:
    if rollout is None:
        return dict.fromkeys(counted, 1.0)
    gaps = {p: float(old[p] - rollout[p]) for p in counted}
    gaps = {p: 0.0 if math.isnan(gap) else gap for p, gap in gaps.items()}
    if level == "sequence":
        gaps = dict.fromkeys(counted, sum(gaps.values()))
    weights = {p: math.exp(min(gap, 80.0)) for p, gap in gaps.items()}
    if mode == "truncate":
        return {p: min(w, largest) for p, w in weights.items()}
    return {p: w if smallest <= w <= largest else 0.0 for p, w in weights.items()}


def _surrogate(
    surrogate: str, ratio: tuple[float, float], logprob: float, advantage: float, knobs: dict[str, float]
) -> float:
    r, still = ratio
    if surrogate == "none":
        return -r * advantage
    if surrogate == "cispo":
        return -min(still, knobs.get("cispo_max", 5.0)) * advantage * logprob
    if surrogate == "sapo":
        tau = knobs.get("tau_positive", 1.0) if advantage > 0 else knobs.get("tau_negative", 1.05)
        return -advantage * 4.0 / tau / (1.0 + math.exp(-min(tau * (r - 1.0), 700.0)))
    low, high = 1.0 - knobs.get("clip_low", 0.2), 1.0 + knobs.get("clip_high", 0.2)
    inner = min(max(r, low), high) * advantage
    return -min(min(r, knobs.get("delta", math.inf)) * advantage, inner)


def _vespo(
    counted: list[Place],
    held: np.ndarray,
    old: np.ndarray,
    weights: dict[Place, float],
    advantage: float,
    knobs: dict[str, float],
) -> float:
    s = sum(min(max(float(held[p] - old[p]), -20.0), 20.0) for p in counted)
    s += sum(math.log(max(w, 1e-8)) for w in weights.values())
    s = min(max(s, math.log(1e-8)), 20.0)
    if advantage >= 0:
        k, rate = knobs.get("vespo_k_pos", 2.0), knobs.get("vespo_lambda_pos", 3.0)
    else:
        k, rate = knobs.get("vespo_k_neg", 3.0), knobs.get("vespo_lambda_neg", 2.0)
    return math.exp(rate + k * s - rate * math.exp(s))


def policy_gradient(logprobs: np.ndarray, *args: Any, **options: Any) -> np.ndarray:
    """Derivatives of `policy_loss` by the log-probabilities."""
    return central_differences(lambda x: policy_loss(x, *args, held=logprobs, **options), logprobs)


def central_differences(f: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Derivatives of a scalar function, one element at a time; `step` keeps about ten digits."""
    x = np.array(x, np.float64)
    derivative = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        moved = x.copy()
        moved[place] = x[place] + step
        above = f(moved)
        moved[place] = x[place] - step
        derivative[place] = (above - f(moved)) / (2 * step)
    return derivative


def cross_entropy(
    logits: np.ndarray,
    labels: np.ndarray,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: np.ndarray | None = None,
    reduction: str = "mean",
) -> np.ndarray:
    """Cross-entropy of logits `[N, V]`, one token at a time."""
    losses = np.zeros(len(labels))
    count = 0.0
    for i, label in enumerate(labels):
        if label == ignore_index:
            continue
        row = softmax_stats(logits[i], int(label))
        loss = (1 - label_smoothing) * -row["logprobs"] + label_smoothing * (row["lse"] - row["mean"])
        weight = 1.0 if weights is None else float(weights[i])
        losses[i] = weight * (loss + z_loss * row["lse"] ** 2)
        count += weight
    if reduction == "none":
        return losses
    return np.asarray(math.fsum(losses) / (1.0 if reduction == "sum" else count or 1.0))


def assert_close(actual: Any, expected: Any, *, rtol: float = 1e-7, atol: float = 1e-8, what: str = "value") -> None:
    """Raises with the worst element and both its values."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    if actual.size == 0:
        return
    with np.errstate(invalid="ignore"):
        excess = np.abs(actual - expected) - (atol + rtol * np.abs(expected))
    excess = np.where((actual == expected) | (np.isnan(actual) & np.isnan(expected)), -np.inf, excess)
    excess = np.where(np.isnan(excess), np.inf, excess)
    worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
    place = [int(i) for i in worst]
    assert excess[worst] <= 0, f"{what}{place}: {actual[worst]!r}, expected {expected[worst]!r}\n{actual}\n{expected}"
