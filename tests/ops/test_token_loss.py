"""Error budgets of `linear_token_loss` against numpy in long double; the incoming cotangent; public fault reports."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.ops.api import linear_token_loss
from logitless.ops.types import Layout
from problems import SIZES, TOKEN_LOSS_HERE, Problem, assert_in_budget, assert_near, fixture_f, in_layout, peaked
from token_loss_oracle import LOSSES, Outcome, TokenLoss, by_hand, plain, softmax, weighted_nll

pytestmark = pytest.mark.rounding

every = pytest.mark.parametrize("implementation", TOKEN_LOSS_HERE)
blocked = pytest.mark.parametrize("implementation", [x for x in TOKEN_LOSS_HERE if x != "reference"])

OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 20.0},
    "logit_scale": {"logit_scale": 0.3},
    "bias": {"bias": True},
    "mask": {"mask": True},
    "logits_dtype": {"logits_dtype": "bfloat16", "bias": True},
    "all": {"temperature": 0.7, "softcap": 20.0, "logit_scale": 1.3, "bias": True, "mask": True},
    # A cap of logits in the hundreds leaves plain jnp no digits of its slope.
    "all without a cap": {"temperature": 0.7, "logit_scale": 1.3, "bias": True, "mask": True},
}
BLOCKS = {
    "own rule": None,
    "ragged blocks": {"block_n": 16, "block_v": 100},
    "tiny blocks": {"block_n": 3, "block_v": 2},
    "block_bytes": {"block_bytes": 4096},
}


@functools.cache
def program(implementation: str, layout: Layout, option: str, loss: str, blocks: str):
    """Loss, log-probabilities and all gradients of `scale * loss`; compiled once for each dtype and size."""

    @jax.jit
    def run(problem: Problem, arguments: tuple, scale):
        if implementation == "plain jnp":
            return plain(problem, LOSSES[loss], arguments, scale, layout, OPTIONS[option])
        options = dict(OPTIONS[option])
        bias, mask = (getattr(problem, key) if options.pop(key, False) else None for key in ("bias", "mask"))
        options |= {"mask": mask, "layout": layout, "implementation": implementation, "block_sizes": BLOCKS[blocks]}

        def total(hidden, lm_head, bias):
            out = linear_token_loss(hidden, lm_head, problem.targets, LOSSES[loss].of, arguments, bias=bias, **options)
            return scale * out[0], out

        inputs = (problem.hidden, in_layout(problem.lm_head, layout), bias)
        argnums = (0, 1) if bias is None else (0, 1, 2)
        gradients, out = jax.grad(total, argnums, has_aux=True)(*inputs)
        return Outcome(*out, *gradients, *(() if bias is not None else (jnp.zeros_like(problem.bias),)))

    return run


def make_problem(size: tuple[int, int, int], dtype: str, option: str, seed: int) -> Problem:
    """A peaked problem whose bias takes columns out that are nobody's target."""
    problem = peaked(*size, dtype, seed)
    if option == "logits_dtype":
        # Eighths: the products are exact in every dtype, so that all who round them round the same number.
        problem = problem._replace(
            **{key: jnp.round(getattr(problem, key) * 8) / 8 for key in ("hidden", "lm_head", "bias")}
        )
    spare = np.setdiff1d(np.arange(size[2]), problem.targets)[:3]
    return problem._replace(bias=problem.bias.at[spare].set(-jnp.inf))


def assert_within_budget(
    size: tuple[int, int, int], dtype: str, layout: Layout, option: str, loss: str, implementation: str, blocks: str
) -> None:
    for seed in range(3):
        problem = make_problem(size, dtype, option, seed)
        sums = jnp.float64 if dtype == "float64" else jnp.float32
        logprobs = softmax(problem, OPTIONS[option]).logprobs.astype(np.float64)
        arguments = LOSSES[loss].arguments(logprobs, np.random.default_rng(seed))
        arguments = tuple(jnp.asarray(x, sums) for x in arguments)
        # Loss scaling keeps float16 gradients clear of its smallest numbers, whose spacing is no rounding.
        scale = jnp.asarray((1.0, 3.7, -0.25)[seed] * (256 if dtype == "float16" else 1), sums)
        ours = program(implementation, layout, option, loss, blocks)(problem, arguments, scale)
        other = program("plain jnp", layout, option, loss, "own rule")(problem, arguments, scale)
        right, added = by_hand(problem, LOSSES[loss], arguments, scale.item(), layout, OPTIONS[option])
        assert [x.dtype for x in ours] == [sums, sums] + 3 * [problem.hidden.dtype]
        # A sum that cancels owes its error to what it adds up.
        allowed = 2 * abs(other.loss.item() - right.loss.item()) + 8 * float(jnp.finfo(sums).eps) * added
        assert abs(ours.loss.item() - right.loss.item()) <= allowed, (ours.loss, other.loss, right.loss, allowed)
        rounded = _of_rounding(LOSSES[loss], right.logprobs, arguments) if sums == jnp.float32 else 0.0
        for name, one, two, three in list(zip(Outcome._fields, ours, other, right, strict=True))[1:]:
            # Sums of many blocks, where plain jnp has one product.
            assert_in_budget(name, one, two, three, ulps=8, carried=rounded if name == "d_hidden" else 0.0)


def _of_rounding(loss: TokenLoss, logprobs: np.ndarray, arguments: tuple) -> np.ndarray:
    """How far each token's slope moves, of its size, where its log-probability is off by a unit in the last place."""
    x = np.asarray(logprobs, np.float64)
    step = np.spacing(np.abs(x).astype(np.float32)).astype(np.float64)
    arguments = tuple(np.asarray(y, np.float64) for y in arguments)
    slope, moved = (np.asarray(loss.by_hand(at, *arguments)[1]) for at in (x, x + step))
    return np.abs(moved - slope) / np.where(slope == 0, np.inf, np.abs(slope)) + np.zeros_like(x)


CASES = [
    ("float32", "DV", "plain", "weighted nll"),
    ("float32", "VD", "plain", "sapo"),
    ("float32", "VD", "temperature", "k3"),
    ("float32", "DV", "softcap", "weighted nll"),
    ("float32", "VD", "logit_scale", "clipped"),
    ("float32", "DV", "bias", "clipped"),
    ("float32", "VD", "mask", "weighted nll"),
    ("float32", "DV", "logits_dtype", "weighted nll"),
    ("float32", "VD", "all", "sapo"),
    ("bfloat16", "VD", "all", "weighted nll"),
    ("bfloat16", "DV", "plain", "clipped"),
    ("bfloat16", "DV", "mask", "k3"),
    ("float16", "DV", "all", "weighted nll"),
    ("float16", "VD", "plain", "sapo"),
]


@pytest.mark.parametrize(
    ("implementation", "dtype", "layout", "option", "loss"),
    # The statistics of "chunked" have budgets of their own: here its chain rule, one loss of each kind.
    [("one_pass", *case) for case in CASES] + [("chunked", *case) for case in CASES[::4]],
)
def test_options_and_losses_stay_in_budget_on_ragged_sizes(implementation, dtype, layout, option, loss):
    assert_within_budget((37, 24, 301), dtype, layout, option, loss, implementation, "ragged blocks")


@blocked
@pytest.mark.parametrize(("layout", "option", "loss"), [("DV", "all", "weighted nll"), ("VD", "bias", "clipped")])
def test_float64_stays_in_budget(x64, layout, option, loss, implementation):
    assert_within_budget((37, 24, 301), "float64", layout, option, loss, implementation, "ragged blocks")


@pytest.mark.parametrize(
    ("implementation", "blocks"), [("one_pass", blocks) for blocks in BLOCKS] + [("chunked", "own rule")]
)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_blocks_stay_in_budget(size, implementation, blocks):
    layout = "DV" if blocks in ("own rule", "tiny blocks") else "VD"
    assert_within_budget(SIZES[size], "float32", layout, "all without a cap", "weighted nll", implementation, blocks)


@pytest.mark.parametrize("option", ["temperature", "logit_scale"])
def test_one_block_of_the_vocabulary_is_as_right_as_many(option):
    # Its loop runs once: what XLA unrolls, it also rounds differently.
    assert_within_budget(
        SIZES["smaller than any block"], "float32", "VD", option, "weighted nll", "one_pass", "ragged blocks"
    )


def _small(implementation: str, layout: Layout = "VD", **options):
    """A problem of four blocks of tokens, and `(hidden, lm_head) -> (loss, logprobs)`."""
    problem = peaked(11, 6, 90, "float32")
    weights = jnp.asarray(np.random.default_rng(5).normal(size=11), jnp.float32)
    options = {
        "layout": layout,
        "implementation": implementation,
        "block_sizes": {"block_n": 3, "block_v": 32},
        **options,
    }

    def run(hidden, lm_head):
        return linear_token_loss(hidden, lm_head, problem.targets, weighted_nll, (weights,), **options)

    return problem.hidden, in_layout(problem.lm_head, layout), run


@every
def test_38_the_incoming_cotangent_scales_the_gradient(implementation):
    hidden, lm_head, run = _small(implementation)

    def gradients(factor):
        return jax.grad(lambda h, w: factor * run(h, w)[0], (0, 1))(hidden, lm_head)

    ones = jax.grad(lambda h, w: run(h, w)[0], (0, 1))(hidden, lm_head)
    assert min(np.abs(one).max() for one in ones) > 0.1
    traced = jax.jit(gradients)
    for factor in (3.7, 1.0, -1.0, 0.5, 0.0):
        for scaled in (gradients(factor), traced(factor)):
            for x, one in zip(scaled, ones, strict=True):
                np.testing.assert_allclose(x, factor * one, rtol=2e-5, atol=1e-5 * abs(factor))


@every
def test_a_loss_beside_another_carries_its_own_cotangent(implementation):
    hidden, lm_head, run = _small(implementation)
    squared = jax.grad(lambda h: run(h, lm_head)[0] ** 2 + jnp.sum(h))(hidden)
    value, one = jax.value_and_grad(lambda h: run(h, lm_head)[0])(hidden)
    np.testing.assert_allclose(squared, 2 * value * one + 1, rtol=1e-5, atol=1e-4)


@every
def test_a_loss_that_nobody_uses_has_no_gradient(implementation):
    hidden, lm_head, run = _small(implementation)
    for use in (lambda out: out[1].sum(), lambda out: jnp.zeros(()), lambda out: jax.lax.stop_gradient(out[0])):
        gradients = jax.grad(lambda h, w, use=use: use(run(h, w)), (0, 1))(hidden, lm_head)
        for x, gradient in zip((hidden, lm_head), gradients, strict=True):
            assert gradient.shape == x.shape and gradient.dtype == x.dtype and (gradient == 0).all()
    # The log-probabilities are handed out without a gradient, beside a loss that has one.
    both = jax.grad(lambda h: run(h, lm_head)[0] + 100 * run(h, lm_head)[1].sum())(hidden)
    np.testing.assert_array_equal(both, jax.grad(lambda h: run(h, lm_head)[0])(hidden))


@blocked
@pytest.mark.parametrize("layout", ["DV", "VD"])
def test_loss_scaling_keeps_float16_gradients(layout, implementation):
    problem = make_problem((37, 24, 301), "float16", "plain", 0)
    for count in (1.0, 1e4, 1e6):
        # A mean over many tokens: unscaled, its logit gradients are below the smallest normal float16.
        weights = (jnp.asarray(np.random.default_rng(0).uniform(0.5, 2.0, 37) / count, jnp.float32),)
        scale = 16 * jnp.asarray(count, jnp.float32)
        ours, other = (
            program(name, layout, "plain", "weighted nll", "ragged blocks")(problem, weights, scale)
            for name in (implementation, "plain jnp")
        )
        right, _ = by_hand(problem, LOSSES["weighted nll"], weights, scale.item(), layout, {})
        for name in ("d_hidden", "d_lm_head"):
            assert_in_budget(name, *(getattr(x, name) for x in (ours, other, right)))


@blocked
def test_float16_gradients_are_rounded_once(implementation):
    # Unscaled, this gradient is 27.5 of float16's smallest numbers: rounded before the scale it would be 27 or 28.
    hidden, lm_head = jnp.ones((1, 1), jnp.float16), jnp.zeros((1, 2), jnp.float16)
    weight = jnp.asarray(55 * 2.0**-24, jnp.float32)

    def scaled(w):
        run = {"implementation": implementation}
        return 1024 * linear_token_loss(hidden, w, jnp.zeros(1, jnp.int32), weighted_nll, (weight,), **run)[0]

    gradient = jax.grad(scaled)(lm_head)
    np.testing.assert_array_equal(np.asarray(gradient, np.float64), [[-27.5 * 2.0**-14, 27.5 * 2.0**-14]])


@pytest.mark.parametrize(("dtype", "layout"), [("bfloat16", "DV"), ("float16", "VD")])
def test_32_the_head_gradient_does_not_worsen_with_the_number_of_blocks(dtype, layout):
    problem = peaked(1024, 8, 64, dtype)
    head = in_layout(problem.lm_head, layout)

    def head_gradient(hidden, head, block_n):
        run = {"layout": layout, "implementation": "one_pass", "block_sizes": {"block_n": block_n}}
        loss = jax.jit(
            jax.grad(lambda w: linear_token_loss(hidden, w, problem.targets, weighted_nll, (1.0,), **run)[0])
        )
        return np.asarray(loss(head), np.float64)

    with jax.enable_x64(True):
        oracle = head_gradient(problem.hidden.astype(jnp.float64), head.astype(jnp.float64), 1024)
    errors = [np.abs(head_gradient(problem.hidden, head, n) - oracle).max() for n in (1024, 32, 1)]
    assert max(errors) <= 1.05 * errors[0], errors


@every
@pytest.mark.parametrize("layout", ["DV", "VD"])
@pytest.mark.parametrize("blocks", [None, {"block_n": 4, "block_v": 2}], ids=str)
def test_28_each_token_carries_its_own_cotangent(x64, implementation, layout, blocks):
    hidden, lm_head, targets = fixture_f()
    expected = [
        [1.12215324, 1.22331706, 0.19976882],
        [1.12705643, 1.20369687, 0.17366396],
        [0.17501548, -1.00567806, -1.26175583],
        [0.64370031, 0.49187979, -0.11217275],
        [-3.06792545, -1.91321566, 1.0004958],
    ]
    g = np.array([[1, 0, 2], [-1, 0.5, 3]])
    run = {"layout": layout, "implementation": implementation, "block_sizes": blocks}
    head = lm_head if layout == "VD" else lm_head.T
    (_, logprobs), gradient = jax.value_and_grad(
        lambda w: linear_token_loss(hidden, w, targets, weighted_nll, (g,), **run), has_aux=True
    )(head)
    assert_near(gradient if layout == "VD" else gradient.T, expected)
    assert_near(logprobs, [[-0.70239081, -2.71926404, -2.13514837], [-1.61467381, -1.40126372, -3.21403343]])


@every
def test_42_a_tied_embedding_gets_both_gradients(x64, implementation):
    _, embedding, targets = fixture_f()
    expected = [
        [0.91318286, 0.25809639, -0.63428271],
        [-0.19164437, -0.22155843, -0.0477727],
        [-0.06444933, 1.00654907, 1.1521309],
        [0.43540443, 0.32215829, -0.08727869],
        [-0.90023363, -1.00630811, -0.18718755],
    ]

    def loss(e):
        run = {"layout": "VD", "implementation": implementation}
        return linear_token_loss(e[np.array([0, 1, 2, 3, 4, 0])], e, targets.reshape(6), weighted_nll, (1.0,), **run)[0]

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(embedding))
    assert_near(value, 9.23790926)
    assert_near(gradient, expected)


@every
def test_82_odd_sizes_count_every_token_and_column_once(x64, implementation):
    rng = np.random.default_rng(3)
    two = {"block_n": 2, "block_v": 2}
    for n, v, d, blocks in [(1, 2, 9, None), (7, 3, 2, None), (7, 3, 2, two), (1, 1, 1, two), (3, 1, 4, None)]:
        hidden, lm_head, targets = rng.normal(size=(n, d)), rng.normal(size=(v, d)), rng.integers(0, v, n)
        weights = rng.normal(size=n)
        z = hidden @ lm_head.T
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        d_z = weights[:, None] * (p - np.eye(v)[targets])

        def loss(h, w, b, targets, weights, blocks=blocks):
            run = {"layout": "VD", "implementation": implementation, "block_sizes": blocks, "bias": b}
            return linear_token_loss(h, w, targets, weighted_nll, (weights,), **run)[0]

        inputs = (hidden, lm_head, np.zeros(v), targets, weights)
        value, gradients = jax.value_and_grad(loss, (0, 1, 2))(*inputs)
        assert_near(value, -(weights * np.log(p[np.arange(n), targets])).sum())
        for gradient, expected in zip(gradients, (d_z @ lm_head, d_z.T @ hidden, d_z.sum(0)), strict=True):
            assert_near(gradient, expected)


@every
@pytest.mark.parametrize("place", [(0, 1), (2,), (3, 4)], ids=["first block", "middle", "last block"])
def test_18_a_block_that_is_all_minus_inf(x64, implementation, place):
    hidden, lm_head, targets = fixture_f()
    bias = np.zeros(5)
    bias[list(place)] = -np.inf

    def loss(hidden, lm_head, bias):
        sizes = {"block_v": 2, "block_n": 4}
        run = {"layout": "VD", "implementation": implementation, "block_sizes": sizes, "softcap": 3.0}
        return linear_token_loss(hidden, lm_head, targets, weighted_nll, (1.0,), bias=bias, **run)

    gradients, logprobs = jax.grad(loss, (0, 1, 2), has_aux=True)(hidden, lm_head, bias)
    # A target without probability gives -inf, and what its loss sends back is dropped.
    np.testing.assert_array_equal(logprobs == -np.inf, np.isin(targets, place))
    assert not np.isnan(logprobs).any()
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert (np.asarray(gradients[1])[list(place)] == 0).all() and (np.asarray(gradients[2])[list(place)] == 0).all()
    assert (np.asarray(gradients[0])[np.isin(targets, place)] == 0).all()
    inside = ~np.isin(targets, place)
    z = 3 * np.tanh(hidden @ lm_head.T / 3) + bias
    expected = np.take_along_axis(z, targets[..., None], 2)[..., 0] - np.log(np.exp(z).sum(2))
    assert_near(np.asarray(logprobs)[inside], expected[inside])


@every
def test_44_a_token_does_not_depend_on_its_batch(implementation):
    problem = peaked(37, 24, 301, "float32")

    def run(size, block_n):
        options = {"layout": "VD", "implementation": implementation, "block_sizes": {"block_n": block_n}}

        def loss(h):
            return linear_token_loss(h, problem.lm_head, problem.targets[:size], weighted_nll, (1.0,), **options)

        gradient, logprobs = jax.grad(loss, has_aux=True)(problem.hidden[:size])
        return logprobs[:1], gradient[:1]

    alone = run(1, 1)
    for size, block_n in ((3, 2), (37, 1), (37, 16)):
        for x, y in zip(run(size, block_n), alone, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)
