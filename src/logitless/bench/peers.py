"""Losses that are not ours as arms of a bench: what each needs, what it can do, and how it is called.

Nothing of a peer is imported before it runs; a peer that is not installed is left out of a run.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from logitless.bench import peers_torch
from logitless.bench.cases import Case


@dataclass(frozen=True)
class Peer:
    """One peer.

    Attributes:
        modules: what must be importable.
        install: what puts it there.
        framework: `jax`, or `torch` for a program outside JAX.
        functions: of a JAX peer, by loss: `(case, *arrays of ARGUMENTS)` to a scalar; of torch, a Batch to a scalar.
        distributions: whose versions a record names.
        cuda_only: losses that it has on CUDA alone.
        softcap: losses that it takes a softcap in.
        rounds_logits: it rounds logits to the dtype of the hidden states, by design. Its budget is then that of plain
            jnp with the same rounding; the oracle does not round.
    """

    modules: tuple[str, ...]
    install: str
    framework: Literal["jax", "torch"]
    functions: Mapping[str, Callable[..., Any]]
    distributions: tuple[str, ...]
    cuda_only: tuple[str, ...] = ()
    softcap: tuple[str, ...] = ()
    rounds_logits: bool = False


def left_out(peer: Peer, case: Case) -> str | None:
    """Why the peer cannot run the case here, or None."""
    missing = [name for name in peer.modules if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: {peer.install}"
    if case.loss not in peer.functions:
        return f"it has no loss {case.loss}"
    if case.loss in peer.cuda_only and case.device != "gpu":
        return f"it has {case.loss} on CUDA alone"
    if case.softcap is not None and case.loss not in peer.softcap:
        return f"its {case.loss} takes no softcap"
    return None


def plain_jnp(case: Case, *arrays: Any) -> Any:
    """The loss as it is written without a library."""
    import jax
    import jax.numpy as jnp

    from logitless.bench.plain import plain_loss

    hidden, lm_head, *rest = arrays
    logits = jnp.matmul(hidden, lm_head if case.layout == "DV" else lm_head.T, precision=jax.lax.Precision.HIGHEST)
    return plain_loss(case.loss, logits, *rest, softcap=case.softcap)


def tunix_grpo(case: Case, *arrays: Any) -> Any:
    """GRPO of log-probabilities as Tunix's learner takes them: all logits, in the dtype that the model computes in."""
    import jax
    import jax.numpy as jnp

    hidden, lm_head, targets, old_logprobs, advantages, mask = arrays
    common = importlib.import_module("tunix.rl.common")
    logits = jnp.matmul(hidden, lm_head if case.layout == "DV" else lm_head.T, precision=jax.lax.Precision.HIGHEST)
    if case.softcap is not None:
        logits = logits.astype(jnp.float32)
        logits = case.softcap * jnp.tanh(logits / case.softcap)
    ratio = jnp.exp(common.selective_log_softmax(logits, targets) - old_logprobs)
    advantage = advantages[:, None]
    token_loss = jnp.maximum(-ratio * advantage, -jnp.clip(ratio, 0.8, 1.2) * advantage)
    counts = mask.astype(jnp.float32)
    return ((token_loss * counts).sum(axis=1) / jnp.maximum(counts.sum(axis=1), 1.0)).mean()


def _tokamax(implementation: str) -> Callable[..., Any]:
    def cross_entropy(case: Case, *arrays: Any) -> Any:
        import jax.numpy as jnp

        tokamax = importlib.import_module("tokamax")
        hidden, lm_head, targets, _, _, mask = arrays
        # It has no ignored label: their losses weigh 0 outside.
        losses = tokamax.linear_softmax_cross_entropy_loss(
            hidden.reshape(-1, hidden.shape[-1]),
            targets.reshape(-1),
            lm_head if case.layout == "DV" else lm_head.T,
            reduction="none",
            implementation=implementation,
        ).astype(jnp.float32)
        counts = mask.reshape(-1).astype(losses.dtype)
        return (losses * counts).sum() / jnp.maximum(counts.sum(), 1.0)

    return cross_entropy


TORCH = "pip install torch==2.13.0"
LIGER = f"{TORCH} liger-kernel==0.8.5"
TOKAMAX = "pip install tokamax==0.0.17, with Python 3.12"

PEERS: dict[str, Peer] = {
    "plain_jnp": Peer(
        modules=("jax",),
        install="pip install jax",
        framework="jax",
        functions={"grpo": plain_jnp, "cross_entropy": plain_jnp},
        distributions=(),
        softcap=("grpo", "cross_entropy"),
        rounds_logits=True,
    ),
    "torch": Peer(
        modules=("torch",),
        install=TORCH,
        framework="torch",
        functions={"grpo": peers_torch.grpo, "cross_entropy": peers_torch.cross_entropy},
        distributions=("torch",),
        softcap=("grpo", "cross_entropy"),
        rounds_logits=True,
    ),
    "torch_chunked": Peer(
        modules=("torch",),
        install=TORCH,
        framework="torch",
        functions={"cross_entropy": peers_torch.chunked_cross_entropy},
        distributions=("torch",),
        rounds_logits=True,
    ),
    "liger": Peer(
        modules=("torch", "liger_kernel"),
        install=LIGER,
        framework="torch",
        functions={"grpo": peers_torch.liger_grpo, "cross_entropy": peers_torch.liger_cross_entropy},
        distributions=("torch", "liger-kernel"),
        cuda_only=("cross_entropy",),
        softcap=("cross_entropy",),
        rounds_logits=True,
    ),
    "liger_compiled": Peer(
        modules=("torch", "liger_kernel"),
        install=LIGER,
        framework="torch",
        functions={"grpo": peers_torch.liger_compiled_grpo},
        distributions=("torch", "liger-kernel"),
        rounds_logits=True,
    ),
    "cut_cross_entropy": Peer(
        modules=("torch", "cut_cross_entropy"),
        install=f"{TORCH} cut-cross-entropy==25.1.1",
        framework="torch",
        functions={"cross_entropy": peers_torch.cut_cross_entropy},
        distributions=("torch", "cut-cross-entropy"),
        cuda_only=("cross_entropy",),
        softcap=("cross_entropy",),
    ),
    "tunix": Peer(
        modules=("tunix",),
        install="pip install google-tunix==0.1.7",
        framework="jax",
        functions={"grpo": tunix_grpo},
        distributions=("google-tunix",),
        softcap=("grpo",),
        rounds_logits=True,
    ),
    "tokamax_chunked_xla": Peer(
        modules=("tokamax",),
        install=TOKAMAX,
        framework="jax",
        functions={"cross_entropy": _tokamax("chunked_xla")},
        distributions=("tokamax",),
        rounds_logits=True,
    ),
    "tokamax_xla": Peer(
        modules=("tokamax",),
        install=TOKAMAX,
        framework="jax",
        functions={"cross_entropy": _tokamax("xla")},
        distributions=("tokamax",),
        rounds_logits=True,
    ),
}
"""Every peer by the name that a config calls it by."""
