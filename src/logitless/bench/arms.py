"""From the name of an arm to what it runs: ours and JAX peers as a loss, other frameworks as a program."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from logitless.bench.cases import ARGUMENTS, ArmConfig, Case
from logitless.bench.child import now_ms
from logitless.bench.errors import BenchError
from logitless.bench.inputs import labels_of
from logitless.bench.peers import PEERS, Peer, left_out
from logitless.bench.peers_torch import TorchProgram


def require(arm: ArmConfig) -> None:
    """Raises BenchError for an unknown name, module or function, before anything is fetched or compiled."""
    if arm.is_own:
        _own(arm)
    elif arm.implementation in PEERS:
        if arm.block_sizes:
            raise BenchError(f"arm {arm.label}: block_sizes are for implementations of ours; {arm.label} is a peer")
        if arm.logits_dtype:
            raise BenchError(f"arm {arm.label}: logits_dtype is for implementations of ours; {arm.label} is a peer")
    else:
        from logitless.ops.api import TOKEN_LOSS_IMPLEMENTATIONS

        if arm.implementation not in TOKEN_LOSS_IMPLEMENTATIONS:
            known = ", ".join(TOKEN_LOSS_IMPLEMENTATIONS)
            raise BenchError(
                f"arm {arm.label}: no implementation {arm.implementation!r}; known are {known}, "
                f"peers {', '.join(PEERS)}, or module:function"
            )


def why_left_out(arm: ArmConfig, case: Case) -> str | None:
    """Why the arm cannot run the case here, in words that say what would help; None where it can."""
    if arm.is_own:
        return None if case.loss in arm.losses else f"its losses are {', '.join(arm.losses)}"
    peer = PEERS.get(arm.implementation)
    return None if peer is None else left_out(peer, case)


def peer_of(arm: ArmConfig) -> Peer | None:
    return None if arm.is_own else PEERS.get(arm.implementation)


def framework_of(arm: ArmConfig) -> str:
    peer = peer_of(arm)
    return arm.framework if peer is None else peer.framework


def loss_of(arm: ArmConfig, case: Case) -> Callable[..., Any]:
    """The loss of a JAX arm as a function of the arrays of `ARGUMENTS`, which gives a scalar."""
    if arm.is_own:
        own, options = _own(arm), _own_options(case)
        if case.loss == "cross_entropy":
            return lambda hidden, lm_head, targets, old, advantages, mask: _scalar(
                own(hidden, lm_head, _labels(targets, mask), **options)
            )
        return lambda *arrays: _scalar(own(*arrays, **options))
    peer = peer_of(arm)
    if peer is not None:
        function = peer.functions[case.loss]
        return lambda *arrays: function(case, *arrays)
    options = _options(arm, case)
    if case.loss == "cross_entropy":
        from logitless.losses.linear import linear_cross_entropy

        return lambda hidden, lm_head, targets, old, advantages, mask: linear_cross_entropy(
            hidden, lm_head, _labels(targets, mask), **options
        )
    from logitless.losses.linear_presets import linear_grpo_loss

    return lambda *arrays: linear_grpo_loss(*arrays, **options).loss


def logprobs_of(arm: ArmConfig, case: Case) -> Callable[..., Any] | None:
    """The arm's log-probabilities, or None for one that gives only a loss: a peer or one of the user's own."""
    if arm.is_own or peer_of(arm) is not None:
        return None
    from logitless.ops.api import linear_logprobs

    options = _options(arm, case)
    if arm.implementation == "one_pass":
        # It has none of its own: without a gradient it is the forward pass of chunked.
        options["implementation"] = "chunked"
    return lambda hidden, lm_head, targets, mask: linear_logprobs(hidden, lm_head, targets, mask=mask, **options)


def program_of(arm: ArmConfig, case: Case, arrays: dict[str, np.ndarray]) -> "TorchProgram | OwnProgram":
    """The program of an arm whose framework is not JAX."""
    peer = peer_of(arm)
    if peer is None:
        return OwnProgram(_own(arm), case, arrays)
    return TorchProgram(peer.functions[case.loss], case, arrays)


class OwnProgram:
    """A function of the user's own over numpy arrays, in whatever framework; has the methods of a TorchProgram."""

    def __init__(self, function: Callable[..., Any], case: Case, arrays: dict[str, np.ndarray]) -> None:
        # JAX's own dependency, which gives numpy its bfloat16.
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
        self._function, self._options = function, _own_options(case) | {"differentiate": tuple(case.differentiate)}
        given = arrays | {name: arrays[name].astype(dtype, copy=False) for name in ("hidden", "lm_head")}
        names: Sequence[str] = ARGUMENTS
        if case.loss == "cross_entropy":
            names = ("hidden", "lm_head", "labels")
            given["labels"] = labels_of(arrays["targets"], arrays["mask"])
        self._inputs = [given[name] for name in names]

    def run(self) -> Any:
        return self._function(*self._inputs, **self._options)

    def step(self) -> float:
        start = now_ms()
        self.run()
        return now_ms() - start

    def loss(self, result: Any) -> float:
        return float(result[0])

    def values(self, result: Any) -> dict[str, np.ndarray]:
        loss, gradients = result
        given = {f"d_{name}": np.asarray(value) for name, value in gradients.items()}
        return {"loss": np.asarray(loss, np.float32), **given}

    def device_peak_bytes(self) -> int | None:
        return None


def _options(arm: ArmConfig, case: Case) -> dict[str, Any]:
    return {
        "layout": case.layout,
        "softcap": case.softcap,
        "logits_dtype": arm.logits_dtype,
        "implementation": arm.implementation,
        "block_sizes": arm.block_sizes,
    }


def _own_options(case: Case) -> dict[str, Any]:
    return {"layout": case.layout} | ({} if case.softcap is None else {"softcap": case.softcap})


def _labels(targets: Any, mask: Any) -> Any:
    import jax.numpy as jnp

    return jnp.where(mask, targets, -100)


def _scalar(output: Any) -> Any:
    from logitless.losses.policy import LossOutput

    return output.loss if isinstance(output, LossOutput) else output


def _own(arm: ArmConfig) -> Callable[..., Any]:
    path = arm.implementation
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise BenchError(
            f"arm {path}: cannot import {module!r} ({error}); it must lie on PYTHONPATH or be installed"
        ) from error
    function = vars(found).get(name)
    if not callable(function):
        raise BenchError(f"arm {path}: module {module!r} has no function {name!r}")
    return function
