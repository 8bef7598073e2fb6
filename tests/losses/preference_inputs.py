"""Arguments for the tests of preference losses, and the losses in numpy float64: one pair at a time, by plain odds."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from policy_inputs import as_jax

from logitless import LossOutput
from logitless.losses.preference import cpo_loss, dpo_loss, ipo_loss, kto_loss, orpo_loss, simpo_loss

CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
B = 5
# One pair that the policy gets wrong, one tie.
CHOSEN = np.array([-1.2, -0.4, -2.5, -0.9, -1.5])
REJECTED = np.array([-1.9, -1.1, -0.3, -0.9, -4.0])
ARRAYS = {
    "chosen": CHOSEN,
    "rejected": REJECTED,
    "ref_chosen": CHOSEN + np.array([0.4, -0.3, 0.8, 0.1, -0.6]),
    "ref_rejected": REJECTED + np.array([-0.2, 0.5, 0.3, 0.1, -0.1]),
    "chosen_nll": np.array([1.1, 0.2, 2.7, 0.8, 1.6]),
    "logprobs": CHOSEN,
    "ref_logprobs": CHOSEN + np.array([0.4, -0.3, 0.8, 0.1, -0.6]),
    "desirable": np.array([1, 0, 1, 0, 0]),
    "kl": np.array(0.3),
}


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def odds(logprob: float) -> float:
    return math.exp(logprob) / (1.0 - math.exp(logprob))


def _cross_entropy(p: float, s: float = 0.0) -> float:
    return (s - 1.0) * math.log(p) - s * math.log(1.0 - p)


def expected_loss(name: str, a: dict[str, np.ndarray], o: dict[str, Any]) -> float:
    """The loss; `a` holds the arrays, `o` the options."""
    first = a["logprobs" if name == "kto" else "chosen"]
    counted = [i for i in range(len(first)) if "mask" not in o or o["mask"][i]]
    if not counted:
        return 0.0
    s, losses = o.get("label_smoothing", 0.0), []
    for i in counted:
        if name == "kto":
            beta, kl = o.get("beta", 0.1), max(float(a["kl"]), 0.0)
            gain = a["logprobs"][i] - a["ref_logprobs"][i] - kl
            good = a["desirable"][i] != 0
            weight = o.get("desirable_weight" if good else "undesirable_weight", 1.0)
            losses.append(weight * (1.0 - _sigmoid(beta * (gain if good else -gain))))
            continue
        w, lost = float(a["chosen"][i]), float(a["rejected"][i])
        beta = o.get("beta", 2.0 if name == "simpo" else 0.1)
        if name == "orpo":
            ratio = odds(w) / odds(lost)
            losses.append(a["chosen_nll"][i] - beta * math.log(ratio / (1.0 + ratio)))
        elif name == "simpo":
            losses.append(_cross_entropy(_sigmoid(beta * w - beta * lost - o.get("gamma", 0.5)), s))
        elif name == "cpo":
            losses.append(
                _cross_entropy(_sigmoid(beta * w - beta * lost), s) + o.get("nll_coef", 1.0) * a["chosen_nll"][i]
            )
        else:
            h = (w - lost) - float(a["ref_chosen"][i] - a["ref_rejected"][i])
            kind = "ipo" if name == "ipo" else o.get("kind", "sigmoid")
            losses.append(
                {
                    "sigmoid": _cross_entropy(_sigmoid(beta * h), s),
                    "ipo": (h - 1.0 / (2.0 * beta)) ** 2,
                    "hinge": max(0.0, 1.0 - beta * h),
                }[kind]
            )
    return math.fsum(losses) / len(counted)


class Loss(NamedTuple):
    """A loss, what it takes by position, and which of that it is differentiated by."""

    call: Callable[..., LossOutput]
    takes: tuple[str, ...]
    moves: tuple[str, ...]


REF = ("chosen", "rejected", "ref_chosen", "ref_rejected")
PAIR = ("chosen", "rejected")
LOSSES = {
    "dpo": Loss(dpo_loss, REF, PAIR),
    "ipo": Loss(ipo_loss, REF, PAIR),
    "simpo": Loss(simpo_loss, PAIR, PAIR),
    "cpo": Loss(cpo_loss, (*PAIR, "chosen_nll"), (*PAIR, "chosen_nll")),
    "orpo": Loss(orpo_loss, (*PAIR, "chosen_nll"), (*PAIR, "chosen_nll")),
    "kto": Loss(kto_loss, ("logprobs", "ref_logprobs", "desirable", "kl"), ("logprobs",)),
}
MASK = np.array([1, 0, 1, 1, 0])
# Each option switched on alone (case 104).
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {"beta": 0.7}) for name in LOSSES],
    *[(name, {"mask": MASK}) for name in LOSSES],
    ("dpo", {"kind": "ipo"}),
    ("dpo", {"kind": "hinge"}),
    *[(name, {"label_smoothing": 0.2}) for name in ("dpo", "simpo", "cpo")],
    ("simpo", {"gamma": 1.3}),
    ("cpo", {"nll_coef": 0.3}),
    ("kto", {"desirable_weight": 1.4}),
    ("kto", {"undesirable_weight": 0.6}),
]
CASES = [*[(name, {}) for name in LOSSES], *OPTIONS]


def run(name: str, options: dict[str, Any], arrays: dict[str, Any] | None = None, dtype: str = "float64") -> Any:
    """Loss, metrics, and gradients by every float that the loss takes."""
    given = as_jax(ARRAYS | (arrays or {}), dtype)
    loss = LOSSES[name]
    floats = {n: given[n] for n in loss.takes if n != "desirable"}

    def f(floats: dict[str, jax.Array]) -> LossOutput:
        return loss.call(*[(given | floats)[n] for n in loss.takes], **options)

    (value, metrics), gradients = jax.value_and_grad(f, has_aux=True)(floats)
    return value, metrics, gradients
