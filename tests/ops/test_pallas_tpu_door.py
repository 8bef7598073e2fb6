"""The TPU kernels through the door: transforms, losses, shard_map, lowering for a TPU, and what is refused."""

import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless import linear_cross_entropy, linear_grpo_loss
from logitless.ops.api import linear_logprobs, linear_token_loss, linear_token_stats
from logitless.ops.choice import INTERPRETED
from logitless.ops.pallas_tpu import linear_token_stats_pallas_tpu
from logitless.ops.types import HeadOptions, LogitScalars
from problems import equations, peaked, sizes_for
from token_loss_oracle import weighted_nll

SIMULATED: dict[str, Any] = {"layout": "VD", "implementation": INTERPRETED, "block_sizes": sizes_for(INTERPRETED, None)}
REFERENCE: dict[str, Any] = {"layout": "VD", "implementation": "reference"}


def assert_close(one, two):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), one, two)


def batch():
    problems = [peaked(11, 6, 90, "float32", seed) for seed in range(3)]
    hidden, targets, mask = (jnp.stack([p[i] for p in problems]) for i in (0, 2, 4))
    return hidden, problems[0].lm_head, targets, mask


def value_and_gradients(how, hidden, lm_head, targets, mask):
    def loss(hidden, lm_head):
        out = linear_token_stats(hidden, lm_head, targets, mask=mask, softcap=30.0, **how)
        return out.logprobs.sum() + 0.3 * out.entropy.sum()

    return jax.value_and_grad(loss, (0, 1))(hidden, lm_head)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x, w, t, m: jax.lax.map(lambda one: f(one[0], w, *one[1:]), (x, t, m)),
        lambda f, x, w, t, m: jax.vmap(f, (0, None, 0, 0))(x, w, t, m),
        lambda f, x, w, t, m: jax.vmap(f, (0, None, 0, None))(x, w, t, None),
        lambda f, x, w, t, m: jax.jit(jax.vmap(f, (None, 0, None, None)))(x[0], jnp.stack([w, 2 * w]), t[0], m[0]),
    ],
    ids=["scan", "vmap over masks", "vmap without a mask", "vmap over heads"],
)
def test_transforms(transform):
    assert_close(*(transform(functools.partial(value_and_gradients, how), *batch()) for how in (SIMULATED, REFERENCE)))


def test_a_training_step_may_donate_the_head():
    problem = peaked(11, 6, 90, "float32")

    @functools.partial(jax.jit, donate_argnums=1)
    def step(hidden, lm_head):
        loss = linear_cross_entropy(hidden, lm_head, problem.targets, **SIMULATED)
        gradient = jax.grad(lambda w: linear_cross_entropy(hidden, w, problem.targets, **SIMULATED))(lm_head)
        return lm_head - 0.1 * gradient, loss

    expected = jax.value_and_grad(lambda w: linear_cross_entropy(problem.hidden, w, problem.targets, **REFERENCE))(
        problem.lm_head
    )
    head, loss = step(problem.hidden, problem.lm_head + 0)
    assert_close((loss, head), (expected[0], problem.lm_head - 0.1 * expected[1]))


def test_forward_mode_and_second_derivatives_raise():
    problem = peaked(5, 3, 7, "float32")

    def loss(hidden):
        return linear_logprobs(hidden, problem.lm_head, problem.targets, **SIMULATED).sum()

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (problem.hidden,), (problem.hidden,))
    with pytest.raises(NotImplementedError, match="second derivative; use implementation='reference'"):
        jax.hessian(loss)(problem.hidden)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_any_leading_axes(shape):
    hidden, lm_head = jnp.ones((*shape, 6)), jnp.ones((40, 6))
    value, gradient = jax.value_and_grad(
        lambda h: linear_logprobs(h, lm_head, jnp.zeros(shape, jnp.int32), **SIMULATED).sum()
    )(hidden)
    np.testing.assert_allclose(value, -np.log(40) * np.prod(shape), rtol=1e-5)
    assert gradient.shape == hidden.shape


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.02}], ids=str)
def test_linear_cross_entropy(options):
    problem = peaked(37, 24, 301, "float32")
    labels = jnp.where(problem.mask, problem.targets, -100)

    def both(how):
        def loss(hidden, lm_head):
            return linear_cross_entropy(hidden, lm_head, labels, **options, **how)

        return jax.value_and_grad(loss, (0, 1))(problem.hidden, problem.lm_head)

    assert_close(both(SIMULATED), both(REFERENCE))


def test_linear_grpo_loss():
    hidden, lm_head, targets, mask = batch()
    old = linear_logprobs(hidden, lm_head, targets, **REFERENCE) + 0.1 * jnp.sin(jnp.arange(33.0).reshape(3, 11))

    def both(how):
        def loss(hidden, lm_head):
            advantages = jnp.asarray([1.0, 0.0, -0.5])
            out = linear_grpo_loss(hidden, lm_head, targets, old, advantages, mask, **how)
            return out.loss, out.metrics

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, lm_head)

    assert_close(both(SIMULATED), both(REFERENCE))


def test_28_38_token_losses_carry_their_own_cotangents():
    problem = peaked(11, 6, 90, "float32")
    weights = jnp.asarray(np.random.default_rng(5).normal(size=11), jnp.float32)

    def gradients(how):
        def loss(hidden, lm_head):
            return -3.7 * linear_token_loss(hidden, lm_head, problem.targets, weighted_nll, (weights,), **how)[0]

        return jax.grad(loss, (0, 1))(problem.hidden, problem.lm_head)

    assert_close(gradients(SIMULATED), gradients(REFERENCE))


def test_90_entropy_with_an_impossible_column(x64):
    def of(bias):
        head, target = np.array([[1.0], [2.0], [0.0]]), np.array([0])
        out = linear_token_stats(np.ones((1, 1)), head, target, bias=bias, outputs=("entropy",), **SIMULATED)
        return out.entropy[0]

    value, gradient = jax.value_and_grad(of)(jnp.asarray([0.0, 0.0, -jnp.inf]))
    np.testing.assert_allclose(value, 0.58220311, atol=1e-8)
    np.testing.assert_allclose(gradient, [0.19661193, -0.19661193, 0.0], atol=1e-8)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.vmap], ids=["plain", "remat", "vmap"])
def test_the_kernels_lower_for_a_tpu_under_transforms(wrap):
    """What the simulation cannot: its callbacks have effects, which remat refuses."""
    options = HeadOptions(block_n=16, block_v=256, platform="tpu")

    def loss(hidden, lm_head, targets):
        return linear_token_stats_pallas_tpu(
            hidden, lm_head, None, targets, None, LogitScalars(), options
        ).logprobs.sum()

    gradient = jax.grad(lambda *x: jnp.sum(wrap(loss)(*x)), (0, 1))
    lead = (2,) if wrap is jax.vmap else ()
    shapes = [((*lead, 32, 128), "bfloat16"), ((*lead, 128, 512), "bfloat16"), ((*lead, 32), "int32")]
    traced = jax.jit(gradient).trace(*(jax.ShapeDtypeStruct(*x) for x in shapes))
    kernels = sum(eqn.primitive.name == "pallas_call" for eqn in equations(traced.jaxpr.jaxpr))
    # remat keeps no residuals, and runs the forward pass again.
    assert kernels == (3 if wrap is jax.checkpoint else 2)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_the_targets_columns_are_collected_exactly_whatever_the_precision():
    """A product with 0 and 1 in one pass would round a float32 head."""
    options = HeadOptions("DV", precision="default", block_n=16, block_v=256, platform="tpu")

    def loss(hidden, lm_head, targets):
        stats = linear_token_stats_pallas_tpu(hidden, lm_head, None, targets, None, LogitScalars(), options)
        return stats.logprobs.sum()

    traced = jax.make_jaxpr(jax.grad(loss))(jnp.ones((32, 128)), jnp.ones((128, 512)), jnp.zeros(32, jnp.int32))
    dots = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name == "dot_general"]
    exact = [eqn for eqn in dots if eqn.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2]
    assert len(dots) > len(exact) == 1


ALGORITHM = jax.lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32)
HIDDEN, HEAD, TARGETS = jnp.ones((4, 6)), jnp.ones((6, 9)), jnp.zeros(4, jnp.int32)


@pytest.mark.parametrize(
    ("implementation", "dtype", "options", "says"),
    [
        ("pallas_tpu", "float32", {}, r"this program is for 'cpu'.*implementation='chunked'.*pallas_tpu_interpret"),
        ("pallas_tpu_interpret", "float16", {}, r"is float16; it takes bfloat16, float32, float64.*'chunked'"),
        ("pallas_tpu_interpret", "float32", {"logits_dtype": "float16"}, r"logits_dtype='float16'.*'chunked'"),
        (
            "pallas_tpu_interpret",
            "float32",
            {"precision": "high"},
            r"='high'; .*'default' or 'highest'.*'chunked'",
        ),
        (
            "pallas_tpu_interpret",
            "float32",
            {"precision": ("default", "highest")},
            r"=\('default', 'hi.*'chunked'",
        ),
        ("pallas_tpu_interpret", "float32", {"precision": ALGORITHM}, r"precision=DotAlgorithm.*'chunked'"),
        ("pallas_tpu_interpret", "float32", {"precision": "BF16_BF16_F32"}, r"precision='BF16_BF16_F32'.*'chunked'"),
    ],
)
def test_what_cannot_run_says_why_and_what_would(implementation, dtype, options, says):
    hidden, lm_head = HIDDEN.astype(dtype), HEAD.astype(dtype)
    for call in (
        functools.partial(linear_token_stats, hidden, lm_head, TARGETS),
        functools.partial(linear_logprobs, hidden, lm_head, TARGETS),
        functools.partial(linear_token_loss, hidden, lm_head, TARGETS, weighted_nll, (1.0,)),
        functools.partial(linear_cross_entropy, hidden, lm_head, TARGETS),
    ):
        with pytest.raises(NotImplementedError, match=says):
            call(implementation=implementation, **options)


TWO_DEVICES = """
import functools, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from logitless import linear_logprobs

assert jax.device_count() == 2
rng = np.random.default_rng(0)
hidden = jnp.asarray(rng.normal(size=(32, 6)), jnp.float32)
lm_head = jnp.asarray(rng.normal(size=(90, 6)), jnp.float32)
targets = jnp.asarray(rng.integers(0, 90, 32), jnp.int32)
how = {"layout": "VD", "implementation": "pallas_tpu_interpret", "block_sizes": {"block_n": 16, "block_v": 256}}

def refused(call, *args):
    try:
        call(*args, **how)
    except NotImplementedError as error:
        assert re.search(r"argument is sharded over several; give sharding=.*shard_map.*chunked", str(error)), error
    else:
        raise AssertionError("ran")

mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
by_tokens = jax.device_put(hidden, NamedSharding(mesh, P("data")))
refused(linear_logprobs, by_tokens, lm_head, targets)
refused(linear_logprobs, hidden, jax.device_put(lm_head, NamedSharding(mesh, P("data"))), targets)

@jax.jit
def traced(hidden, lm_head, targets):
    loss = lambda hidden: linear_logprobs(jnp.sin(hidden), lm_head, targets, **how).sum()
    return jax.grad(loss)(hidden)

refused(lambda *x, **_: traced(*x), by_tokens, lm_head, targets)
with jax.set_mesh(mesh):
    refused(linear_logprobs, hidden, lm_head, targets)
    refused(lambda *x, **how: jax.jit(lambda *y: linear_logprobs(*y, **how))(*x), hidden, lm_head, targets)

def step(hidden, lm_head, targets, **how):
    def loss(hidden, lm_head):
        logprobs = linear_logprobs(hidden, lm_head, targets, **how)
        return jnp.vdot(jnp.sin(jnp.arange(16.0)), logprobs), logprobs
    gradients, logprobs = jax.grad(loss, (0, 1), has_aux=True)(hidden, lm_head)
    return logprobs, gradients[0], jax.lax.psum(gradients[1], "data")

results = [
    jax.jit(jax.shard_map(
        functools.partial(step, **options), mesh=mesh, in_specs=(P("data"), P(), P("data")),
        out_specs=(P("data"), P("data"), P()), check_vma=False,
    ))(by_tokens, lm_head, targets)
    for options in (how, {"layout": "VD", "implementation": "reference"})
]
for one, two in zip(*results, strict=True):
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
print("done")
"""


def test_two_devices_only_inside_shard_map():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", TWO_DEVICES], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-3000:]
