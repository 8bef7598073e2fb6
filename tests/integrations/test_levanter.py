"""Levanter: its fused cross-entropy and its models with our implementation, beside its own and a float64 oracle."""

import inspect
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_packages import as_in_the_host, import_host, only_without

from logitless import assert_logitless, audit, gradcheck
from logitless.integrations import levanter as ours
from problems import SIZES, assert_in_budget, peaked

pytestmark = as_in_the_host


@pytest.fixture(scope="module")
def host():
    """Levanter, where it is installed."""

    def part(module):
        return import_host(module, "marin-levanter", ours.TRIED)

    kernels = part("levanter.kernels.pallas.fused_cross_entropy_loss")
    return SimpleNamespace(hax=part("haliax"), kernels=kernels, loss=part("levanter.models.loss"))


def problem(n, d, v, dtype="float32"):
    p = peaked(n, d, v, dtype)
    weight = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2.0, n) * np.asarray(p.mask), jnp.float32)
    return {"hidden": p.hidden, "lm_head": p.lm_head.T, "targets": p.targets, "weight": weight}


def plain(cap=None, z_loss=0.0):
    def fn(hidden, lm_head, targets, weight):
        z = hidden @ lm_head
        z = z if cap is None else cap * jnp.tanh(z / cap)
        lse = jax.scipy.special.logsumexp(z, axis=-1)
        losses = lse - jnp.take_along_axis(z, targets[:, None], axis=-1)[:, 0]
        weight = weight.astype(z.dtype)
        return jnp.sum((losses + z_loss * lse**2) * weight) / jnp.sum(weight), losses

    return fn


def of_callable(cap=None, z_loss=0.0, **options):
    """As Levanter calls it, written from its documented signature; runs also where Levanter is not installed."""

    def fn(hidden, lm_head, targets, weight):
        implementation = ours.fused_cross_entropy(**options)
        losses, lse = implementation(
            hidden, targets, lm_head, block_sizes=object(), dtype=jnp.float32, logit_soft_cap=cap, precision=None
        )
        return jnp.sum((losses + z_loss * lse**2) * weight) / jnp.sum(weight), losses

    return fn


def of_levanter(host, implementation, cap=None, z_loss=0.0):
    def fn(hidden, lm_head, targets, weight):
        call = host.kernels.fused_cross_entropy_loss_and_logsumexp_penalty
        options = {"logit_soft_cap": cap, "implementation": implementation, "precision": "highest"}
        loss = call(hidden, targets, lm_head, weight=weight, logsumexp_weight=z_loss, **options)
        return loss, call(hidden, targets, lm_head, reduction=None, **options)

    return fn


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("cap", "z_loss"), [(None, 0.0), (5.0, 0.1)])
def test_the_callable_is_within_the_error_budget(sizes, cap, z_loss):
    report = gradcheck(of_callable(cap, z_loss), plain(cap, z_loss), problem(*sizes))
    assert report.ok, report


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("cap", "z_loss"), [(None, 0.0), (5.0, 0.1)])
def test_levanter_with_it_and_with_its_own_code_are_within_one_budget(host, sizes, cap, z_loss):
    for implementation in (ours.fused_cross_entropy(), "reference"):
        report = gradcheck(of_levanter(host, implementation, cap, z_loss), plain(cap, z_loss), problem(*sizes))
        assert report.ok, f"{implementation}: {report}"


def test_it_takes_what_levanter_gives_its_own(host):
    given = inspect.signature(host.kernels.IMPLEMENTATIONS["reference"]).parameters
    taken = inspect.signature(ours.fused_cross_entropy()).parameters
    assert {name: p.kind for name, p in given.items()} == {name: p.kind for name, p in taken.items()}


def test_no_logits_with_it_and_logits_without(host):
    args = tuple(problem(*SIZES["nothing divides"]).values())
    sizes: dict[str, Any] = {"vocab_size": 301, "num_tokens": 37}
    logitless = of_levanter(host, ours.fused_cross_entropy(block_sizes={"block_n": 16, "block_v": 128}))
    assert_logitless(lambda *a: logitless(*a)[0], *args, differentiate=(0, 1), **sizes)
    assert not audit(lambda *a: of_levanter(host, "reference")(*a)[0], *args, differentiate=(0, 1), **sizes).ok


def of_models(host, **options):
    """`maybe_fused_next_token_loss`, which Levanter's models call; the head's axes are the other way round."""

    def fn(hidden, lm_head, targets, weight):
        hax = host.hax
        batch, position, embed, vocab = hax.make_axes(batch=hidden.shape[0], position=9, embed=24, vocab=301)
        named = (
            hax.named(hidden, (batch, position, embed)),
            hax.named(lm_head, (vocab, embed)),
            hax.named(targets, (batch, position)),
            hax.named(weight, (batch, position)),
        )

        def call(**reduction):
            return host.loss.maybe_fused_next_token_loss(
                position, embed, vocab, *named, logsumexp_weight=0.01, precision="highest", **options, **reduction
            )

        return call().scalar(), call(reduction=None).array

    return fn


def plain_models(hidden, lm_head, targets, weight):
    z = hidden @ lm_head.T
    lse = jax.scipy.special.logsumexp(z, axis=-1)
    losses = lse - jnp.take_along_axis(z, jnp.roll(targets, -1, axis=1)[..., None], axis=-1)[..., 0] + 0.01 * lse**2
    weight = weight.astype(z.dtype).at[:, -1].set(0)
    return jnp.sum(losses * weight) / jnp.sum(weight), losses * weight


def model_problem(batch=2):
    p = peaked(9 * batch, 24, 301, "float32")
    hidden, targets = p.hidden.reshape(batch, 9, 24), jnp.roll(p.targets.reshape(batch, 9), 1, axis=1)
    weight = p.mask.reshape(batch, 9).astype(jnp.float32)
    return {"hidden": hidden, "lm_head": p.lm_head, "targets": targets, "weight": weight}


def test_the_losses_of_models_are_within_the_budget_with_and_without(host):
    with ours.use_logitless():
        report = gradcheck(of_models(host), plain_models, model_problem())
    assert report.ok, report
    theirs = gradcheck(of_models(host), plain_models, model_problem())
    assert theirs.ok, theirs


def test_the_losses_of_models_hold_no_logits_within_the_context_and_do_after(host):
    args = tuple(model_problem().values())
    sizes: dict[str, Any] = {"vocab_size": 301, "num_tokens": 18, "differentiate": (0, 1)}

    def loss(*arrays):
        return of_models(host)(*arrays)[0]

    with ours.use_logitless(block_sizes={"block_n": 8, "block_v": 128}):
        assert_logitless(loss, *args, **sizes)
        # An implementation that a caller names goes before ours.
        named = of_levanter(host, "reference")
        assert not audit(named, *problem(18, 24, 301).values(), **sizes, allow_outputs=True).ok
    assert not audit(loss, *args, **sizes).ok


def test_it_runs_within_levanters_shard_map(host):
    args = tuple(model_problem(batch=8).values())
    run = jax.jit(jax.value_and_grad(lambda *a: of_models(host)(*a)[0], (0, 1)))
    expected, wanted = run(*args)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with ours.use_logitless(), jax.set_mesh(mesh), host.hax.axis_mapping({"batch": "data"}):
        run = jax.jit(jax.value_and_grad(lambda *a: of_models(host)(*a)[0], (0, 1)))
        value, gradients = run(*args)
        assert "shard_map" in str(jax.make_jaxpr(run)(*args))
    assert_in_budget("loss", value, expected, plain_models(*args)[0])
    for name, mine, one in zip(("hidden", "lm_head"), gradients, wanted, strict=True):
        assert_in_budget(name, mine, jnp.zeros_like(one), one, factor=0, ulps=8.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"return_argmax": True}, "return_argmax=True is not supported.*'xla'"),
        ({"dtype": jnp.bfloat16}, "dtype=bfloat16 is not supported.*dtype=jnp.float32.*logits_dtype='bfloat16'"),
    ],
)
def test_an_option_that_it_cannot_honour_is_refused(options, message):
    p = problem(*SIZES["one token"])
    with pytest.raises(NotImplementedError, match=message):
        ours.fused_cross_entropy()(p["hidden"], p["targets"], p["lm_head"], **options)


def test_levanter_lets_a_refusal_through(host):
    p = problem(*SIZES["one token"])
    with ours.use_logitless(), pytest.raises(NotImplementedError, match="return_argmax"):
        host.loss.fused_cross_entropy_loss_and_logsumexp_penalty_kernel(
            p["hidden"], p["targets"], p["lm_head"], return_argmax=True
        )


def test_16_bit_inputs_and_rounded_logits_give_what_levanters_logits_in_16_bits_give():
    p = problem(*SIZES["nothing divides"], dtype="bfloat16")
    arrays = p["hidden"], p["targets"], p["lm_head"]
    rounded, _ = ours.fused_cross_entropy(logits_dtype="bfloat16")(*arrays)
    z = jnp.matmul(p["hidden"], p["lm_head"], preferred_element_type=jnp.float32).astype(jnp.bfloat16)
    expected = -jax.nn.log_softmax(z.astype(jnp.float32))[jnp.arange(37), p["targets"]]
    assert_in_budget("loss", rounded, expected, expected)
    exact, _ = ours.fused_cross_entropy()(*arrays)
    assert np.abs(np.asarray(exact - rounded)).max() > 1e-3


@only_without("marin-levanter")
def test_a_missing_package_is_named():
    with pytest.raises(ImportError, match="pip install marin-levanter==0.2.227"), ours.use_logitless():
        pass


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("logitless.integrations.versions.version", lambda package: "0.3.0")
    with pytest.raises(NotImplementedError, match="marin-levanter 0.3.0 is installed"), ours.use_logitless():
        pass
