"""Distillation from hidden states and from logits: formulas, budgets, ignored tokens, -inf columns, refusals."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distillation_oracle import divergence, oracle_losses
from oracle import central_differences

from logitless.audit import assert_logitless
from logitless.losses.linear_distillation import IMPLEMENTATIONS, distillation_loss, linear_distillation_loss
from logitless.ops.distill import DIVERGENCES
from problems import SIZES, assert_in_budget, dynamic_loops, in_layout, peaked

every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_kind = pytest.mark.parametrize("kind", DIVERGENCES)
# Where each case compiles three programs: the others on request.
jsd_and_others = pytest.mark.parametrize(
    "kind", [kind if kind == "jsd" else pytest.param(kind, marks=pytest.mark.slow) for kind in DIVERGENCES]
)
LAYOUTS = [("DV", "DV"), ("VD", "VD"), ("DV", "VD"), ("VD", "DV")]
BLOCKS = {
    "own rule": None,
    "ragged blocks": {"block_n": 16, "block_v": 100},
    "tiny blocks": {"block_n": 3, "block_v": 2},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 20.0, "teacher_softcap": 15.0},
    "logit_scale": {"logit_scale": 0.3, "teacher_logit_scale": 1.2},
    "bias": {"bias": True, "teacher_bias": True},
    "all": {
        "temperature": 1.7, "softcap": 20.0, "teacher_softcap": 30.0, "logit_scale": 1.3, "teacher_logit_scale": 0.6,
        "bias": True, "teacher_bias": True,
    },
}  # fmt: skip
SMALL = {"block_n": 4, "block_v": 6}


class Pair(NamedTuple):
    """Student and teacher, heads as `[V, D]`."""

    hidden: Any
    lm_head: Any
    bias: Any
    teacher_hidden: Any
    teacher_head: Any
    teacher_bias: Any
    labels: Any


def pair(n: int, d: int, v: int, dtype: str, seed: int = 0) -> Pair:
    """A peaked student, and a teacher of another width that is peaked elsewhere; three tokens in ten are ignored."""
    student, teacher = peaked(n, d, v, dtype, seed), peaked(n, d + 3, v, dtype, seed + 100)
    labels = jnp.where(student.mask, student.targets, -100)
    return Pair(*student[:2], student.bias, *teacher[:2], teacher.bias, labels)


def run(problem: Pair, hidden: Any, lm_head: Any, *, layouts: Any = ("VD", "VD"), **options: Any) -> Any:
    """The loss, with a head as `[V, D]` and the other inputs of the problem; `bias` True takes the problem's."""
    for key in ("bias", "teacher_bias"):
        if options.get(key) is True:
            options[key] = getattr(problem, key)
    return linear_distillation_loss(
        hidden, in_layout(lm_head, layouts[0]), problem.teacher_hidden, in_layout(problem.teacher_head, layouts[1]),
        options.pop("labels", problem.labels), layout=layouts[0], teacher_layout=layouts[1], **options,
    )  # fmt: skip


def gradients(problem: Pair, **options: Any) -> Any:
    """The summed loss, and its gradients by hidden states and head."""
    return jax.value_and_grad(lambda h, w: jnp.sum(run(problem, h, w, **options)), (0, 1))(*problem[:2])


def with_beta(kind: str, beta: float = 0.3) -> dict[str, Any]:
    return {"kind": kind, "beta": beta} if kind == "jsd" else {"kind": kind}


@every
@every_kind
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_values_and_gradients_of_the_formulas(x64, layouts, kind, implementation):
    rng = np.random.default_rng(4)
    shapes = ((5, 3), (7, 3), (7,), (5, 4), (7, 4), (7,))
    problem = Pair._make([*(jnp.asarray(rng.normal(size=shape)) for shape in shapes), jnp.asarray([1, -100, 3, 0, 6])])
    options = {**OPTIONS["all"], **with_beta(kind), "softcap": 3.0, "teacher_softcap": 2.0}
    plain = Pair(*(np.asarray(x) for x in problem))
    weights = np.asarray([0.5, 9.0, -1.0, 0.0, 2.0])

    def loss(h, w, b, reduction):
        bias = {"bias": b, "weights": weights, "reduction": reduction}
        sizes = {"block_n": 2, "block_v": 3}
        how = {**options, **bias, "implementation": implementation, "block_sizes": sizes}
        return run(problem, h, w, layouts=layouts, **how)

    def expected(h, w, b):
        return float(np.dot(weights, oracle_losses(h, w, b, plain, options))) / 1.5

    tokens = oracle_losses(*plain[:3], plain, options)
    np.testing.assert_allclose(loss(*problem[:3], "none"), weights * tokens, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(loss(*problem[:3], "sum"), weights @ tokens, rtol=1e-12)
    value, actual = jax.value_and_grad(loss, (0, 1, 2))(*problem[:3], "mean")
    np.testing.assert_allclose(value, expected(*plain[:3]), rtol=1e-12)
    for i, gradient in enumerate(actual):
        arguments = list(plain[:3])
        numeric = central_differences(
            lambda x, i=i, a=arguments: expected(*(x if j == i else y for j, y in enumerate(a))), arguments[i]
        )
        np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-8)


@functools.cache
def program(layouts: tuple[str, str], kind: str, option: str, implementation: str, blocks: str) -> Any:
    """Token losses, and the gradients of hidden, lm_head and bias for one cotangent; compiled once."""
    options = {**OPTIONS[option], **with_beta(kind)}
    takes_bias = options.pop("bias", False)

    @jax.jit
    def both(problem, cotangent):
        def losses(hidden, lm_head, bias):
            how = {**options, "implementation": implementation, "block_sizes": BLOCKS[blocks], "reduction": "none"}
            return run(problem, hidden, lm_head, layouts=layouts, bias=bias if takes_bias else None, **how)

        out, pull = jax.vjp(losses, *problem[:3])
        return out, *pull(cotangent)

    return both


def assert_all_in_budget(
    size: Any, dtype: str, layouts: Any, kind: str, option: str, blocks: str, seeds: int = 2
) -> None:
    for seed in range(seeds):
        n, d, v = size
        problem = pair(n, d, v, dtype, seed)
        cotangent = jnp.asarray(np.random.default_rng(seed).normal(size=problem.labels.size), jnp.float32)
        ours = program(layouts, kind, option, "chunked", blocks)(problem, cotangent)
        plain = program(layouts, kind, option, "reference", "own rule")(problem, cotangent)
        with jax.enable_x64(True):
            wide = Pair._make([*(x.astype(jnp.float64) for x in problem[:-1]), problem.labels])
            oracle = program(layouts, kind, option, "reference", "own rule")(wide, cotangent.astype(jnp.float64))
        for name, *values in zip(("loss", "d_hidden", "d_lm_head", "d_bias"), ours, plain, oracle, strict=True):
            assert values[0].dtype == (jnp.float32 if name == "loss" else dtype)
            # A logit of 20 rounds its probability by 20 units, and plain jnp is at times right by luck.
            assert_in_budget(name, *values, ulps=32 if dtype == "float32" else 8, by_row=False)


@jsd_and_others
@pytest.mark.parametrize(
    ("dtype", "layouts", "option"),
    # Options and layouts do not depend on the dtype, whose one cast is in "plain" and "all".
    [
        *[("float32", ("VD", "VD"), option) for option in OPTIONS],
        *[("float32", layouts, "all") for layouts in LAYOUTS if layouts != ("VD", "VD")],
        *[("bfloat16", ("VD", "DV"), option) for option in ("plain", "all")],
    ],
)
def test_options_and_layouts_stay_in_budget(dtype, layouts, option, kind):
    assert_all_in_budget((37, 24, 301), dtype, layouts, kind, option, "ragged blocks")


@jsd_and_others
@pytest.mark.parametrize(
    ("size", "blocks"),
    [*[(size, "ragged blocks") for size in SIZES], *[("nothing divides", b) for b in BLOCKS if b != "ragged blocks"]],
)
def test_sizes_and_blocks_stay_in_budget(size, blocks, kind):
    assert_all_in_budget(SIZES[size], "float32", ("DV", "DV"), kind, "all", blocks, seeds=1)


@every_kind
def test_a_small_divergence_keeps_its_digits(kind):
    # Logits apart by 1e-3: terms of first order cancel in plain jnp, whose error is as large as a tenth of the loss.
    rng = np.random.default_rng(0)
    z_t = rng.normal(size=(6, 40)) * 3
    z_s = np.asarray(z_t + 1e-3 * rng.normal(size=z_t.shape), np.float32)
    z_t = np.asarray(z_t, np.float32)
    eye = jnp.eye(6)
    sizes = {"block_n": 2, "block_v": 16}
    how = {**with_beta(kind, 0.5), "reduction": "none", "implementation": "chunked", "block_sizes": sizes}
    loss = linear_distillation_loss(eye, jnp.asarray(z_s), eye, jnp.asarray(z_t), **how)
    expected = [divergence(a, b, kind) for a, b in zip(z_s.astype(float), z_t.astype(float), strict=True)]
    np.testing.assert_allclose(loss, expected, rtol=2e-3)
    assert (np.asarray(loss) > 0).all()


@every
@every_kind
def test_equal_heads_diverge_by_nothing(kind, implementation):
    problem = pair(37, 24, 301, "float32")
    same = problem._replace(
        teacher_hidden=problem.hidden, teacher_head=problem.lm_head, teacher_bias=problem.bias, labels=None
    )
    options = {**with_beta(kind), "bias": True, "teacher_bias": True, "temperature": 0.7, "block_sizes": SMALL}
    value, slopes = gradients(same, implementation=implementation, **options)
    np.testing.assert_allclose(value, 0.0, atol=0.0 if implementation == "chunked" else 1e-6)
    for slope in slopes:
        np.testing.assert_allclose(slope, 0.0, atol=0.0 if implementation == "chunked" else 1e-6)


@every
@every_kind
def test_ignored_tokens_may_hold_anything(kind, implementation):
    problem = pair(3, 4, 17, "float32")._replace(labels=jnp.asarray([2, -100, 5]))
    spoilt = problem._replace(
        hidden=problem.hidden.at[1].set(jnp.nan), teacher_hidden=problem.teacher_hidden.at[1].set(jnp.inf)
    )
    options = {**with_beta(kind), "implementation": implementation, "block_sizes": SMALL}
    clean, bad = gradients(problem, **options), gradients(spoilt, **options)
    jax.tree.map(np.testing.assert_array_equal, bad, clean)
    assert (np.asarray(bad[1][0])[1] == 0).all()
    tokens = run(spoilt, *spoilt[:2], reduction="none", **options)
    assert tokens[1] == 0
    np.testing.assert_allclose(bad[0], (tokens[0] + tokens[2]) / 2, rtol=1e-6)
    # A label is read for nothing else, a weight of 0 skips likewise, and the mean divides by the weights.
    weights = jnp.asarray([3.0, 0.0, 1.0])
    weighed = run(spoilt, *spoilt[:2], labels=None, weights=weights, **options)
    np.testing.assert_allclose(weighed, (3 * tokens[0] + tokens[2]) / 4, rtol=1e-6)


@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_tokens_ignored(dtype, implementation):
    problem = pair(5, 3, 7, dtype)._replace(labels=jnp.full(5, 9, jnp.int32))
    problem = problem._replace(hidden=jnp.full_like(problem.hidden, jnp.nan))
    for reduction in ("mean", "sum", "none"):
        value, slopes = gradients(problem, ignore_index=9, reduction=reduction, implementation=implementation)
        assert value.dtype == jnp.float32
        assert value == 0
        for slope, x in zip(slopes, problem[:2], strict=True):
            assert slope.shape == x.shape and slope.dtype == x.dtype and (slope == 0).all()


@every
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3), (2, 0, 3), (2, 3, 4)])
def test_any_leading_axes(shape, implementation):
    rng = np.random.default_rng(0)
    h, t = (jnp.asarray(rng.normal(size=(*shape, d)), jnp.float32) for d in (6, 4))
    w, u = jnp.ones((6, 40)), jnp.ones((4, 40))

    def loss(h, w, reduction):
        return linear_distillation_loss(h, w, t, u, reduction=reduction, implementation=implementation)

    # Rows of equal logits: uniform on both sides.
    np.testing.assert_allclose(loss(h, w, "none"), np.zeros(shape), atol=1e-6)
    value, slopes = jax.value_and_grad(loss, (0, 1))(h, w, "mean")
    assert abs(value) < 1e-6 and slopes[0].shape == h.shape and slopes[1].shape == w.shape
    assert np.isfinite(slopes[0]).all() and np.isfinite(slopes[1]).all()
    flat = distillation_loss(h @ w, t @ u, reduction="none")
    assert flat.shape == shape and flat.dtype == jnp.float32


OUT = {
    "both": ([0, 4], [0, 4]),
    "teacher": ([], [0, 4]),
    "student": ([0, 4], []),
    "student less": ([0], [0, 4]),
    "a block of both": ([3, 4, 5], [3, 4, 5]),
}


@every
@jsd_and_others
@pytest.mark.parametrize("out", OUT)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_columns_at_minus_infinity(x64, softcap, out, kind, implementation):
    problem = pair(4, 3, 8, "float64")._replace(labels=jnp.asarray([0, 1, -100, 2]))
    for field, columns in zip(("bias", "teacher_bias"), OUT[out], strict=True):
        places = jnp.asarray(columns, jnp.int32)
        problem = problem._replace(**{field: getattr(problem, field).at[places].set(-jnp.inf)})
    options = {**with_beta(kind), "softcap": softcap, "teacher_softcap": softcap, "bias": True, "teacher_bias": True}
    how = {**options, "implementation": implementation, "block_sizes": {"block_n": 2, "block_v": 3}}
    value, slopes = gradients(problem, reduction="none", **how)
    # Where one is -inf and the other is not, the KL that reads the ratio there is infinite and has no gradient.
    infinite = (kind == "forward_kl" and out == "student") or (
        kind == "reverse_kl" and out in ("teacher", "student less")
    )
    for slope in slopes:
        assert np.isfinite(slope).all() and ((np.asarray(slope) == 0).all() == infinite)
    assert (np.asarray(slopes[1])[OUT[out][0]] == 0).all()
    if infinite:
        assert value == np.inf
        return
    plain = Pair(*(np.asarray(x) for x in problem))
    expected = oracle_losses(*plain[:3], plain, options)
    np.testing.assert_allclose(value, sum(expected), rtol=1e-11)
    if kind == "jsd":
        assert max(expected) <= math.log(2)
    numeric = central_differences(lambda h: sum(oracle_losses(h, *plain[1:3], plain, options)), plain.hidden)
    np.testing.assert_allclose(slopes[0], numeric, rtol=1e-5, atol=1e-7)


@every
@every_kind
def test_disjoint_support_and_rows_without_a_finite_logit(kind, implementation):
    h, w = jnp.ones((1, 1)), jnp.zeros((1, 2))
    run = functools.partial(linear_distillation_loss, h, w, h, w, kind=kind, implementation=implementation)
    apart = run(bias=jnp.asarray([0.0, -jnp.inf]), teacher_bias=jnp.asarray([-jnp.inf, 0.0]))
    np.testing.assert_allclose(apart, math.log(2) if kind == "jsd" else np.inf, rtol=1e-6)
    assert jnp.isnan(run(bias=jnp.full(2, -jnp.inf)))
    assert jnp.isnan(run(teacher_bias=jnp.full(2, -jnp.inf)))


@every
@every_kind
def test_the_teacher_has_no_gradient(kind, implementation):
    problem = pair(5, 3, 7, "float32")

    def loss(hidden, head, bias):
        changed = problem._replace(teacher_hidden=hidden, teacher_head=head)
        return run(changed, *problem[:2], teacher_bias=bias, implementation=implementation, **with_beta(kind))

    for slope in jax.grad(loss, (0, 1, 2))(*problem[3:6]):
        assert (slope == 0).all()
    slope = jax.grad(lambda z: distillation_loss(jnp.ones((2, 5)), z, **with_beta(kind)))(jnp.eye(2, 5))
    assert (slope == 0).all()


@pytest.mark.parametrize("layout", ["DV", "VD"])
def test_a_frozen_head_costs_no_gradient(layout):
    problem = pair(64, 16, 4096, "float32")
    head = in_layout(problem.lm_head, layout)
    teacher = in_layout(problem.teacher_head, layout)

    def loss(h, w, teacher_hidden, teacher):
        sizes = {"block_v": 256}
        return linear_distillation_loss(h, w, teacher_hidden, teacher, layout=layout, block_sizes=sizes)

    def compiled(argnums):
        arguments = (problem.hidden, head, problem.teacher_hidden, teacher)
        program = jax.jit(jax.grad(loss, argnums)).lower(*arguments).compile()
        text = program.as_text()
        assert text is not None
        return program, text

    frozen, text = compiled(0)
    trained, trained_text = compiled((0, 1))
    assert trained_text.count(" dot(") == text.count(" dot(") + 1
    memory = frozen.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < head.size * 4
    # Nothing that the frozen program makes has the shape of either head, in either order of axes.
    made = [line for line in text.splitlines() if "parameter(" not in line and "get-tuple-element" not in line]
    shapes = [head.shape, head.shape[::-1], teacher.shape, teacher.shape[::-1]]
    assert not any(f"= f32[{a},{b}]" in line for line in made for a, b in shapes)


@every_kind
def test_the_program_holds_no_logits_of_either_head(kind):
    problem = pair(64, 24, 900, "bfloat16")
    arguments = (problem.hidden, problem.lm_head, problem.teacher_hidden, problem.teacher_head, problem.labels)
    for labels in (problem.labels, None):

        def loss(h, w, t, u, implementation="auto", labels=labels):
            how = {**with_beta(kind), "layout": "VD", "implementation": implementation}
            return linear_distillation_loss(h, w, t, u, labels, **how)

        assert_logitless(loss, *arguments[:4], vocab_size=900, num_tokens=64)
    with pytest.raises(AssertionError):
        assert_logitless(
            functools.partial(loss, implementation="reference"), *arguments[:4], vocab_size=900, num_tokens=64
        )


@every_kind
def test_tokens_with_zero_cotangents_are_never_computed(kind):
    # Only a token whose block is never run can hold NaN without spoiling the head's gradient.
    problem = pair(37, 24, 301, "float32")
    counts = problem.labels != -100
    spoilt = problem._replace(hidden=jnp.where(counts[:, None], problem.hidden, jnp.nan), labels=None)
    options = {**with_beta(kind), "reduction": "none", "implementation": "chunked", "block_sizes": SMALL}

    def loss(h, w, problem):
        return jnp.sum(jnp.where(counts, run(problem, h, w, **options), 0.0))

    slopes = [jax.grad(loss, (0, 1))(*x[:2], x) for x in (spoilt, problem._replace(labels=None))]
    jax.tree.map(np.testing.assert_array_equal, *slopes)
    assert dynamic_loops(lambda h, w: run(problem, h, w, **options), *problem[:2])
    assert not dynamic_loops(lambda h, w: run(problem, h, w, **options, labels=None), *problem[:2])


@every
@every_kind
def test_jit_vmap_and_remat_agree_with_eager(kind, implementation):
    problems = [pair(11, 6, 90, "float32", seed) for seed in range(3)]
    hidden, labels = (jnp.stack([p[i] for p in problems]) for i in (0, 6))
    problem = problems[0]
    options = {**with_beta(kind), "softcap": 30.0, "implementation": implementation, "block_sizes": SMALL}

    def loss(h, w, labels):
        return run(problem, h, w, labels=labels, **options)

    both = jax.value_and_grad(loss, (0, 1))
    eager = [both(hidden[i], problem.lm_head, labels[i]) for i in range(3)]
    eager = jax.tree.map(lambda *x: jnp.stack(x), *eager)
    vmapped = jax.vmap(both, in_axes=(0, None, 0))(hidden, problem.lm_head, labels)
    remat = jax.vmap(jax.value_and_grad(jax.checkpoint(loss), (0, 1)), in_axes=(0, None, 0))
    remat = jax.jit(remat)(hidden, problem.lm_head, labels)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, vmapped, eager)
    jax.tree.map(close, remat, eager)


def test_refused_derivatives():
    problem = pair(5, 3, 7, "float32")

    def loss(h, **options):
        return run(problem, h, problem.lm_head, implementation="chunked", **options)

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (problem.hidden,), (problem.hidden,))
    with pytest.raises(NotImplementedError, match="second derivative; use implementation='reference'"):
        jax.hessian(loss)(problem.hidden)
    for option in ("temperature", "softcap", "teacher_softcap", "logit_scale", "teacher_logit_scale", "beta"):
        kind = "jsd" if option == "beta" else "forward_kl"
        of_option = functools.partial(lambda x, option, kind: loss(problem.hidden, kind=kind, **{option: x}), kind=kind)
        with pytest.raises(NotImplementedError, match="stop_gradient"):
            jax.grad(functools.partial(of_option, option=option))(0.7)
        traced = jax.jit(functools.partial(of_option, option=option))
        assert jnp.isfinite(traced(0.7)) and jnp.isnan(traced(-1.5))


@every_kind
def test_logits_level_equals_the_formulas(x64, kind):
    rng = np.random.default_rng(2)
    z_s, z_t = rng.normal(size=(2, 3, 5)) * 3, rng.normal(size=(2, 3, 5)) * 3
    z_s[..., 1] = z_t[..., 1] = -np.inf
    labels = np.asarray([[0, -100, 2], [3, 4, 0]])
    weights = np.asarray([[1.0, np.nan, 2.0], [0.5, 0.0, 3.0]])
    z_s[0, 1], z_t[1, 1] = np.nan, np.nan
    counts = (labels != -100) & (weights != 0)

    def expected(z):
        tokens = [w * divergence(a / 1.7, b / 1.7, **with_beta(kind)) for w, a, b in zip(weights[counts], z, z_t[counts], strict=True)]  # fmt: skip # noqa: E501 - one comprehension
        return math.fsum(tokens) / weights[counts].sum()

    def loss(z):
        return distillation_loss(z, z_t, labels, weights=weights, temperature=1.7, **with_beta(kind))

    value, slope = jax.value_and_grad(loss)(jnp.asarray(z_s))
    np.testing.assert_allclose(value, expected(z_s[counts]), rtol=1e-12)
    finite = np.isfinite(z_s) & counts[..., None]

    def of_finite(x):
        z = z_s.copy()
        z[finite] = x
        return expected(z[counts])

    np.testing.assert_allclose(np.asarray(slope)[finite], central_differences(of_finite, z_s[finite]), atol=1e-8)
    assert (np.asarray(slope)[~finite] == 0).all()
    low = jax.grad(lambda z: distillation_loss(z, jnp.ones((2, 4), jnp.bfloat16)))(jnp.eye(2, 4, dtype=jnp.bfloat16))
    assert low.dtype == jnp.bfloat16 and np.isfinite(low.astype(jnp.float32)).all()
