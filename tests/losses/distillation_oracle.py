"""Divergences of two rows of logits from their definitions: numpy float64, no JAX."""

import math
from typing import Any

import numpy as np


def log_softmax(z: np.ndarray) -> list[float]:
    top = max(float(x) for x in z)
    total = math.fsum(math.exp(float(x) - top) for x in z)
    return [float(x) - top - math.log(total) for x in z]


def kl(p: list[float], q: list[float]) -> float:
    """KL(p || q) of log-probabilities, column by column."""
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True) if a > -math.inf)


def divergence(z_s: np.ndarray, z_t: np.ndarray, kind: str, beta: float = 0.5) -> float:
    """Divergence of one row of student and teacher logits."""
    s, t = log_softmax(z_s), log_softmax(z_t)
    if kind == "forward_kl":
        return kl(t, s)
    if kind == "reverse_kl":
        return kl(s, t)
    mixed = [beta * math.exp(b) + (1 - beta) * math.exp(a) for a, b in zip(s, t, strict=True)]
    m = [math.log(x) if x > 0 else -math.inf for x in mixed]
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def oracle_losses(h: Any, w: Any, b: Any, problem: Any, options: dict[str, Any]) -> list[float]:
    """Losses of all tokens from the formulas, ignored ones as 0; `options` holds every scalar."""

    def logits(h, w, b, scale, cap):
        x = (h @ w.T + b) * scale
        capped = x if cap is None else np.where(x == -np.inf, x, cap * np.tanh(x / cap))
        return capped / options.get("temperature", 1.0)

    z_s = logits(h, w, b, options.get("logit_scale", 1.0), options.get("softcap"))
    z_t = logits(
        problem.teacher_hidden, problem.teacher_head, problem.teacher_bias,
        options.get("teacher_logit_scale", 1.0), options.get("teacher_softcap"),
    )  # fmt: skip
    kind, beta = options["kind"], options.get("beta", 0.5)
    return [
        0.0 if label == -100 else divergence(one, two, kind, beta)
        for one, two, label in zip(z_s, z_t, problem.labels, strict=True)
    ]
