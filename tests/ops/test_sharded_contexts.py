"""Sharded heads where a trainer calls them: explicit and automatic meshes, its own `shard_map`; what is refused."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from logitless import (
    HeadSharding,
    count_tokens,
    linear_cross_entropy,
    linear_grpo_loss,
    linear_logprobs,
    token_logprobs,
)
from logitless.ops.api import linear_token_loss, linear_token_stats
from logitless.ops.choice import INTERPRETED, auto_token_stats
from logitless.ops.types import HeadOptions
from problems import peaked

AXES = {"data": 2, "fsdp": 2, "tensor": 2}
LAYOUTS = {
    "gather_head": (P("data", "fsdp"), ("tensor", "fsdp")),
    "gather_tokens": (P("data", "fsdp"), ("tensor", "fsdp")),
    "auto": (P("data"), ("tensor",)),
}


def mesh_of(kind: str = "Auto", axes: dict[str, int] = AXES) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(getattr(AxisType, kind),) * len(axes))


def sharding_of(head: str, kind: str = "Auto") -> HeadSharding:
    tokens, vocab = LAYOUTS[head]
    return HeadSharding(mesh_of(kind), tokens=tokens, vocab=vocab, head=head)  # pyright: ignore[reportArgumentType]


@functools.cache
def given() -> tuple[jax.Array, ...]:
    """Hidden states, head `[D, V]`, bias, targets, mask, cotangents."""
    p = peaked(48, 24, 512, "float32")
    cotangents = jnp.asarray(np.random.default_rng(1).normal(size=(2, 24)), jnp.float32)
    hidden, targets, mask = (x.reshape(2, 24, *x.shape[1:]) for x in (p.hidden, p.targets, p.mask))
    return hidden, p.lm_head.T, p.bias, targets, mask, cotangents


def specs_of(sharding: HeadSharding) -> tuple[P, ...]:
    rows = sharding.token_spec
    return sharding.of_rows(ndim=2), sharding.head_spec("DV"), sharding.bias_spec, rows, rows, rows


def loss(*args: Any, implementation: str = "chunked") -> jax.Array:
    hidden, lm_head, bias, targets, mask, cotangents, sharding = args
    logprobs = linear_logprobs(
        hidden, lm_head, targets, bias=bias, mask=mask, sharding=sharding, implementation=implementation
    )
    return (cotangents * logprobs).sum()


@functools.cache
def expected() -> tuple[Any, Any]:
    return jax.tree.map(np.asarray, jax.value_and_grad(loss, (0, 1, 2))(*given(), None, implementation="reference"))


def assert_within_budget(found: tuple[Any, Any]) -> None:
    for ours, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected()), strict=True):
        np.testing.assert_allclose(ours, want, rtol=2e-5, atol=2e-5 * float(np.abs(want).max()))


@pytest.mark.parametrize("head", LAYOUTS)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_meshes_whose_axes_are_explicit_or_automatic(kind, head):
    sharding = sharding_of(head, kind)
    expected()

    def step(*args: Any) -> Any:
        return jax.value_and_grad(loss, (0, 1, 2))(*args, sharding)

    placed = [
        jax.device_put(x, NamedSharding(sharding.mesh, spec))  # pyright: ignore[reportArgumentType]
        for x, spec in zip(given(), specs_of(sharding), strict=True)
    ]
    with jax.set_mesh(sharding.mesh):  # pyright: ignore[reportArgumentType]
        assert_within_budget(jax.jit(step)(*placed))
        # What is whole on every device is cut.
        assert_within_budget(jax.jit(step)(*given()))
        assert_within_budget(step(*placed))
    assert_within_budget(jax.jit(step)(*placed))
    if kind == "Auto":
        # Of explicit axes JAX itself asks for `jax.set_mesh`.
        assert_within_budget(jax.jit(step)(*given()))


def sum_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(x, axes) if axes else x


@pytest.mark.parametrize("head", LAYOUTS)
@pytest.mark.parametrize("checked", [True, False])
def test_inside_the_shard_map_of_a_caller(checked, head):
    sharding = sharding_of(head)
    specs = specs_of(sharding)

    def of_all(*args: Any) -> jax.Array:
        return lax.psum(loss(*args, sharding), sharding.token_axes)

    everywhere: Any = {"mesh": sharding.mesh, "in_specs": specs, "check_vma": checked}
    assert_within_budget(
        jax.jit(jax.value_and_grad(jax.shard_map(of_all, out_specs=P(), **everywhere), (0, 1, 2)))(*given())
    )

    def step(*args: Any) -> Any:
        value, gradients = jax.value_and_grad(loss, (0, 1, 2))(*args, sharding)
        if not checked:
            # JAX then takes the gradient of the sum of what all devices return, by each device's own copy.
            copies = sharding.size(sharding.vocab_only)
            axes = (sharding.vocab_only, sharding.tokens_only, sharding.tokens_only)
            gradients = [sum_over(x, own) / copies for x, own in zip(gradients, axes, strict=True)]
        return lax.psum(value, sharding.token_axes), tuple(gradients)

    assert_within_budget(jax.jit(jax.shard_map(step, out_specs=(P(), specs[:3]), **everywhere))(*given()))


@pytest.mark.parametrize("head", LAYOUTS)
@pytest.mark.parametrize("checked", [True, False])
def test_inside_a_shard_map_over_some_of_the_axes(checked, head):
    sharding = sharding_of(head)

    def only_data(spec: P) -> P:
        entries = [(x,) if isinstance(x, str) else x or () for x in spec]
        return P(*("data" if "data" in entry else None for entry in entries))

    def of_all(*args: Any) -> jax.Array:
        return lax.psum(loss(*args, sharding), "data")

    over: Any = {"mesh": sharding.mesh, "axis_names": {"data"}, "check_vma": checked}
    run = jax.shard_map(of_all, in_specs=tuple(map(only_data, specs_of(sharding))), out_specs=P(), **over)
    assert_within_budget(jax.jit(jax.value_and_grad(run, (0, 1, 2)))(*given()))


def test_one_pass_inside_the_shard_map_of_a_caller():
    """Each device has a cotangent of its own: that of the head's gradient is in the sum over devices."""
    mesh = mesh_of()
    sharding = HeadSharding(mesh, tokens=P("data", ("fsdp", "tensor")), vocab=())
    hidden, lm_head, _, targets, mask, cotangents = given()

    def own(*args: Any) -> jax.Array:
        hidden, lm_head, targets, mask, cotangents, scale, sharding, implementation = args

        def nll(logprob, weight):
            return -weight * logprob

        options: Any = {"mask": mask, "sharding": sharding, "implementation": implementation}
        return (scale * linear_token_loss(hidden, lm_head, targets, nll, (cotangents,), **options)[0]).sum()

    def of_all(*args: Any) -> jax.Array:
        return lax.psum(own(*args, sharding, "one_pass"), sharding.token_axes)

    rows = sharding.token_spec
    in_specs = (sharding.of_rows(ndim=2), P(), rows, rows, rows, P(("data", "fsdp", "tensor")))
    scale = jnp.arange(1.0, 9.0)
    for checked in (True, False):
        run = jax.shard_map(of_all, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=checked)
        found = jax.jit(jax.value_and_grad(run, (0, 1)))(hidden, lm_head, targets, mask, cotangents, scale)

        def whole(hidden, lm_head):
            weights = jnp.repeat(scale.reshape(2, 4), 6, axis=1) * cotangents
            one = jnp.ones(())
            return own(hidden, lm_head, targets, mask, weights, one, None, "reference")

        for ours, want in zip(
            jax.tree.leaves(found), jax.tree.leaves(jax.value_and_grad(whole, (0, 1))(hidden, lm_head)), strict=True
        ):
            np.testing.assert_allclose(ours, want, rtol=2e-5, atol=2e-5 * float(np.abs(want).max()))


def test_losses_have_the_denominators_of_all_tokens():
    sharding = sharding_of("gather_tokens")
    hidden, lm_head, _, targets, mask, cotangents = given()
    labels = jnp.where(mask, targets, -100)
    advantages = jnp.asarray([0.5, -1.0])
    for reduction in ("mean", "sum"):
        cross_entropy = functools.partial(linear_cross_entropy, reduction=reduction)
        want, found = (
            jax.value_and_grad(lambda h, over=over, run=cross_entropy: run(h, lm_head, labels, sharding=over))(hidden)
            for over in (None, sharding)
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found, want)
    want, found = (
        jax.value_and_grad(
            lambda h, over=over: (
                linear_grpo_loss(h, lm_head, targets, cotangents - 5.0, advantages, mask, sharding=over).loss
            )
        )(hidden)
        for over in (None, sharding)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found, want)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_advantages_of_sequences_are_cut_as_their_tokens_are(kind):
    """Spread over its tokens, an advantage of a sequence lies as the sequences do, which are split further."""
    sharding = HeadSharding(mesh_of(kind), tokens=P("data", "fsdp"), vocab=())
    hidden, lm_head, _, targets, mask, _ = given()
    arrays = hidden, lm_head, targets, jnp.asarray([0.5, -1.0]), mask
    rows = sharding.token_spec
    specs = sharding.of_rows(ndim=2), P(), rows, P("data"), rows
    placed = [jax.device_put(x, NamedSharding(sharding.mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]

    def loss(hidden, lm_head, targets, advantages, mask, over):
        return linear_grpo_loss(hidden, lm_head, targets, None, advantages, mask, sharding=over).loss

    run = jax.value_and_grad(loss, (0, 1))
    # Outside `jit` the layout is that of the arrays; inside it is known where it is explicit.
    found = (run if kind == "Auto" else jax.jit(run, static_argnums=5))(*placed, sharding)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found, run(*arrays, None))


def test_the_tokens_of_all_devices_are_counted_inside_a_shard_map_too():
    sharding, mask = sharding_of("gather_head"), given()[4]
    assert count_tokens(mask, sharding).item() == mask.sum().item()
    for checked in (True, False):
        run: Any = functools.partial(count_tokens, sharding=sharding)
        own = jax.shard_map(run, mesh=sharding.mesh, in_specs=sharding.token_spec, out_specs=P(), check_vma=checked)
        assert own(mask).item() == mask.sum().item()


def test_the_simulated_kernels_say_where_they_cannot_be():
    sharding = sharding_of("auto")
    specs = specs_of(sharding)

    def own(*args: Any) -> jax.Array:
        return lax.psum(loss(*args, sharding, implementation=INTERPRETED), sharding.token_axes)

    with pytest.raises(NotImplementedError, match="knows no types of shard_map; give that check_vma=False"):
        jax.eval_shape(jax.shard_map(own, mesh=sharding.mesh, in_specs=specs, out_specs=P()), *given())
    some: Any = {"axis_names": {"data"}, "check_vma": False, "out_specs": P()}
    with pytest.raises(NotImplementedError, match="runs over data alone; let it run over every axis"):
        jax.eval_shape(
            jax.shard_map(own, mesh=sharding.mesh, in_specs=(P("data"), P(), P(), *(P("data"),) * 3), **some), *given()
        )


def call(sharding: Any, **changes: Any) -> Any:
    hidden, lm_head, _, targets, mask, _ = given()
    args: dict[str, Any] = {"hidden": hidden, "lm_head": lm_head, "targets": targets, "mask": mask} | changes
    return linear_logprobs(args["hidden"], args["lm_head"], args["targets"], mask=args["mask"], sharding=sharding)


def placed(x: jax.Array, *spec: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh_of(), P(*spec)))


def test_a_sharding_that_is_none():
    with pytest.raises(ValueError, match=r"vocab names the axis 'model'; the mesh has data=2, fsdp=2, tensor=2"):
        HeadSharding(mesh_of(), vocab="model")
    with pytest.raises(ValueError, match=r"tokens names the axis 'data' twice: \('data', 'fsdp', 'data'\)"):
        HeadSharding(mesh_of(), tokens=("data", "fsdp", "data"))
    with pytest.raises(ValueError, match=r"tokens names the axis 'data' twice"):
        HeadSharding(mesh_of(), tokens=P("data", "data"))
    with pytest.raises(ValueError, match=r"vocab_size=0; the true V must be at least 1"):
        HeadSharding(mesh_of(), vocab_size=0)
    with pytest.raises(ValueError, match=r"head='gather' is unknown; known: auto, gather_head, gather_tokens"):
        HeadSharding(mesh_of(), head="gather")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"mesh is None; give a jax.sharding.Mesh or AbstractMesh"):
        HeadSharding(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"linear_token_stats: sharding is 'data'; give a logitless.HeadSharding"):
        call("data")


def test_tokens_that_the_axes_do_not_divide():
    hidden, _, _, targets, mask, _ = given()
    cut = {"hidden": hidden[:, :23], "targets": targets[:, :23], "mask": mask[:, :23]}
    with pytest.raises(ValueError, match=r"axis 1 of targets has 23 tokens, and fsdp has 2 devices; pad it to 24"):
        call(sharding_of("gather_head"), **cut)
    flat = {"hidden": hidden[0], "targets": targets[0], "mask": mask[0]}
    with pytest.raises(ValueError, match=r"HeadSharding splits 2 axes of tokens, and targets has the shape \(24,\)"):
        call(sharding_of("gather_head"), **flat)


def test_arrays_that_lie_otherwise():
    hidden, lm_head, _, targets, _, _ = given()
    sharding = sharding_of("auto")
    with pytest.raises(
        ValueError,
        match=r"lm_head \(24, 512\) is laid out as P\('tensor', None\), and sharding= says P\(None, 'tensor'\); "
        r".*jax.sharding.reshard to P\(None, 'tensor'\).*the hidden size D cannot be split",
    ):
        call(sharding, lm_head=placed(lm_head, "tensor", None))
    with pytest.raises(ValueError, match=r"hidden .* P\('data', None, 'tensor'\).*the hidden size D cannot be split"):
        call(sharding, hidden=placed(hidden, "data", None, "tensor"))
    with pytest.raises(ValueError, match=r"targets \(2, 24\) is laid out as P\('fsdp', None\), .* P\('data', None\)"):
        call(sharding, targets=placed(targets, "fsdp"))
    one = jax.device_put(hidden, jax.devices()[0])
    with pytest.raises(ValueError, match=r"hidden \(2, 24, 24\) is on 1 of 8 devices; move it with jax.device_put"):
        call(sharding, hidden=one)
    explicit = sharding_of("auto", "Explicit")
    with jax.set_mesh(explicit.mesh):  # pyright: ignore[reportArgumentType]
        split = jax.device_put(hidden, NamedSharding(explicit.mesh, P("data", None, "tensor")))  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="the hidden size D cannot be split"):
            jax.eval_shape(lambda h: call(explicit, hidden=h), split)
    other = mesh_of(axes={"data": 8})
    with (
        jax.set_mesh(other),
        pytest.raises(ValueError, match=r"the mesh in scope has data=8, that of shard"),
    ):
        call(sharding)


def test_a_vocabulary_that_is_too_large_or_shares_an_axis_with_the_tokens():
    with pytest.raises(ValueError, match=r"HeadSharding has vocab_size=600, and the head has V = 512 columns"):
        call(HeadSharding(mesh_of(), vocab_size=600))
    with pytest.raises(ValueError, match=r"targets\[0, 0\] is 510, outside the vocabulary of 500"):
        call(HeadSharding(mesh_of(), vocab_size=500), targets=jnp.full((2, 24), 510))
    logits, targets = jnp.zeros((2, 24, 512)), given()[3]
    with pytest.raises(ValueError, match=r"token_stats: HeadSharding splits tokens and vocabulary both over fsdp; one"):
        token_logprobs(logits, targets, sharding=sharding_of("gather_head"))


def test_kernels_that_meet_a_sharded_array_without_a_sharding():
    hidden, lm_head, _, targets, _, _ = given()
    with pytest.raises(NotImplementedError, match=r"an argument is sharded over several; give sharding="):
        linear_logprobs(hidden, placed(lm_head, None, "tensor"), targets, implementation=INTERPRETED)
    # XLA partitions this one.
    found = linear_logprobs(hidden, placed(lm_head, None, "tensor"), targets, implementation="chunked")
    want = linear_logprobs(hidden, lm_head, targets, implementation="reference")
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_what_only_the_oracle_on_one_device_can():
    hidden, lm_head, _, targets, _, _ = given()
    sharding = sharding_of("auto")

    def loss_of(hidden, temperature):
        options: Any = {"implementation": "reference", "sharding": sharding, "temperature": temperature}
        return linear_logprobs(hidden, lm_head, targets, **options).sum()

    with pytest.raises(NotImplementedError, match="use implementation='reference' without sharding="):
        jax.grad(loss_of, 1)(hidden, 1.5)
    with pytest.raises(NotImplementedError, match="no second derivative; .*'reference' without sharding="):
        jax.jvp(jax.grad(loss_of), (hidden, 1.5), (hidden, 0.0))


def test_a_head_that_is_split_where_the_sharding_splits_nothing():
    lm_head = given()[1]
    with pytest.raises(ValueError, match=r"lm_head .* says P\(None, None\).*how it lies$"):
        call(HeadSharding(mesh_of(), tokens=("data",), vocab=()), lm_head=placed(lm_head, None, "tensor"))
    with pytest.raises(ValueError, match="HeadSharding has an AbstractMesh; give the Mesh of its devices"):
        call(HeadSharding(jax.sharding.AbstractMesh((2,), ("data",)), vocab=()))


def test_a_row_of_nan_is_not_hidden_by_a_column_that_cannot_be():
    hidden, lm_head, bias, targets, _, _ = given()
    for sharding in (None, sharding_of("auto")):
        stats = linear_token_stats(
            hidden.at[0, 0].set(jnp.nan),
            lm_head,
            targets,
            bias=bias.at[3].set(-jnp.inf),
            outputs=("mean_logits",),
            sharding=sharding,
        )
        assert jnp.isnan(stats.mean_logits[0, 0]) and (stats.mean_logits[1] == -jnp.inf).all()


def test_auto_takes_no_kernel_whose_summed_gradients_have_no_room():
    """In 16 MiB of a v4, at D = 4096, a float32 stage of the head's gradient is too much; one of bfloat16 is not."""
    hidden, lm_head = jnp.zeros((64, 4096), jnp.bfloat16), jnp.zeros((1024, 4096), jnp.bfloat16)
    alone = HeadOptions("VD", platform="tpu", device_kind="TPU v4")
    over = dataclasses.replace(alone, sharding=HeadSharding(mesh_of()))
    arrays: Any = (hidden, lm_head, None)
    assert auto_token_stats(arrays, alone) == "pallas_tpu" and auto_token_stats(arrays, over) == "chunked"
