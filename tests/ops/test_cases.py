"""Public fault reports against other projects that concern the ops: see the numbers in CASES.md of the issue."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.ops.api import linear_logprobs, linear_token_stats, token_stats
from logitless.ops.types import Layout
from problems import EVERYWHERE, HERE, INTERPRETED, LOGITS_HERE, assert_near, equations, fixture_f, sizes_for

pytestmark = pytest.mark.usefixtures("x64")
every = pytest.mark.parametrize("implementation", HERE)
everywhere = pytest.mark.parametrize("implementation", EVERYWHERE)
BIAS = np.array([0.3, -0.2, 0.0, 0.5, -1.0])

LOGPROBS = [[-0.70239081, -2.71926404, -2.13514837], [-1.61467381, -1.40126372, -3.21403343]]
LSE = [[1.97643065, 2.21112769, 1.67040723], [2.51630137, 1.36693095, 2.3462014]]
ENTROPY = [[1.26144504, 1.2884643, 1.24253341], [1.43671541, 1.30669909, 1.35566549]]


def stats(implementation, *, layout="VD", blocks=None, **options):
    hidden, lm_head, targets = fixture_f()
    head = lm_head if layout == "VD" else lm_head.T
    sizes = sizes_for(implementation, {"block_v": blocks, "block_n": 4} if blocks else None)
    run = {"layout": layout, "implementation": implementation, "block_sizes": sizes}
    return linear_token_stats(hidden, head, targets, **run, **options)


@pytest.mark.parametrize(
    ("implementation", "blocks"),
    [(name, blocks) for name in HERE for blocks in (None, 1, 2, 3, 5, 64)] + [(INTERPRETED, None)],
)
@pytest.mark.parametrize("layout", ["DV", "VD"])
def test_fixture_f_in_both_layouts_at_any_block_size(implementation, layout, blocks):
    out = stats(implementation, layout=layout, blocks=blocks)
    assert_near(out.logprobs, LOGPROBS)
    assert_near(out.lse, LSE)
    assert_near(out.entropy, ENTROPY)
    assert out.mean_logits is None


@everywhere
def test_08_logit_scale_reaches_values_and_head_gradient(implementation):
    out = stats(implementation, logit_scale=0.0625)
    assert_near(out.logprobs, [[-1.52853962, -1.65574377, -1.617895], [-1.59730288, -1.57766769, -1.69144885]])
    hidden, lm_head, targets = fixture_f()

    def total(w, scale):
        run = {"layout": "VD", "implementation": implementation, "block_sizes": sizes_for(implementation, None)}
        return linear_logprobs(hidden, w, targets, logit_scale=scale, **run).sum()

    assert_near(jax.grad(total)(lm_head, 0.0625), 0.0625 * jax.grad(total)(0.0625 * lm_head, 1.0))


@every
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"logit_scale": 4.0}, [-0.09677875, -7.9699714, -6.00000369]),
        ({"softcap": 2.0}, [-0.78231709, -2.59989917, -2.1047729]),
        ({"temperature": 0.7}, [-0.50521966, -3.37025096, -2.56486337]),
        ({"bias": BIAS}, [-0.53405684, -2.80768767, -2.27418445]),
        (
            {"logit_scale": 4.0, "softcap": 2.0, "temperature": 0.7, "bias": BIAS},
            [-0.44146497, -5.90673329, -5.03671602],
        ),
    ],
    ids=["scale", "softcap", "temperature", "bias", "all four"],
)
def test_10_order_of_bias_scale_softcap_temperature(implementation, options, expected):
    assert_near(stats(implementation, blocks=2, **options).logprobs[0], expected)


@every
@pytest.mark.parametrize("vocab", [5, 7, 151])
def test_04_probabilities_sum_to_one_at_any_vocabulary(implementation, vocab):
    rng = np.random.default_rng(0)
    hidden, lm_head = np.tile(rng.normal(size=(1, 4)) * 3, (vocab, 1)), rng.normal(size=(4, vocab))
    for softcap in (None, 1.5):
        run = {"implementation": implementation, "block_sizes": {"block_v": 4}, "softcap": softcap}
        out = linear_token_stats(hidden, lm_head - 2.0, np.arange(vocab), **run)
        assert_near(np.exp(out.logprobs).sum(), 1.0)
        assert (np.asarray(out.logprobs) <= 0).all()
        assert (np.asarray(out.entropy) >= 0).all() and (np.asarray(out.entropy) <= np.log(vocab)).all()


@every
@pytest.mark.parametrize(
    ("place", "first"),
    [((0, 1), 0), ((2,), None), ((3, 4), None)],
    ids=["first block", "middle", "last block"],
)
@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_18_a_block_that_is_all_minus_inf(implementation, place, first, blocks, softcap):
    bias = np.zeros(5)
    bias[list(place)] = -np.inf
    out = stats(implementation, blocks=blocks, bias=bias)
    if first == 0:
        assert_near(out.lse, [[0.49986872, 2.10541034, 0.15604939], [1.47599541, 1.22561641, 1.09415964]])
        assert_near(out.entropy, [[0.96681325, 0.99833102, 1.00226069], [0.96191333, 0.95175637, 0.94794136]])
    hidden, lm_head, targets = fixture_f()

    def loss(hidden, lm_head, bias):
        run = {"layout": "VD", "implementation": implementation, "block_sizes": {"block_v": blocks}, "softcap": softcap}
        out = linear_token_stats(hidden, lm_head, targets, bias=bias, **run)
        # A target without probability gives -inf, and its cotangent is dropped: weighing it by 1 must do no harm.
        return out.logprobs.sum() + 0.5 * out.entropy.sum() + 0.1 * out.lse.sum()

    gradients = jax.grad(loss, (0, 1, 2))(hidden, lm_head, bias)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    assert (np.asarray(gradients[1])[list(place)] == 0).all() and (np.asarray(gradients[2])[list(place)] == 0).all()


@everywhere
def test_16_labels_outside_the_vocabulary(implementation):
    hidden, lm_head, targets = fixture_f()
    run = functools.partial(
        linear_logprobs,
        layout="VD",
        implementation=implementation,
        block_sizes=sizes_for(implementation, None),
    )
    for wrong in (5, -1):
        bad = targets.copy()
        bad[1, 2] = wrong
        with pytest.raises(ValueError, match=r"targets\[1, 2\] is -?\d, outside the vocabulary of 5"):
            run(hidden, lm_head, bad)

        def traced(hidden, lm_head, targets):
            return run(hidden, lm_head, targets)

        out = np.asarray(jax.jit(traced)(hidden, lm_head, bad))
        assert np.isnan(out[1, 2])
        assert_near(np.delete(out.reshape(-1), 5), np.delete(np.reshape(LOGPROBS, -1), 5))
        d_lm_head = jax.jit(jax.grad(lambda w, t: run(hidden, w, t).sum()))(lm_head, bad)
        without = jax.grad(lambda w: run(hidden, w, targets).reshape(-1)[:5].sum())(lm_head)
        assert_near(d_lm_head, without)
        mask = np.ones((2, 3), bool)
        mask[1, 2] = False
        assert_near(run(hidden, lm_head, bad, mask=mask)[mask], np.asarray(LOGPROBS)[mask])


@every
def test_20_strided_inputs(implementation):
    hidden, lm_head, targets = fixture_f()
    wide = np.repeat(hidden, 2, axis=1)
    run = functools.partial(linear_logprobs, layout="VD", implementation=implementation)
    assert_near(run(wide[:, ::2], lm_head, np.repeat(targets, 2, axis=1)[:, ::2]), LOGPROBS)
    logits = np.repeat(hidden @ lm_head.T, 2, axis=-1)[..., ::2]
    assert_near(token_stats(logits, targets, implementation=implementation).logprobs, LOGPROBS)


@everywhere
def test_34_entropy_has_a_gradient(implementation):
    hidden, lm_head, targets = fixture_f()
    expected = [
        [-0.89368027, -0.85129606, -0.02623418],
        [-0.26548012, -0.16940133, 0.08242426],
        [0.09382608, 0.11649156, 0.03205523],
        [0.30786389, 0.27814898, -0.00729483],
        [0.75747042, 0.62605686, -0.08095048],
    ]
    sizes = sizes_for(implementation, {"block_v": 2})
    run = {"layout": "VD", "implementation": implementation, "block_sizes": sizes}
    assert_near(jax.grad(lambda w: linear_token_stats(hidden, w, targets, **run).entropy.sum())(lm_head), expected)


@everywhere
def test_36_logprobs_and_entropy_in_one_loss(implementation):
    hidden, lm_head, targets = fixture_f()
    expected = [
        [-1.02590234, -0.82730485, 0.1319129],
        [-1.77019156, -1.76995753, -0.14243271],
        [1.37575976, 1.23756681, -0.03843936],
        [-0.65342913, -0.19759329, 0.43990891],
        [2.07376327, 1.55728887, -0.39094974],
    ]

    def loss(w):
        sizes = sizes_for(implementation, {"block_v": 2})
        run = {"layout": "VD", "implementation": implementation, "block_sizes": sizes}
        out = linear_token_stats(hidden, w, targets, **run)
        return out.logprobs.sum() + 0.5 * out.entropy.sum()

    value, gradient = jax.value_and_grad(loss)(lm_head)
    assert_near(value, -7.84101282)
    assert_near(gradient, expected)


@every
def test_38_the_incoming_cotangent_scales_the_gradient(implementation):
    hidden, lm_head, targets = fixture_f()

    def gradient(factor):
        run = {"layout": "VD", "implementation": implementation}
        return jax.grad(lambda w: factor * linear_logprobs(hidden, w, targets, **run).sum())(lm_head)

    for factor in (0.5, 0.0, -1.0):
        assert_near(gradient(factor), factor * gradient(1.0))


@everywhere
def test_28_each_token_carries_its_own_cotangent(implementation):
    hidden, lm_head, targets = fixture_f()
    expected = [
        [1.12215324, 1.22331706, 0.19976882],
        [1.12705643, 1.20369687, 0.17366396],
        [0.17501548, -1.00567806, -1.26175583],
        [0.64370031, 0.49187979, -0.11217275],
        [-3.06792545, -1.91321566, 1.0004958],
    ]
    g = jnp.array([1, 0, 2, -1, 0.5, 3])
    run = {"layout": "VD", "implementation": implementation, "block_sizes": sizes_for(implementation, None)}

    def loss(w):
        return -(g * linear_logprobs(hidden.reshape(6, 3), w, targets.reshape(6), **run)).sum()

    assert_near(jax.grad(loss)(lm_head), expected)


@everywhere
def test_42_a_tied_embedding_gets_both_gradients(implementation):
    _, embedding, targets = fixture_f()
    expected = [
        [0.91318286, 0.25809639, -0.63428271],
        [-0.19164437, -0.22155843, -0.0477727],
        [-0.06444933, 1.00654907, 1.1521309],
        [0.43540443, 0.32215829, -0.08727869],
        [-0.90023363, -1.00630811, -0.18718755],
    ]

    def loss(e):
        run = {"layout": "VD", "implementation": implementation, "block_sizes": sizes_for(implementation, None)}
        return -linear_logprobs(e[np.array([0, 1, 2, 3, 4, 0])], e, targets.reshape(6), **run).sum()

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(embedding))
    assert_near(value, 9.23790926)
    assert_near(gradient, expected)


@every
@pytest.mark.slow
def test_82_odd_sizes_count_every_token_and_column_once(implementation):
    rng = np.random.default_rng(3)
    for n, v, d in [(1, 2, 9), (7, 3, 2), (1, 1, 1), (3, 1, 4)]:
        hidden, lm_head, targets = rng.normal(size=(n, d)), rng.normal(size=(v, d)), rng.integers(0, v, n)
        z = hidden @ lm_head.T
        expected = z[np.arange(n), targets] - np.log(np.exp(z).sum(1))
        for blocks in (None, {"block_n": 1, "block_v": 1}, {"block_n": 2, "block_v": 2}):
            run = {"layout": "VD", "implementation": implementation, "block_sizes": blocks}
            assert_near(linear_logprobs(hidden, lm_head, targets, **run), expected)
            p = np.exp(z - np.log(np.exp(z).sum(1, keepdims=True)))
            d_z = np.eye(v)[targets] - p
            gradients = jax.grad(lambda h, w, run=run: linear_logprobs(h, w, targets, **run).sum(), (0, 1))  # noqa: B023 - called within the iteration
            d_hidden, d_lm_head = gradients(hidden, lm_head)
            assert_near(d_hidden, d_z @ lm_head)
            assert_near(d_lm_head, d_z.T @ hidden)


@every
@pytest.mark.parametrize("z", [[1.0, 2.0, -np.inf], [0.0, -np.inf], [-np.inf, 0.5]])
def test_90_entropy_with_impossible_columns(implementation, z):
    expected = {3: (0.58220311, [0.19661193, -0.19661193, 0.0]), 2: (0.0, [0.0, 0.0])}[len(z)]

    def of(z):
        run = {"outputs": ("entropy",), "implementation": implementation, "mask": jnp.ones(1, bool)}
        return token_stats(z[None], jnp.zeros(1, jnp.int32), **run).entropy[0]

    value, gradient = jax.value_and_grad(of)(jnp.asarray(z))
    assert_near(value, expected[0])
    assert_near(gradient, expected[1])


@pytest.mark.parametrize("implementation", LOGITS_HERE)
def test_88_support_after_top_p(implementation):
    hidden, lm_head, targets = fixture_f()
    logits = hidden @ lm_head.T
    logits[..., :2] = -np.inf
    out = token_stats(logits, targets, implementation=implementation, block_sizes={"block_v": 2})
    assert_near(np.asarray(LSE) - out.lse, [[1.47656192, 0.10571736, 1.51435784], [1.04030596, 0.14131454, 1.25204176]])
    outside = targets < 2
    assert (np.asarray(out.logprobs)[outside] == -np.inf).all()
    assert np.isfinite(np.asarray(out.logprobs)[~outside]).all()
    gradient = jax.grad(lambda z: token_stats(z, targets, implementation=implementation).logprobs.sum())(logits)
    assert np.isfinite(gradient).all() and (np.asarray(gradient)[..., :2] == 0).all()
    assert (np.asarray(gradient)[outside] == 0).all()


@every
def test_a_row_without_a_finite_logit_is_nan_and_spoils_no_other(implementation):
    logits = np.array([[-np.inf, -np.inf], [0.0, 1.0]])
    out = token_stats(logits, np.array([0, 1]), implementation=implementation)
    assert np.isnan(out.logprobs[0]) and np.isnan(out.lse[0]) and np.isnan(out.entropy[0])
    assert_near(out.lse[1], np.log(1 + np.e))
    gradient = jax.grad(lambda z: token_stats(z, np.array([0, 1]), implementation=implementation).lse[1])(logits)
    assert_near(gradient, [[0.0, 0.0], [0.26894142, 0.73105858]])


def test_22_24_no_index_passes_32_bits_at_five_billion_logits():
    shape = jax.ShapeDtypeStruct
    cases: list[tuple[int, int, int, Layout]] = [(32768, 8, 151936, "VD"), (4, 16384, 262144, "DV")]
    for n, d, v, layout in cases:
        head = shape((v, d) if layout == "VD" else (d, v), jnp.bfloat16)

        def loss(h, w, t, layout: Layout = layout):
            return linear_logprobs(h, w, t, layout=layout, implementation="chunked").sum()

        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(shape((n, d), jnp.bfloat16), head, shape((n,), jnp.int32))
        for dims in {v.aval.shape for e in equations(jaxpr.jaxpr) for v in e.outvars} - {head.shape}:
            # Every array but the head itself can be addressed by a flat 32-bit index, whatever its layout.
            assert math.prod(dims) < 2**31, dims
