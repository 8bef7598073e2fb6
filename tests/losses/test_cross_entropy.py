"""Cross-entropy from hidden states and from logits, through every implementation, against the oracle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_close, central_differences, fixture

from logitless import cross_entropy, linear_cross_entropy
from problems import HERE, LOGITS_HERE

F = fixture()
HIDDEN, HEAD, LABELS = F["hidden"].reshape(6, 3), F["lm_head"], F["targets"].reshape(6)
LOGITS = F["logits"].reshape(6, 5)
BIAS = np.array([0.3, -0.2, 0.0, 0.5, -1.0])
IGNORED = np.where(np.arange(6) == 1, -100, LABELS)
WEIGHTS = np.array([1.0, 0.0, 2.0, -1.0, 0.5, 3.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"weights": WEIGHTS},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing of 1": {"label_smoothing": 1.0},
    "z-loss": {"z_loss": 0.02},
    "everything": {"label_smoothing": 0.1, "z_loss": 0.02, "weights": WEIGHTS},
    "ignore a real token": {"ignore_index": 2, "label_smoothing": 0.1},
}
REDUCTIONS = ("mean", "sum", "none")


def _in_layout(head: Any, layout: str) -> Any:
    return head if layout == "VD" else head.T


def _linear(
    hidden: Any, head: Any, labels: Any, *, layout: Any = "VD", bias: Any = None, weigh: Any = None, **options: Any
) -> tuple[Any, tuple[Any, ...]]:
    """The loss and its gradients by hidden, head (as `[V, D]`) and bias; `weigh` takes token losses to one number."""
    given = [jnp.asarray(hidden), jnp.asarray(_in_layout(head, layout))]
    given += [] if bias is None else [jnp.asarray(bias)]

    def f(hidden: jax.Array, head: jax.Array, bias: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        loss = linear_cross_entropy(hidden, head, labels, layout=layout, bias=bias, **options)
        return (loss if weigh is None else jnp.sum(loss * jnp.asarray(weigh))), loss

    (_, loss), gradients = jax.value_and_grad(f, tuple(range(len(given))), has_aux=True)(*given)
    return loss, (gradients[0], _in_layout(gradients[1], layout), *gradients[2:])


def _expected(hidden: np.ndarray, head: np.ndarray, bias: np.ndarray, labels: np.ndarray, weigh: Any, **options: Any):
    """The same from the oracle."""

    def loss(h: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
        return oracle.cross_entropy(h @ w.T + b, labels, **options)

    def number(h: np.ndarray, w: np.ndarray, b: np.ndarray) -> float:
        return float(np.sum(loss(h, w, b) * (1.0 if weigh is None else weigh)))

    gradients = (
        central_differences(lambda x: number(x, head, bias), hidden),
        central_differences(lambda x: number(hidden, x, bias), head),
        central_differences(lambda x: number(hidden, head, x), bias),
    )
    return loss(hidden, head, bias), gradients


def assert_same(actual: Any, expected: Any, rtol: float = 1e-7, atol: float = 1e-8) -> None:
    assert_close(actual[0], expected[0], rtol=min(rtol, 1e-10) if rtol == 1e-7 else rtol, atol=atol, what="loss")
    for name, one, two in zip(("d_hidden", "d_lm_head", "d_bias"), actual[1], expected[1], strict=False):
        assert_close(one, two, rtol=rtol, atol=atol, what=name)


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize(("option", "layout"), [*[(option, "VD") for option in OPTIONS], ("everything", "DV")])
def test_linear_options_and_reductions(x64, option, implementation, layout):
    # Cases 12, 28, 106
    for reduction in REDUCTIONS:
        options: dict[str, Any] = OPTIONS[option] | {"reduction": reduction}
        weigh = np.array([1.0, 0.0, 2.0, -1.0, 0.5, 3.0]) if reduction == "none" else None
        actual = _linear(
            HIDDEN, HEAD, IGNORED if option != "ignore a real token" else LABELS, layout=layout, bias=BIAS,
            weigh=weigh, implementation=implementation, **options,
        )  # fmt: skip
        labels = IGNORED if option != "ignore a real token" else LABELS
        assert_same(actual, _expected(HIDDEN, HEAD, BIAS, labels, weigh, **options))


@pytest.mark.parametrize("implementation", LOGITS_HERE)
@pytest.mark.parametrize("option", OPTIONS)
def test_logits_options_and_reductions(x64, option, implementation):
    # Case 106
    labels = IGNORED if option != "ignore a real token" else LABELS
    for reduction in REDUCTIONS:
        options: dict[str, Any] = OPTIONS[option] | {"reduction": reduction}

        def f(z: jax.Array, options: dict[str, Any] = options) -> tuple[jax.Array, jax.Array]:
            loss = cross_entropy(z, labels, implementation=implementation, **options)
            return jnp.sum(loss * jnp.asarray(WEIGHTS)) if options["reduction"] == "none" else loss, loss

        (_, loss), grad = jax.value_and_grad(f, has_aux=True)(jnp.asarray(LOGITS))
        weigh = WEIGHTS if reduction == "none" else 1.0
        assert_close(loss, oracle.cross_entropy(LOGITS, labels, **options), rtol=1e-12, what=f"loss, {reduction}")
        expected = central_differences(
            lambda z, o=options, w=weigh: float(np.sum(oracle.cross_entropy(z, labels, **o) * w)), LOGITS
        )
        assert_close(grad, expected, what=f"gradient, {reduction}")


@pytest.mark.parametrize("implementation", HERE)
def test_reported_sums_with_an_ignored_label(dtype, implementation):
    # Case 12
    h, w = HIDDEN.astype(dtype), HEAD.astype(dtype)
    options: dict[str, Any] = {"implementation": implementation, "layout": "VD"}
    rtol = 1e-14 if dtype == "float64" else 1e-6
    smoothed = linear_cross_entropy(h, w, IGNORED, label_smoothing=0.1, reduction="sum", **options)
    assert_close(smoothed, 9.133803127848456, rtol=rtol, atol=0.0)
    mean = linear_cross_entropy(h, w, IGNORED, label_smoothing=0.1, **options)
    assert_close(mean, 9.133803127848456 / 5, rtol=rtol, atol=0.0)
    plain = linear_cross_entropy(h, w, IGNORED, reduction="sum", **options)
    assert_close(plain, 9.067510147139071, rtol=rtol, atol=0.0)


@pytest.mark.parametrize("implementation", HERE)
def test_reported_head_gradient_of_weighted_tokens(x64, implementation):
    # Case 28
    expected = [
        [1.12215324, 1.22331706, 0.19976882],
        [1.12705643, 1.20369687, 0.17366396],
        [0.17501548, -1.00567806, -1.26175583],
        [0.64370031, 0.49187979, -0.11217275],
        [-3.06792545, -1.91321566, 1.0004958],
    ]
    by_weights = _linear(HIDDEN, HEAD, LABELS, weights=WEIGHTS, reduction="sum", implementation=implementation)
    by_cotangent = _linear(HIDDEN, HEAD, LABELS, weigh=WEIGHTS, reduction="none", implementation=implementation)
    for _, gradients in (by_weights, by_cotangent):
        assert_close(gradients[1], expected, atol=6e-9, what="d_lm_head")


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize(
    ("options", "input_dtype"), [({}, "float32"), (OPTIONS["everything"], "bfloat16")], ids=["plain", "everything"]
)
def test_all_labels_ignored(input_dtype, options, implementation):
    # Case 2
    h, w, b = (jnp.asarray(x, input_dtype) for x in (HIDDEN, HEAD, BIAS))
    options = {name: jnp.asarray(x, jnp.float32) if name == "weights" else x for name, x in options.items()}
    for reduction in REDUCTIONS:
        weigh = np.ones(6, np.float32) if reduction == "none" else None
        labels = np.full(6, -100)
        loss, gradients = _linear(
            h, w, labels, bias=b, weigh=weigh, reduction=reduction, implementation=implementation, **options
        )
        assert_close(loss, np.zeros(6 if reduction == "none" else ()), atol=0.0)
        assert loss.dtype == jnp.float32
        for gradient, x in zip(gradients, (h, w, b), strict=True):
            assert gradient.dtype == x.dtype
            assert_close(gradient.astype(jnp.float32), np.zeros(x.shape), atol=0.0, what="gradient")


def test_no_tokens():
    for shape in ((0,), (2, 0), (0, 3)):
        labels = np.zeros(shape, np.int32)
        loss, gradients = _linear(np.zeros((*shape, 3), np.float32), HEAD.astype(np.float32), labels)
        assert_close(loss, 0.0, atol=0.0)
        assert_close(gradients[1], np.zeros((5, 3)), atol=0.0)
        assert linear_cross_entropy(jnp.zeros((*shape, 3)), jnp.ones((3, 5)), labels, reduction="none").shape == shape
        assert cross_entropy(jnp.zeros((*shape, 5)), labels) == 0


@pytest.mark.parametrize("ignored", [[0], [1, 2]], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (4, 3), (8, 8)], ids=str)
def test_no_value_depends_on_a_block_size(x64, sizes, ignored):
    # Case 14: also with the ignored tokens in one block
    labels = LABELS.copy()
    labels[ignored] = -100
    blocks = {"block_n": sizes[0], "block_v": sizes[1]}
    options = OPTIONS["everything"]
    for reduction in ("mean", "none"):
        weigh = WEIGHTS if reduction == "none" else None
        actual = _linear(
            HIDDEN, HEAD, labels, bias=BIAS, weigh=weigh, implementation="chunked", block_sizes=blocks,
            reduction=reduction, **options,
        )  # fmt: skip
        assert_same(actual, _expected(HIDDEN, HEAD, BIAS, labels, weigh, reduction=reduction, **options))


def test_token_losses_have_the_shape_of_the_labels(x64):
    # Case 14
    for shape in ((6,), (2, 3), (3, 1, 2)):
        h, labels = HIDDEN.reshape(*shape, 3), IGNORED.reshape(shape)
        loss = linear_cross_entropy(h, HEAD, labels, layout="VD", reduction="none")
        expected = oracle.cross_entropy(LOGITS, IGNORED, reduction="none").reshape(shape)
        assert_close(loss, expected, rtol=1e-12)
        assert_close(cross_entropy(LOGITS.reshape(*shape, 5), labels, reduction="none"), expected, rtol=1e-12)


@pytest.mark.parametrize("label", [5, -1])
def test_label_outside_the_vocabulary(x64, label):
    # Case 16
    labels = LABELS.reshape(2, 3).copy()
    labels[1, 0] = label
    h = HIDDEN.reshape(2, 3, 3)
    for call in (lambda y: linear_cross_entropy(h, HEAD, y, layout="VD"), lambda y: cross_entropy(F["logits"], y)):
        with pytest.raises(ValueError, match=rf"\[1, 0\] is {label}, outside the vocabulary of 5"):
            call(labels)
    expected = -F["logprobs"].copy()
    expected[1, 0] = np.nan
    for implementation in HERE:
        options: dict[str, Any] = {"reduction": "none", "implementation": implementation}

        def linear(y: jax.Array, options: dict[str, Any] = options) -> jax.Array:
            return linear_cross_entropy(h, HEAD, y, layout="VD", **options)

        assert_close(jax.jit(linear)(labels), expected, rtol=1e-12)
        from_logits = jax.jit(lambda y, o=options: cross_entropy(F["logits"], y, **o))(labels)
        assert_close(from_logits, expected, rtol=1e-12)
        # where it does not count, nothing happens
        ignored = jax.jit(lambda y, o=options: linear_cross_entropy(h, HEAD, y, layout="VD", ignore_index=label, **o))
        assert_close(ignored(labels), np.nan_to_num(expected), rtol=1e-12)


def test_strided_inputs_equal_contiguous_ones(x64):
    # Case 20
    labels, logits = F["targets"][:, ::2], F["logits"][:, ::2, ::2]
    small = np.where(labels < 3, labels, -100)
    for array in (labels, logits):
        assert not array.flags.c_contiguous
    assert_close(cross_entropy(logits, small), cross_entropy(logits.copy(), small.copy()), rtol=0.0)
    h, w = F["hidden"][:, ::2], np.asfortranarray(HEAD)[::-1]
    one = _linear(h, w, labels, label_smoothing=0.1)
    two = _linear(h.copy(), np.ascontiguousarray(w), labels.copy(), label_smoothing=0.1)
    assert_same(one, two, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("implementation", HERE)
def test_gradients_scale_with_the_cotangent(x64, implementation):
    # Case 38
    def f(h: jax.Array, w: jax.Array) -> jax.Array:
        options = OPTIONS["everything"]
        return linear_cross_entropy(h, w, IGNORED, layout="VD", implementation=implementation, **options)

    _, pull = jax.vjp(f, jnp.asarray(HIDDEN), jnp.asarray(HEAD))
    _, whole = _expected(HIDDEN, HEAD, np.zeros(5), IGNORED, None, **OPTIONS["everything"])
    for cotangent in (0.5, 0.0, -1.0):
        for gradient, expected in zip(pull(jnp.asarray(cotangent)), whole[:2], strict=True):
            assert_close(gradient, cotangent * expected, what=f"gradient for a cotangent of {cotangent}")


@pytest.mark.parametrize("implementation", HERE)
def test_tied_embedding_gets_both_gradients(x64, implementation):
    # Case 42
    expected = [
        [0.91318286, 0.25809639, -0.63428271],
        [-0.19164437, -0.22155843, -0.0477727],
        [-0.06444933, 1.00654907, 1.1521309],
        [0.43540443, 0.32215829, -0.08727869],
        [-0.90023363, -1.00630811, -0.18718755],
    ]

    def f(embedding: jax.Array) -> jax.Array:
        hidden = embedding[jnp.asarray([0, 1, 2, 3, 4, 0])]
        options: dict[str, Any] = {"reduction": "sum", "implementation": implementation}
        return linear_cross_entropy(hidden, embedding, LABELS, layout="VD", **options)

    loss, grad = jax.value_and_grad(f)(jnp.asarray(HEAD))
    assert_close(loss, 9.23790926, atol=6e-9)
    assert_close(grad, expected, atol=6e-9, what="gradient")


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize(("n", "v", "d"), [(1, 2, 9), (7, 3, 2), (1, 1, 1), (3, 1, 4)])
def test_odd_sizes(x64, n, v, d, implementation):
    # Case 82
    rng = np.random.default_rng(n + v)
    h, w, b, labels = rng.normal(size=(n, d)), rng.normal(size=(v, d)), rng.normal(size=v), rng.integers(0, v, n)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.02}
    actual = _linear(h, w, labels, bias=b, implementation=implementation, **options)
    assert_same(actual, _expected(h, w, b, labels, None, **options))


def test_support_after_top_p(dtype):
    # Case 88: columns 0 and 1 at -inf
    logits = F["logits"].copy()
    logits[..., :2] = -np.inf
    moved = np.array([[1.47656192, 0.10571736, 1.51435784], [1.04030596, 0.14131454, 1.25204176]])
    expected = np.where(F["targets"] < 2, np.inf, -F["logprobs"] - moved)
    tolerance: dict[str, Any] = {"rtol": 0.0, "atol": 1e-8} if dtype == "float64" else {"rtol": 1e-6, "atol": 1e-7}
    for implementation in LOGITS_HERE:
        options: dict[str, Any] = {"reduction": "none", "implementation": implementation}
        loss = cross_entropy(logits.astype(dtype), F["targets"], **options)
        assert_close(loss, expected, **tolerance)


@pytest.mark.parametrize("implementation", HERE)
def test_ignored_tokens_may_hold_anything(x64, implementation):
    h, weights = HIDDEN.copy(), WEIGHTS.copy()
    h[1], weights[1] = np.nan, np.nan
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.02, "implementation": implementation}
    actual = _linear(h, HEAD, IGNORED, bias=BIAS, weights=weights, **options)
    assert_same(actual, _linear(HIDDEN, HEAD, IGNORED, bias=BIAS, weights=WEIGHTS, **options), rtol=0.0, atol=0.0)


def test_weights_that_sum_to_zero(x64):
    loss, gradients = _linear(HIDDEN, HEAD, LABELS, weights=np.zeros(6))
    assert_close(loss, 0.0, atol=0.0)
    assert_close(gradients[1], np.zeros((5, 3)), atol=0.0)


@pytest.mark.parametrize("label_dtype", ["int8", "int16", "int32"])
def test_labels_of_any_integer_type(label_dtype):
    labels, logits = LABELS.astype(label_dtype), LOGITS.astype(np.float32)
    assert_close(cross_entropy(logits, labels), oracle.cross_entropy(LOGITS, LABELS), rtol=1e-6)
    linear = linear_cross_entropy(HIDDEN.astype(np.float32), HEAD.T.astype(np.float32), labels)
    assert_close(linear, oracle.cross_entropy(LOGITS, LABELS), rtol=1e-6)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), bits=st.lists(st.booleans(), min_size=6, max_size=6), smoothing=st.floats(0, 1))
def test_any_batch_equals_the_oracle(seed, bits, smoothing):
    rng = np.random.default_rng(seed)
    h, w, b = rng.normal(0, 2, (6, 3)), rng.normal(0, 2, (5, 3)), rng.normal(size=5)
    labels = np.where(bits, rng.integers(0, 5, 6), -100)
    options = {"label_smoothing": smoothing, "z_loss": 0.02, "weights": rng.random(6) + 0.1}
    with jax.enable_x64(True):
        actual = _linear(h, w, labels, bias=b, **options)
    assert_same(actual, _expected(h, w, b, labels, None, **options), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"weights": np.ones(5)}, ("weights of shape (5,)", "labels of shape (6,)")),
        ({"weights": np.ones((6, 1))}, ("weights of shape (6, 1)", "labels of shape (6,)")),
        ({"label_smoothing": 1.5}, ("label_smoothing=1.5", "at most 1")),
        ({"label_smoothing": -0.1}, ("label_smoothing=-0.1", "at least 0")),
        ({"z_loss": -1.0}, ("z_loss=-1.0", "at least 0")),
        ({"reduction": "avg"}, ("reduction='avg'", "mean, sum, none")),
    ],
    ids=str,
)
def test_refusals(x64, options, parts):
    calls = {
        "linear_cross_entropy": lambda f: f(HIDDEN, HEAD.T, LABELS, **options),
        "cross_entropy": lambda f: f(LOGITS, LABELS, **options),
    }
    for f in (linear_cross_entropy, cross_entropy):
        with pytest.raises(ValueError) as error:
            calls[f.__name__](getattr(f, "__wrapped__", f))
        for part in (f.__name__, *parts):
            assert part in str(error.value), f"{part!r} is not in: {error.value}"


def test_shapes_that_do_not_fit_are_named(x64):
    # Case 26
    with pytest.raises(ValueError, match=r"hidden of shape \(6, 3\), targets of shape \(5,\)"):
        linear_cross_entropy(HIDDEN, HEAD.T, LABELS[:5])
    with pytest.raises(ValueError, match=r"logits of shape \(6, 5\), targets of shape \(5,\)"):
        cross_entropy(LOGITS, LABELS[:5])
    with pytest.raises(ValueError, match='layout="VD" would fit'):
        linear_cross_entropy(HIDDEN, HEAD, LABELS)
