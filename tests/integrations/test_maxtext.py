"""MaxText: our loss in place of its vocabulary tiling, and its Tunix adapter, beside its own and a float64 oracle."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_packages import as_in_the_host, import_host, only_without

from logitless import HeadSharding, assert_logitless, audit, gradcheck
from logitless.integrations import maxtext as ours
from logitless.integrations import tunix_model
from problems import assert_in_budget, peaked

pytestmark = as_in_the_host

B, T, D, V = 2, 12, 24, 301
BLOCKS = {"block_n": 8, "block_v": 128}
EPSILON = 1e-5


@pytest.fixture(scope="module")
def host():
    """MaxText, where it is installed."""

    def part(module):
        return import_host(module, "maxtext", ours.TRIED)

    base = Path(str(part("maxtext").__file__)).parent / "configs" / "base.yml"
    pyconfig = part("maxtext.configs.pyconfig")
    return SimpleNamespace(
        nnx=part("flax.nnx"),
        configure=lambda **options: pyconfig.initialize(["", str(base)], **options),
        create=part("maxtext.utils.model_creation_utils").from_config,
        vocab_tiling_loss=part("maxtext.utils.vocabulary_tiling").vocab_tiling_nnx_loss,
    )


def model_of(host, devices=1, **options):
    sizes = {
        "run_name": "test",
        "enable_checkpointing": False,
        "override_model_config": True,
        "log_config": False,
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "attention": "dot_product",
        "base_emb_dim": D,
        "base_num_query_heads": 2,
        "base_num_kv_heads": 1,
        "head_dim": 12,
        "base_mlp_dim": 32,
        "base_num_decoder_layers": 1,
        "vocab_size": V,
        "max_target_length": T,
        "per_device_batch_size": B,
        "dtype": "float32",
        "weight_dtype": "float32",
        "normalization_layer_epsilon": EPSILON,
    }
    config = host.configure(**sizes | {"decoder_block": "llama2"} | options)
    shape = [devices if axis == "fsdp" else 1 for axis in config.mesh_axes]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(shape), config.mesh_axes)
    with jax.set_mesh(mesh):
        return config, mesh, host.create(config, mesh=mesh, rngs=host.nnx.Rngs(params=0, dropout=1))


def of_loss(host, made, loss):
    """A loss with MaxText's signature, as a function of hidden states (before the norm) and head."""
    config, _, model = made

    def fn(hidden, lm_head, targets, segments):
        copy = host.nnx.merge(*jax.tree.map(lambda x: x, host.nnx.split(model)))
        tied = config.logits_via_embedding
        (copy.token_embedder.embedding if tied else copy.decoder.logits_dense.kernel).value = lm_head
        data = {"targets": targets, "targets_segmentation": segments}
        total, z_total = loss(copy, hidden, data, config, True)
        return total, jax.lax.stop_gradient(jnp.stack([total, z_total]))

    return fn


def plain(tied, z_loss=0.0, cap=None, normalized=False):
    def fn(hidden, lm_head, targets, segments):
        hidden = hidden * jax.lax.rsqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + EPSILON)
        z = hidden @ (lm_head.T if tied else lm_head)
        z = z / np.sqrt(D) if normalized else z
        z = z if cap is None else cap * jnp.tanh(z / cap)
        lse = jax.scipy.special.logsumexp(z, axis=-1)
        losses = lse - jnp.take_along_axis(z, targets[..., None], axis=-1)[..., 0]
        counts = segments != 0
        z_total = jnp.sum(jnp.where(counts, z_loss * lse**2, 0))
        total = jnp.sum(jnp.where(counts, losses, 0)) + z_total
        return total, jax.lax.stop_gradient(jnp.stack([total, z_total]))

    return fn


def problem(tied, batch=B):
    p = peaked(batch * T, D, V, "float32")
    # MaxText multiplies with a tied head in bfloat16: of such numbers the cast changes none.
    lm_head = p.lm_head.astype(jnp.bfloat16).astype(jnp.float32) if tied else p.lm_head.T
    hidden, segments = p.hidden.reshape(batch, T, D), p.mask.reshape(batch, T).astype(jnp.int32) * 2
    return {"hidden": hidden, "lm_head": lm_head, "targets": p.targets.reshape(batch, T), "segments": segments}


HEADS = {
    "untied": ({}, {}),
    "untied, z-loss": ({"z_loss_multiplier": 0.01}, {"z_loss": 0.01}),
    "tied": ({"logits_via_embedding": True}, {}),
    "tied, all options": (
        {
            "logits_via_embedding": True,
            "z_loss_multiplier": 0.01,
            "final_logits_soft_cap": 5.0,
            "normalize_embedding_logits": True,
        },
        {"z_loss": 0.01, "cap": 5.0, "normalized": True},
    ),
}


@pytest.mark.parametrize("head", HEADS)
def test_the_loss_and_maxtexts_own_are_within_one_budget(host, head):
    options, same = HEADS[head]
    defaults = {"normalize_embedding_logits": False}
    made = model_of(host, num_vocab_tiling=3, **defaults | options)
    tied = head.startswith("tied")
    # The gradient of a tied head goes through MaxText's cast to bfloat16, by us as by itself: half a unit below 8.
    floors = {"dlm_head_max_abs": 2.0**-6} if tied else None
    for loss in (ours.vocab_tiling_loss(), host.vocab_tiling_loss):
        with jax.set_mesh(made[1]):
            report = gradcheck(of_loss(host, made, loss), plain(tied, **same), problem(tied), floors=floors)
        assert report.ok, f"{loss}: {report}"


def test_no_logits_with_it_and_logits_without(host):
    made = model_of(host, num_vocab_tiling=2)
    args = tuple(problem(tied=False).values())
    sizes: dict[str, Any] = {"vocab_size": V, "num_tokens": B * T, "differentiate": (0, 1)}
    with jax.set_mesh(made[1]):
        assert_logitless(
            lambda *a: of_loss(host, made, ours.vocab_tiling_loss(block_sizes=BLOCKS))(*a)[0], *args, **sizes
        )

        def dense(hidden, lm_head, targets, segments):
            return plain(tied=False)(hidden, lm_head, targets, segments)[0]

        assert not audit(dense, *args, **sizes).ok


def test_eight_devices_need_their_sharding_and_give_the_same(host):
    config, mesh, model = model_of(host, devices=8, num_vocab_tiling=2)
    args = tuple(problem(tied=False, batch=8).values())
    with pytest.raises(ValueError, match="mesh has 8 devices.*HeadSharding"):
        of_loss(host, (config, mesh, model), ours.vocab_tiling_loss())(*args)
    sharding = HeadSharding(mesh, tokens=("fsdp",), vocab=("tensor",))
    with jax.set_mesh(mesh):
        made = (config, mesh, model)
        ours_of, theirs_of = (
            jax.jit(jax.value_and_grad(lambda *a, loss=loss: of_loss(host, made, loss)(*a)[0], (0, 1)))
            for loss in (ours.vocab_tiling_loss(sharding=sharding), host.vocab_tiling_loss)
        )
        (value, gradients), (expected, wanted) = ours_of(*args), theirs_of(*args)
    assert_in_budget("loss", value, expected, expected)
    for name, mine, one in zip(("hidden", "lm_head"), gradients, wanted, strict=True):
        assert_in_budget(name, mine, one, one, ulps=32.0)


class Config:
    """The options of MaxText that the loss reads, at their defaults; a stand-in where MaxText is not installed."""

    vocab_tiling_ag_once = False
    enable_dropout = False
    z_loss_multiplier = 0.0
    logits_via_embedding = False
    parameter_memory_host_offload = False
    shard_mode = SimpleNamespace(value="auto")
    dtype = jnp.float32


def stand_in():
    """A model with the parts of MaxText's that the loss reads, and a norm that does nothing."""
    dense = SimpleNamespace(
        quant=None, kernel_scale=None, weight_quant=None, bias=None, dtype=jnp.float32, matmul_precision="default"
    )
    dense.kernel = problem(tied=False)["lm_head"]
    decoder = SimpleNamespace(
        decoder_norm=lambda x: x, dropout=lambda x, deterministic: x if deterministic else 0 * x, logits_dense=dense
    )
    return SimpleNamespace(decoder=decoder, mesh=SimpleNamespace(size=1, shape={}))


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_the_documented_signature_is_enough(z_loss):
    p = problem(tied=False)
    config = Config()
    config.z_loss_multiplier = z_loss
    data = {"targets": p["targets"], "targets_segmentation": p["segments"]}
    total, z_total = ours.vocab_tiling_loss()(stand_in(), p["hidden"], data, config, is_train=True)
    z = p["hidden"] @ p["lm_head"]
    lse = jax.scipy.special.logsumexp(z, axis=-1)
    counts = p["segments"] != 0
    nll = lse - jnp.take_along_axis(z, p["targets"][..., None], axis=-1)[..., 0]
    expected_z = jnp.sum(z_loss * lse**2 * counts)
    assert_in_budget("total", total, *[jnp.sum(nll * counts) + expected_z] * 2, ulps=8.0)
    assert_in_budget("z-loss", z_total, expected_z, expected_z, ulps=8.0)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("vocab_tiling_ag_once", True, "vocab_tiling_ag_once=True.*head='gather_head'"),
        ("parameter_memory_host_offload", True, "parameter_memory_host_offload=True is not supported"),
        ("shard_mode", SimpleNamespace(value="explicit"), "shard_mode=explicit is not supported"),
    ],
)
def test_an_option_that_it_cannot_honour_is_refused(option, value, message):
    p, config = problem(tied=False), Config()
    setattr(config, option, value)
    with pytest.raises(NotImplementedError, match="^vocab_tiling_loss: " + message):
        ours.vocab_tiling_loss()(stand_in(), p["hidden"], p, config, True)


def test_a_model_that_it_does_not_know_is_refused():
    p, model = problem(tied=False), stand_in()
    model.decoder.logits_dense.kernel_scale = 1.0
    data = {"targets": p["targets"], "targets_segmentation": p["segments"]}
    with pytest.raises(NotImplementedError, match="a quantised or scaled head"):
        ours.vocab_tiling_loss()(model, p["hidden"], data, Config(), True)
    del model.decoder
    with pytest.raises(NotImplementedError, match="no decoder.decoder_norm"):
        ours.vocab_tiling_loss()(model, p["hidden"], data, Config(), True)


@only_without("maxtext")
def test_a_missing_package_is_named():
    with pytest.raises(ImportError, match="pip install maxtext==0.2.5"):
        ours.with_hidden_states(SimpleNamespace())


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("logitless.integrations.versions.version", lambda package: "0.2.4")
    with pytest.raises(NotImplementedError, match="maxtext 0.2.4 is installed"):
        ours.with_hidden_states(SimpleNamespace())


def test_the_adapter_shows_its_head_under_the_names_that_tunix_reads():
    pytest.importorskip("flax", reason="flax comes with pip install '.[train]'")
    model = stand_in()
    model.config = Config()
    adapter = ours._adapter_class(SimpleNamespace)(base=model)
    head = tunix_model.head_of(adapter)
    np.testing.assert_array_equal(head.weight, problem(tied=False)["lm_head"])
    assert head.layout == "DV" and head.softcap is None


def adapter_of(host, tied):
    adapters = import_host("maxtext.integration.tunix.tunix_adapter", "maxtext", ours.TRIED)
    # The adapter looks the name up among the models whose weights it can map; the sizes are those of the test.
    name = "qwen3-0.6b" if tied else "llama3.1-8b"
    block = {"decoder_block": "qwen3" if tied else "llama2", "logits_via_embedding": tied}
    config, mesh, model = model_of(host, model_name=name, scan_layers=False, normalize_embedding_logits=tied, **block)
    return adapters.TunixMaxTextAdapter(model), mesh


def test_a_head_that_no_model_of_tunix_has_is_refused(host):
    adapter, _ = adapter_of(host, tied=False)
    dense = adapter.base.decoder.logits_dense
    own, dense.dtype = dense.dtype, jnp.float16
    with pytest.raises(NotImplementedError, match="^with_hidden_states: MaxText multiplies with a head of float16"):
        ours.with_hidden_states(adapter)
    dense.dtype, dense.bias = own, host.nnx.data(host.nnx.Param(jnp.zeros(V)))
    with pytest.raises(NotImplementedError, match="^with_hidden_states: the head has a bias"):
        ours.with_hidden_states(adapter)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_tunix_scores_maxtexts_adapter_by_hidden_states(host, tied):
    common = import_host("tunix.rl.common", "google-tunix", ("0.1.7",))
    from logitless.integrations.tunix import TokenOptions, token_statistics

    adapter, mesh = adapter_of(host, tied)
    ids = np.random.default_rng(3).integers(1, V, (B, T))
    prompts, completions = jnp.asarray(ids[:, :5]), jnp.asarray(ids[:, 5:])
    plain_graph, params, rest = host.nnx.split(adapter, host.nnx.Param, ...)
    graph = host.nnx.split(ours.with_hidden_states(adapter), host.nnx.Param, ...)[0]
    options = TokenOptions("hidden", {"block_sizes": {"block_n": 4, "block_v": 128}})
    example = SimpleNamespace(prompt_ids=prompts, completion_ids=completions)

    def mine(params):
        model = host.nnx.merge(graph, *jax.tree.map(lambda x: x, (params, rest)))
        return token_statistics(options, model, example, (0, 0), temperature=0.7).logprobs

    def theirs(params):
        state = host.nnx.State.merge(params, rest)
        arguments = {"pad_id": 0, "eos_id": 0, "stop_gradient": False, "temperature": 0.7}
        return common.compute_per_token_logps(plain_graph, state, prompts, completions, **arguments)

    sizes: dict[str, Any] = {"vocab_size": V, "num_tokens": B * (T - 5)}
    with jax.set_mesh(mesh):
        found, back = jax.vjp(mine, params)
        expected, theirs_back = jax.vjp(theirs, params)
        assert_logitless(lambda p: jnp.sum(mine(p)), params, **sizes)
        assert not audit(lambda p: jnp.sum(theirs(p)), params, **sizes).ok
        gradients, wanted = back(jnp.ones_like(found)), theirs_back(jnp.ones_like(expected))
    assert_in_budget("logprobs", found, expected, expected, ulps=16.0)
    for (path, own), one in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(wanted), strict=True):
        assert_in_budget(jax.tree_util.keystr(path), own, one, one, ulps=2.0**16 if tied else 64.0)
