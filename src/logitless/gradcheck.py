"""Error budget of a candidate: loss, log-probabilities and every gradient against a float64 oracle.

A tolerance asks "is the candidate close?" and nobody knows how close is right. A budget asks "is the candidate's error
of the kind that plain jnp makes in the same dtypes?": both are measured against the same oracle, which is plain jnp on
the same numbers in float64, and the candidate may spend `factor` times the error of plain jnp plus a floor of a few
units in the last place.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from logitless._arrays import Array
from logitless._gradcheck_arrays import Comparison, LossAndLogprobs, against_oracle, losses_of, values_and_grads

# Rounding once to 16 bits costs half a unit in the last place; float32 sums in another order cost a few.
FLOOR_ULPS_16_BIT = 1.0
FLOOR_ULPS = 4.0


class Worst(NamedTuple):
    """The element where the candidate is furthest from the oracle, and what each of the three says there."""

    place: tuple[int, ...]
    candidate: float
    oracle: float
    plain: float

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.place))}]" if self.place else "(scalar)"
        return f"{place} candidate {self.candidate:.9g}, oracle {self.oracle:.9g}, plain jnp {self.plain:.9g}"


@dataclass(frozen=True)
class Budget:
    """What one array may err, and what it errs: the largest absolute difference to the oracle over all elements.

    Attributes:
        name: `loss`, `logprobs`, or `d_` and the argument's name for a gradient.
        candidate_error: of the candidate; infinite where it is not finite and the oracle is, or the reverse.
        plain_error: of plain jnp in the same dtypes, over the elements where it is finite.
        floor: what is allowed on top, in the same unit.
        factor: how much of the plain error is allowed.
        magnitude: largest finite absolute value of the oracle; relative errors are relative to it.
        worst: the worst element, or None where the arrays are empty or cannot be compared.
        problem: why the arrays cannot be compared (a wrong shape or dtype), or None.
    """

    name: str
    candidate_error: float
    plain_error: float
    floor: float
    factor: float
    magnitude: float
    worst: Worst | None
    problem: str | None = None

    @property
    def allowed(self) -> float:
        return self.factor * self.plain_error + self.floor

    @property
    def spent(self) -> float:
        """Fraction of the allowed error that the candidate spends; at most 1 inside the budget."""
        if self.candidate_error == 0.0:
            return 0.0
        return self.candidate_error / self.allowed if self.allowed > 0.0 else math.inf

    @property
    def relative_error(self) -> float:
        """The candidate's largest absolute error over the largest magnitude of the oracle."""
        if self.candidate_error == 0.0:
            return 0.0
        return self.candidate_error / self.magnitude if self.magnitude > 0.0 else math.inf

    @property
    def key(self) -> str:
        """The record's name of the candidate's absolute error."""
        return {"loss": "abs_diff_loss", "logprobs": "fwd/logp_max_abs"}.get(self.name, f"{self._stem}_max_abs")

    @property
    def relative_key(self) -> str | None:
        """The record's name of the relative error; gradients have one."""
        return None if self.name in ("loss", "logprobs") else f"{self._stem}_max_rel"

    @property
    def _stem(self) -> str:
        return "d" + self.name.removeprefix("d_")


@dataclass(frozen=True)
class GradcheckReport:
    """The result of `gradcheck`: `ok`, a readable `str()`, and a flat `record()` for a log.

    Attributes:
        budgets: one for the loss, one for the log-probabilities, one for each gradient.
        loss_ref: loss of the oracle.
        loss_kernel: loss of the candidate.
        gates: absolute limits that were asked for, by record name.
        vocab: V, columns of the logits.
        tokens: N, log-probabilities compared.
        block_sizes: as the caller gave them, for the record.
        oracle_dtype: dtype of the oracle.
    """

    budgets: tuple[Budget, ...]
    loss_ref: float
    loss_kernel: float
    gates: Mapping[str, float]
    vocab: int | None
    tokens: int
    block_sizes: Mapping[str, int]
    oracle_dtype: str

    @property
    def failures(self) -> tuple[str, ...]:
        """One sentence for each broken budget and gate, with the worst element."""
        found = []
        if not math.isfinite(self.loss_ref):
            found.append(
                f"loss: the oracle's loss is {self.loss_ref}, which proves nothing; give inputs with a finite loss"
            )
        for budget in self.budgets:
            if budget.problem is not None:
                found.append(f"{budget.name}: {budget.problem}")
            elif not budget.spent <= 1.0:
                found.append(
                    f"{budget.name}: error {budget.candidate_error:.3g} where {budget.allowed:.3g} is allowed "
                    f"({budget.factor:g} x {budget.plain_error:.3g} of plain jnp + floor {budget.floor:.3g}); "
                    f"worst element {budget.worst}"
                )
        measured = self._measured()
        for key, limit in self.gates.items():
            value, budget = measured[key]
            if not value <= limit:
                found.append(f"{budget.name}: {key} {value:.3g} above its gate {limit:g}; worst element {budget.worst}")
        return tuple(found)

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def spent(self) -> float:
        """The largest spent fraction over all budgets."""
        return max(budget.spent for budget in self.budgets)

    def _measured(self) -> dict[str, tuple[float, Budget]]:
        measured = {budget.key: (budget.candidate_error, budget) for budget in self.budgets}
        for budget in self.budgets:
            if budget.relative_key is not None:
                measured[budget.relative_key] = (budget.relative_error, budget)
        return measured

    def record(self) -> dict[str, Any]:
        """A flat dict of JSON values; numbers that JSON cannot hold are the strings `nan`, `inf` and `-inf`."""
        out: dict[str, Any] = {
            "ok": self.ok,
            "loss_ref": self.loss_ref,
            "loss_kernel": self.loss_kernel,
            "shape/vocab": self.vocab,
            "shape/tokens": self.tokens,
            "oracle_dtype": self.oracle_dtype,
        }
        out |= {f"blocks/{name}": size for name, size in self.block_sizes.items()}
        out |= {key: value for key, (value, _) in self._measured().items()}
        for budget in self.budgets:
            out[f"budget/{budget.key}/plain"] = budget.plain_error
            out[f"budget/{budget.key}/allowed"] = budget.allowed
            out[f"budget/{budget.key}/spent"] = budget.spent
        out |= {f"gate/{key}": limit for key, limit in self.gates.items()}
        out["failures"] = list(self.failures)
        return {key: _jsonable(value) for key, value in out.items()}

    def __str__(self) -> str:
        blocks = ", ".join(f"{name} {size}" for name, size in self.block_sizes.items()) or "default"
        lines = [
            f"gradcheck {'passed' if self.ok else 'FAILED'}: {self.tokens} tokens, vocabulary {self.vocab}, "
            f"blocks {blocks}, {self.oracle_dtype} oracle",
            f"loss_ref {self.loss_ref:.9g}, loss_kernel {self.loss_kernel:.9g}",
            f"{'quantity':<22}{'error':>11}{'plain jnp':>11}{'allowed':>11}{'spent':>8}{'relative':>11}",
        ]
        for budget in self.budgets:
            numbers = (budget.candidate_error, budget.plain_error, budget.allowed)
            relative = "" if budget.relative_key is None else f"{budget.relative_error:.3g}"
            lines.append(
                f"{budget.key:<22}"
                + "".join(f"{number:>11.3g}" for number in numbers)
                + f"{budget.spent:>8.2f}{relative:>11}"
            )
        return "\n".join([*lines, *self.failures])


def gradcheck(
    candidate: LossAndLogprobs,
    plain: LossAndLogprobs,
    args: Mapping[str, Array],
    *,
    differentiate: Sequence[str] | None = None,
    oracle_dtype: str = "float64",
    factor: float = 2.0,
    floors: Mapping[str, float] | None = None,
    gates: Mapping[str, float] | None = None,
    block_sizes: Mapping[str, int] | None = None,
    reordered: Iterable[Mapping[str, Array]] = (),
) -> GradcheckReport:
    """Judges a candidate's loss, log-probabilities and gradients by an error budget, against a float64 oracle.

    Equal to, for each of them::

        error = lambda x: max(abs(x - oracle))  # oracle = plain(args cast up to float64)
        ok = error(candidate) <= factor * error(plain) + floor

    Masked tokens are compared like all others: both functions must give the same there, and the same gradient. Where
    the oracle is not finite the candidate must hold the same value.

    Args:
        candidate: takes the arrays of `args` by name, gives `(loss, logprobs)`; the gradient is JAX's of `loss`.
        plain: the same in plain jnp. It runs twice: in the dtypes of `args` for the budget, in `oracle_dtype` as the
            oracle.
        args: every array of the call by name. Floating ones are cast up exactly for the oracle.
        differentiate: names of the arrays whose gradients are compared; unless given, those of `hidden`, `lm_head`,
            `bias` and `logits` that `args` holds.
        oracle_dtype: `"float64"`, or `"float32"` on a device without it.
        factor: how many times the error of plain jnp the candidate may make.
        floors: absolute floors by record name (`abs_diff_loss`, `fwd/logp_max_abs`, `dhidden_max_abs`, ...) in place
            of the default: 4 units in the last place (1 for 16-bit results) of the result's dtype at the oracle's
            largest magnitude; for the loss, at the largest of it and of the log-probabilities, for terms of that size
            may cancel in it; for a gradient, at least its largest magnitude times the floor of the log-probabilities,
            for their absolute error is a relative error of the softmax.
        gates: absolute limits by record name, those of the relative errors (`dhidden_max_rel`) included, on top of
            the budget. Relative means: over the largest magnitude of the oracle's array.
        block_sizes: block sizes that the candidate uses, for the report only.
        reordered: `args` again with an axis that is summed over in other orders, one dict an order. The loss is one
            number, in which rounding cancels by luck: the largest error that plain jnp makes in any order counts.

    Returns:
        A `GradcheckReport`: `.ok`, `.failures` with the worst element of each, `.record()`; errors are in the unit of
        each array.

    Raises:
        ValueError: a name in `differentiate`, `floors` or `gates` is not known, an array to differentiate is not
            floating, or `plain` itself does not give `(scalar loss, logprobs)`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def plain(hidden, lm_head):
        ...     logprobs = jax.nn.log_softmax(hidden @ lm_head)[:, 0]
        ...     return -logprobs.mean(), logprobs
        >>> args = {"hidden": jnp.ones((3, 4)), "lm_head": jnp.eye(4, 5)}
        >>> gradcheck(plain, plain, args).ok
        True

    Reference:
        The budget of the tests of Apple's ml-cross-entropy. Departures: the loss and every gradient are judged, by
        their elements.
    """
    observe = functools.partial(_observe, candidate)
    given = (floors or {}, gates or {}, block_sizes or {})
    return _judge(observe, plain, args, differentiate, oracle_dtype, factor, *given, reordered)


def gradcheck_values(
    values: Mapping[str, Array],
    plain: LossAndLogprobs,
    args: Mapping[str, Array],
    *,
    differentiate: Sequence[str] | None = None,
    oracle_dtype: str = "float64",
    factor: float = 2.0,
    floors: Mapping[str, float] | None = None,
    gates: Mapping[str, float] | None = None,
    block_sizes: Mapping[str, int] | None = None,
    reordered: Iterable[Mapping[str, Array]] = (),
) -> GradcheckReport:
    """`gradcheck`, by the same rule, of what another framework or other devices computed.

    `values` are `loss`, `logprobs` and gradients (`d_hidden`, ...). Where they hold no log-probabilities, those of
    `plain` stand in, for the floors.
    """

    def observe(args, names, expected, from_plain):
        observed = {name: jnp.asarray(value) for name, value in values.items()}
        return _comparable({"logprobs": from_plain["logprobs"]} | observed, args, names, expected)

    given = (floors or {}, gates or {}, block_sizes or {})
    return _judge(observe, plain, args, differentiate, oracle_dtype, factor, *given, reordered)


def _judge(
    observe, plain, args, differentiate, oracle_dtype, factor, floors, gates, block_sizes, reordered
) -> GradcheckReport:
    names = _check_names(args, differentiate, oracle_dtype, factor)
    args = {name: jnp.asarray(value) for name, value in args.items()}
    expected = _shapes(plain, args)
    if len(expected) != 2 or expected[0].shape != ():
        raise ValueError(f"gradcheck: plain gave {expected}; it must give (loss, logprobs), the loss a scalar")
    keys = {b.key for b in (_empty(name) for name in _quantities(names))}
    relative = {b.relative_key for b in (_empty(name) for name in _quantities(names))} - {None}
    _check_keys("floors", floors, keys)
    _check_keys("gates", gates, keys | relative)

    from_plain = values_and_grads(plain, args, names)
    from_candidate, problems = observe(args, names, expected, from_plain)
    pairs = {name: (from_candidate[name], from_plain[name]) for name in from_plain if name in from_candidate}
    losses = losses_of(plain, reordered) if "loss" in pairs else []
    compared = against_oracle(plain, args, names, pairs, losses, oracle_dtype)
    results = {name: from_plain[name] for name in _quantities(names)}
    return GradcheckReport(
        budgets=_budgets(compared, results, problems, floors, factor),
        loss_ref=float(compared["oracle loss"]),
        loss_kernel=float(from_candidate["loss"]) if "loss" in from_candidate else math.nan,
        gates=dict(gates),
        vocab=_vocab(args),
        tokens=math.prod(expected[1].shape),
        block_sizes=dict(block_sizes),
        oracle_dtype=oracle_dtype,
    )


def _check_names(args, differentiate, oracle_dtype, factor) -> tuple[str, ...]:
    if oracle_dtype not in ("float64", "float32"):
        raise ValueError(f"gradcheck: oracle_dtype is {oracle_dtype!r}; give 'float64' or 'float32'")
    if not factor > 0:
        raise ValueError(f"gradcheck: factor is {factor}; give a positive number")
    if differentiate is None:
        differentiate = [name for name in ("hidden", "lm_head", "bias", "logits") if name in args]
    for name in differentiate:
        if name not in args:
            raise ValueError(f"gradcheck: differentiate names {name!r}, but args holds {', '.join(args)}")
        if not jnp.issubdtype(args[name].dtype, jnp.floating):
            raise ValueError(f"gradcheck: {name!r} is {args[name].dtype}; only floating arrays have a gradient")
    if not differentiate:
        raise ValueError(f"gradcheck: nothing to differentiate among {', '.join(args)}; name it in differentiate")
    return tuple(differentiate)


def _check_keys(what: str, given: Mapping[str, float], known: set) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"gradcheck: {what} has {', '.join(unknown)}; known here: {', '.join(sorted(known))}")


def _quantities(names: Sequence[str]) -> list[str]:
    return ["loss", "logprobs", *(f"d_{name}" for name in names)]


def _empty(name: str, problem: str | None = None) -> Budget:
    return Budget(name, math.inf if problem else 0.0, 0.0, 0.0, 1.0, 0.0, None, problem)


def _shapes(function: LossAndLogprobs, args: Mapping[str, jax.Array]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.eval_shape(lambda values: tuple(function(**values)), dict(args)))


def _observe(candidate, args, names, expected, _) -> tuple[dict[str, jax.Array], dict[str, str]]:
    """The candidate's arrays that can be compared, and what is wrong with the others."""
    given = _shapes(candidate, args)
    if len(given) != 2 or given[0].shape != ():
        problem = f"the candidate gave shapes {[x.shape for x in given]}; it must give (scalar loss, logprobs)"
        return {}, dict.fromkeys(_quantities(names), problem)
    return _comparable(values_and_grads(candidate, args, names), args, names, expected)


def _comparable(observed, args, names, expected) -> tuple[dict[str, jax.Array], dict[str, str]]:
    problems = {}
    wanted = {"loss": expected[0], "logprobs": expected[1]} | {f"d_{name}": args[name] for name in names}
    for name, want in wanted.items():
        got = observed.get(name)
        if got is None or got.shape != want.shape or got.dtype != want.dtype:
            given = "nothing" if got is None else f"{got.dtype}{list(got.shape)}"
            problems[name] = f"the candidate gave {given} where {want.dtype}{list(want.shape)} is due"
    return {name: array for name, array in observed.items() if name not in problems}, problems


def _budgets(compared, results, problems, floors, factor) -> tuple[Budget, ...]:
    budgets = []
    for name in results:
        found = compared.get(name)
        if name in problems or found is None:
            budgets.append(_empty(name, problems.get(name)))
            continue
        budget = Budget(
            name=name,
            candidate_error=float(found.candidate_error),
            plain_error=float(found.plain_error),
            floor=_default_floor(name, found, compared.get("logprobs"), results),
            factor=factor,
            magnitude=float(found.magnitude),
            worst=Worst(
                tuple(int(i) for i in np.unravel_index(int(found.place), results[name].shape)),
                candidate=float(found.candidate),
                oracle=float(found.oracle),
                plain=float(found.plain),
            ),
        )
        floor = floors.get(budget.key)
        budgets.append(budget if floor is None else replace(budget, floor=floor))
    return tuple(budgets)


def _default_floor(name: str, found: Comparison, logprobs: Comparison | None, results) -> float:
    info = jnp.finfo(results[name].dtype)
    ulps = (FLOOR_ULPS_16_BIT if info.bits == 16 else FLOOR_ULPS) * float(info.eps)
    magnitude = float(found.magnitude)
    if logprobs is not None and name == "loss":
        magnitude = max(magnitude, float(logprobs.magnitude))
    if logprobs is not None and name.startswith("d_"):
        # An error of a log-probability is as large a relative error of the softmax, and so of every gradient.
        ulps = max(ulps, FLOOR_ULPS * float(jnp.finfo(results["logprobs"].dtype).eps) * float(logprobs.magnitude))
    return ulps * magnitude + float(info.smallest_subnormal)


def _vocab(args: Mapping[str, Array]) -> int | None:
    if "logits" in args:
        return args["logits"].shape[-1]
    if "lm_head" in args and "hidden" in args:
        rows, columns = args["lm_head"].shape
        return columns if rows == args["hidden"].shape[-1] else rows
    return None


def _jsonable(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
