"""The TPU kernels in JAX's simulation of a TPU, where races are found and fresh memory is NaN; judged by budgets."""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator
from jax.experimental.pallas import tpu as pltpu

from logitless.ops.pallas_tpu import linear_token_stats_pallas_tpu
from logitless.ops.reference import linear_token_stats_reference
from logitless.ops.types import OUTPUT_NAMES, HeadOptions, Layout, LogitScalars, TokenStats
from problems import Problem, assert_in_budget, in_layout, peaked

INPUTS = ("hidden", "lm_head", "bias")
SCALARS = {"temperature": 0.7, "softcap": 20.0, "logit_scale": 1.3}
BLOCKS = (16, 256)


@dataclass(frozen=True)
class Case:
    """What is fixed when a program is traced.

    Attributes:
        layout: of the head.
        outputs: the statistics asked for.
        used: those that have a cotangent; None for all of them.
        wrt: the inputs whose gradients are wanted; none for the forward pass alone.
        blocks: tokens and vocabulary columns of a block; None for the implementation's own rule.
        logits_dtype: to round to.
        dma: when a simulated copy takes place: as it is started, or not before somebody waits for it.
        cores: of the simulated chip.
        recorder: is told each step of a grid.
    """

    layout: Layout = "VD"
    outputs: tuple[str, ...] = OUTPUT_NAMES
    used: tuple[str, ...] | None = None
    wrt: tuple[str, ...] = INPUTS
    blocks: tuple[int | None, int | None] = BLOCKS
    logits_dtype: str | None = None
    dma: Any = "on_wait"
    cores: int = 1
    recorder: Any = None

    def options(self) -> HeadOptions:
        simulation = pltpu.InterpretParams(
            detect_races=True,
            uninitialized_memory="nan",
            dma_execution_mode=self.dma,
            num_cores_or_threads=self.cores,
            grid_point_recorder=self.recorder,
        )
        outputs: Any = self.outputs
        return HeadOptions(
            layout=self.layout,
            outputs=outputs,
            logits_dtype=self.logits_dtype,
            block_n=self.blocks[0],
            block_v=self.blocks[1],
            platform="tpu",
            interpret=simulation,
        )


@dataclass
class Given:
    """What a program is given: a peaked problem, its options, and a cotangent of each statistic.

    Attributes:
        problem: hidden states, head as `[V, D]`, targets, bias and mask.
        takes: which of "bias" and "mask" reach the program.
        scalars: temperature, softcap and logit scale, where there are any.
        cotangents: `[4, N]`.
    """

    problem: Problem
    takes: tuple[str, ...] = ()
    scalars: dict[str, float] = field(default_factory=dict)
    cotangents: np.ndarray = field(default_factory=lambda: np.zeros((4, 0)))

    def replace(self, **changes: Any) -> "Given":
        return replace(self, problem=self.problem._replace(**changes))

    def arguments(self, case: Case) -> tuple[Any, ...]:
        p = self.problem
        dtype = jnp.float64 if p.hidden.dtype == jnp.float64 else jnp.float32
        bias, mask = (getattr(p, name) if name in self.takes else None for name in ("bias", "mask"))
        scalars = LogitScalars(**{name: jnp.asarray(x, dtype) for name, x in self.scalars.items()})
        head = in_layout(p.lm_head, case.layout)
        return p.hidden, head, bias, p.targets, mask, scalars, jnp.asarray(self.cotangents, dtype)

    def widened(self) -> "Given":
        wide = {name: getattr(self.problem, name).astype(jnp.float64) for name in INPUTS}
        return self.replace(**wide)


def given(
    n: int, d: int, v: int, dtype: str = "float32", *takes: str, seed: int = 0, scalars: dict[str, float] | None = None
) -> Given:
    """A peaked problem with normal cotangents."""
    cotangents = np.random.default_rng(seed + 1).normal(size=(4, n))
    return Given(peaked(n, d, v, dtype, seed), takes, scalars or {}, cotangents)


def run(case: Case, given: Given) -> dict[str, np.ndarray]:
    """Statistics and gradients of the kernels, by their names; no race may have been found."""
    with watched():
        program = _program(linear_token_stats_pallas_tpu, case)
        return jax.tree.map(np.asarray, program(*given.arguments(case)))


def assert_within_budget(
    case: Case,
    given: Given,
    *,
    ulps: float = 8.0,
    by_row: bool = True,
    reference: Callable[..., TokenStats] = linear_token_stats_reference,
) -> dict[str, np.ndarray]:
    """`run`, with every value and gradient in its budget of error."""
    ours = run(case, given)
    with jax.enable_x64(True):
        oracle = _expected(reference, case, given.widened())
    plain = _plain(reference, case, given, oracle)
    for name, value in ours.items():
        assert value.dtype == plain[name].dtype, f"{name} is {value.dtype}, and {plain[name].dtype} was expected"
        # Where plain jnp is the oracle, its own error says nothing.
        units = ulps * (16.0 if value.dtype == np.float64 else 1.0)
        assert_in_budget(name, value, plain[name], oracle[name], ulps=units, by_row=by_row)
    return ours


def _plain(
    reference: Callable[..., TokenStats], case: Case, given: Given, oracle: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Plain jnp in the inputs' dtype: of several orders of D, in which it adds up, that with the largest error.

    A logit of 100 is rounded by 8e-6, and with it every probability: one order alone is at times right by luck.
    """
    p = given.problem
    found = []
    for shift in (0, 1, 2) if p.hidden.dtype == jnp.float32 else (0,):
        order = np.roll(np.arange(p.hidden.shape[1])[:: -1 if shift else 1], shift)
        turned = given.replace(hidden=p.hidden[:, order], lm_head=p.lm_head[:, order])
        out, back = _expected(reference, case, turned), np.argsort(order)
        for name, columns in (("d_hidden", 1), ("d_lm_head", 0 if case.layout == "DV" else 1)):
            if name in out:
                out[name] = np.take(out[name], back, axis=columns)
        found.append(out)

    def error(name: str, out: dict[str, np.ndarray]) -> float:
        finite = np.isfinite(oracle[name])
        return float(
            np.max(np.abs(np.where(finite, out[name], 0.0) - np.where(finite, oracle[name], 0.0)), initial=0.0)
        )

    return {name: max(found, key=lambda out: error(name, out))[name] for name in found[0]}


def _expected(reference: Callable[..., TokenStats], case: Case, given: Given) -> dict[str, np.ndarray]:
    """The same by other means, as one program for all cases of a size and dtype: every option there, if only as a 1."""
    p = given.problem
    bias = p.bias if "bias" in given.takes else jnp.zeros_like(p.bias)
    mask = p.mask if "mask" in given.takes else jnp.ones_like(p.mask)
    scalars = {"temperature": 1.0, "logit_scale": 1.0, **given.scalars}
    used = np.isin(OUTPUT_NAMES, case.outputs if case.used is None else case.used)
    cotangents = np.where(used[:, None], given.cotangents, 0.0)
    full = Given(p._replace(bias=bias, mask=mask), ("bias", "mask"), scalars, cotangents)
    general = Case(blocks=(None, None), logits_dtype=case.logits_dtype)
    out = jax.tree.map(np.asarray, _program(reference, general)(*full.arguments(general)))
    if case.layout == "DV":
        out["d_lm_head"] = out["d_lm_head"].T
    return out


@functools.cache
def _program(implementation: Any, case: Case) -> Any:
    options, used = case.options(), case.outputs if case.used is None else case.used

    def outcome(hidden, lm_head, bias, targets, mask, scalars, cotangents):
        inputs: dict[str, Any] = dict(zip(INPUTS, (hidden, lm_head, bias), strict=True))
        given: dict[str, Any] = dict(zip(OUTPUT_NAMES, cotangents, strict=True))

        def statistics(wanted):
            now = {**inputs, **wanted}
            stats: TokenStats = implementation(*(now[name] for name in INPUTS), targets, mask, scalars, options)
            every = {name: getattr(stats, name) for name in case.outputs}
            return {name: every[name] for name in used}, every

        if not case.wrt:
            return statistics({})[1]
        wanted = {name: inputs[name] for name in case.wrt if inputs[name] is not None}
        _, pull, every = jax.vjp(statistics, wanted, has_aux=True)
        (gradients,) = pull({name: given[name] for name in used})
        return {**every, **{f"d_{name}": x for name, x in gradients.items()}}

    # Most of a test's time is the compiler's: the simulation need not be fast.
    return jax.jit(outcome, compiler_options={"xla_backend_optimization_level": 1})


class Steps:
    """Counts the steps of every grid as the simulator takes them."""

    def __init__(self) -> None:
        self.taken: collections.Counter = collections.Counter()

    def __call__(self, token: Any, point: Any, core: Any) -> Any:
        self.taken[tuple(int(x) for x in point)] += 1
        return token


@contextlib.contextmanager
def watched() -> Iterator[list[Any]]:
    """Fails where any kernel within has a race, or leaves a semaphore that somebody should have waited for.

    The simulator itself keeps only what it found in the last kernel, and of semaphores it only prints.
    """
    kernels, said = [], []
    namespace: Any = vars(simulator)
    original = namespace["RaceDetectionState"]

    def watch(*args: Any, **kwargs: Any) -> Any:
        kernels.append(original(*args, **kwargs))
        return kernels[-1]

    namespace.update(RaceDetectionState=watch, print=lambda *words, **_: said.append(" ".join(map(str, words))))
    try:
        yield kernels
    finally:
        namespace["RaceDetectionState"] = original
        del namespace["print"]
        pltpu.reset_tpu_interpret_mode_state()
    assert kernels, "no kernel was simulated"
    assert not any(kernel.races_found for kernel in kernels), "a race"
    assert not said, said
