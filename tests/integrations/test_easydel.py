"""EasyDeL: the loss and the log-probabilities of its models by ours, beside its own and a float64 oracle."""

import os
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_packages import as_in_the_host, import_host, only_without

from logitless import HeadSharding, assert_logitless, audit, gradcheck
from logitless.integrations import easydel as ours
from problems import assert_in_budget, peaked

pytestmark = as_in_the_host

B, T, D, V = 2, 11, 24, 301


@pytest.fixture(scope="module")
def host():
    """EasyDeL, where it is installed."""
    # Without this it sets XLA flags that the XLA of later versions of JAX ends the process for.
    os.environ["EASYDEL_AUTO"] = "false"

    def part(module):
        return import_host(module, "easydel", ours.TRIED)

    grpo = part("easydel.trainers.group_relative_policy_optimization._fn")
    losses = part("easydel.infra.loss_utils")
    return SimpleNamespace(easydel=part("easydel"), losses=losses, grpo=grpo, nnx=part("flax.nnx"))


def model_of(host, kind="Llama", devices=1, dtype=jnp.float32, **options):
    config = getattr(host.easydel, f"{kind}Config")(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
        max_position_embeddings=64,
        attn_mechanism="vanilla",
        **options,
    )
    axes = ("dp", "fsdp", "ep", "tp", "sp")
    config.set_model_mesh(jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(1, devices, 1, 1, 1), axes))
    make = getattr(host.easydel, f"{kind}ForCausalLM")
    return make(config, dtype=dtype, param_dtype=dtype, rngs=host.nnx.Rngs(0))


def with_head(host, model, lm_head):
    """A copy of the model with this head, `[D, V]`, or `[V, D]` where the head is the embedding."""
    copy = host.nnx.merge(*jax.tree.map(lambda x: x, host.nnx.split(model)))
    tied = lm_head.shape[0] == V
    (copy.get_embedding().embedding if tied else copy.lm_head.kernel).value = lm_head
    return copy


def problem(tied, ignored_counts=False):
    p = peaked(B * T, D, V, "float32")
    labels = np.roll(np.asarray(p.targets).reshape(B, T), 1, axis=1)
    labels[0, 3:5] = -100
    mask = np.asarray(p.mask).reshape(B, T).copy()
    mask[0, 3:5] = ignored_counts
    arrays = {"hidden": p.hidden.reshape(B, T, D), "lm_head": p.lm_head if tied else p.lm_head.T}
    return arrays | {"labels": jnp.asarray(labels), "mask": jnp.asarray(mask)}


def of_strategy(host, model, strategy, *, masked, num_items=None, **config):
    """A loss strategy of EasyDeL's or of ours, on hidden states, as `compute_loss` calls it."""

    def fn(hidden, lm_head, labels, mask):
        with model.mesh:
            metrics = strategy.compute(
                module=with_head(host, model, lm_head),
                outputs=SimpleNamespace(last_hidden_state=hidden),
                labels=labels,
                loss_config=host.losses.LossConfig(**config),
                batch={"attention_mask": mask.astype(jnp.int32)} if masked else {},
                loss_kwargs={} if num_items is None else {"num_items_in_batch": num_items},
                paxis=None,
                forward_plan=host.losses.LossForwardPlan(forward_kwargs={"apply_lm_head": False}),
            )
        parts = [jnp.asarray(x) for x in (metrics.loss, metrics.z_loss, metrics.weight_sum)]
        return metrics.loss, jax.lax.stop_gradient(jnp.stack(parts))

    return fn


def plain(tied, *, masked, num_items=1, cap=None, scale=1.0, label_smoothing=0.0, z_loss=0.0, chunk_token_size=None):
    """Cross-entropy against EasyDeL's soft targets, less their entropy, over the weights' sum."""
    del chunk_token_size

    def fn(hidden, lm_head, labels, mask):
        z = hidden[:, :-1] @ (lm_head.T if tied else lm_head) * scale
        z = z if cap is None else cap * jnp.tanh(z / cap)
        labels = labels[:, 1:]
        weight = (mask[:, 1:] if masked else labels != -100).astype(z.dtype)
        other = label_smoothing / (V - 1)
        soft = jnp.where(jax.nn.one_hot(labels, V) != 0, 1 - label_smoothing, other)
        entropy = -(1 - label_smoothing) * np.log(1 - label_smoothing) - label_smoothing * np.log(other + 1e-20)
        z_losses = z_loss * jax.scipy.special.logsumexp(z, axis=-1) ** 2
        losses = -jnp.sum(soft * jax.nn.log_softmax(z), axis=-1) - entropy + z_losses
        total, count = jnp.sum(losses * weight), jnp.sum(weight)
        parts = jnp.stack([total / count / num_items, jnp.sum(z_losses * weight) / count, count])
        return parts[0], jax.lax.stop_gradient(parts)

    return fn


KINDS = {
    "untied": ("Llama", {}, {}),
    "tied": ("Llama", {"tie_word_embeddings": True}, {}),
    "softcap": ("Gemma2", {"final_logit_softcapping": 5.0}, {"cap": 5.0}),
    "logit scale": ("Cohere", {"logit_scale": 0.5}, {"scale": 0.5}),
}
CONFIGS = [
    {"masked": True},
    {"masked": False},
    {"masked": True, "label_smoothing": 0.1, "z_loss": 0.01, "num_items": 3, "chunk_token_size": 4},
]


def our_strategy(model, **options):
    return ours.use_logitless(model, **options).loss_strategy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_loss_and_easydels_own_are_within_one_budget(host, kind, config):
    name, options, head = KINDS[kind]
    model = model_of(host, name, **options)
    tied = kind != "untied"
    for strategy in (our_strategy(model), host.losses.CausalLMLossStrategy()):
        report = gradcheck(of_strategy(host, model, strategy, **config), plain(tied, **config, **head), problem(tied))
        assert report.ok, f"{strategy}: {report}"


def test_an_ignored_label_under_a_mask_of_1_counts_at_a_loss_and_a_gradient_of_0(host):
    # EasyDeL gives it the loss 0 and, by a backward pass that takes targets to sum to 1, the gradient of a softmax.
    model, args = model_of(host), problem(tied=False, ignored_counts=True)
    strategies = our_strategy(model), host.losses.CausalLMLossStrategy()
    ours_of, theirs_of = (
        gradcheck(of_strategy(host, model, strategy, masked=True), plain(False, masked=True), args)
        for strategy in strategies
    )
    assert ours_of.ok, ours_of
    assert [failure.split(":")[0] for failure in theirs_of.failures] == ["d_hidden", "d_lm_head"]


def test_no_logits_with_it_and_logits_without(host):
    model = model_of(host)
    args = tuple(problem(tied=False).values())
    sizes: dict[str, Any] = {"vocab_size": V, "num_tokens": B * (T - 1)}
    blocks = {"block_n": 8, "block_v": 128}
    logitless = of_strategy(host, model, our_strategy(model, block_sizes=blocks), masked=True)
    assert_logitless(lambda *a: logitless(*a)[0], *args, differentiate=(0, 1), **sizes)
    theirs = of_strategy(host, model, host.losses.CausalLMLossStrategy(), masked=True)
    assert not audit(lambda *a: theirs(*a)[0], *args, differentiate=(0, 1), **sizes).ok


def batch_of(model):
    ids = jnp.asarray(np.random.default_rng(2).integers(0, V, (B, T)))
    mask = jnp.ones((B, T), jnp.int32).at[1, 8:].set(0)
    return {"input_ids": ids, "attention_mask": mask}


def test_a_whole_model_learns_the_same_from_it(host):
    model = model_of(host, lmhead_chunksize=4)
    graph, params, rest = host.nnx.split(model, host.nnx.Param, ...)

    def loss(params):
        return host.nnx.merge(graph, params, rest).compute_loss(**batch_of(model))[1].loss

    with model.mesh:
        expected, wanted = jax.value_and_grad(loss)(params)
        graph = host.nnx.split(ours.use_logitless(model), host.nnx.Param, ...)[0]
        value, gradients = jax.value_and_grad(loss)(params)
        assert_logitless(loss, params, vocab_size=V, num_tokens=B * T)
    assert_in_budget("loss", value, expected, expected)
    for (path, mine), one in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(wanted), strict=True):
        assert_in_budget(jax.tree_util.keystr(path), mine, one, one, ulps=32.0)


def test_grpo_scores_by_it_within_the_context_and_not_after(host):
    model = model_of(host, lmhead_chunksize=T)
    graph, params, rest = host.nnx.split(model, host.nnx.Param, ...)

    def score(params):
        call = host.grpo.get_per_token_logps_and_entropies
        logps, entropies = call(host.nnx.merge(graph, params, rest), *batch_of(model).values(), 4)
        return jnp.sum(logps + 0.1 * entropies), (logps, entropies)

    run = jax.value_and_grad(score, has_aux=True)
    sizes: dict[str, Any] = {"vocab_size": V, "num_tokens": B * (T - 4)}
    with model.mesh:
        (_, expected), wanted = run(params)
        assert not audit(lambda p: score(p)[0], params, **sizes).ok
        with ours.logitless_scoring(model, block_sizes={"block_n": 8, "block_v": 128}):
            (_, found), gradients = run(params)
            assert_logitless(lambda p: score(p)[0], params, **sizes)
        assert not audit(lambda p: score(p)[0], params, **sizes).ok
    for name, mine, one in zip(("logprobs", "entropies"), found, expected, strict=True):
        assert_in_budget(name, mine, one, one)
    for (path, mine), one in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(wanted), strict=True):
        assert_in_budget(jax.tree_util.keystr(path), mine, one, one, ulps=32.0)


def test_a_mesh_of_eight_devices_needs_its_sharding(host):
    model = model_of(host, devices=8)
    with pytest.raises(ValueError, match="mesh has 8 devices.*HeadSharding"):
        ours.use_logitless(model)
    ours.use_logitless(model, sharding=HeadSharding(model.mesh, tokens=("fsdp",), vocab=("tp",)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"reduction": "mean"}, "LossConfig.reduction='mean'"),
        ({"divide_weight_sum": True}, "divide_weight_sum=True"),
        ({"compute_dtype": "bf16"}, "compute_dtype='bf16'"),
        ({"loss_normalizing_factor": "AVERAGE_PER_SEQUENCE"}, "loss_normalizing_factor='AVERAGE_PER_SEQUENCE'"),
    ],
)
def test_an_option_that_it_cannot_honour_is_refused(host, config, message):
    model = ours.use_logitless(model_of(host))
    with model.mesh, pytest.raises(NotImplementedError, match=message):
        model.compute_loss(**batch_of(model), loss_config=host.losses.LossConfig(**config))


def test_a_model_that_it_does_not_know_is_refused(host):
    model = model_of(host)
    model.apply_lora_to_layers(4, ".*lm_head.*")
    with pytest.raises(NotImplementedError, match="head of LlamaForCausalLM is a .*LoRA.*plain linear layer"):
        ours.use_logitless(model)
    model.config.lmhead_chunksize = 8
    with pytest.raises(NotImplementedError, match="^logitless_scoring: the head of"), ours.logitless_scoring(model):
        pass


def test_scoring_needs_the_chunk_size_that_turns_it_on(host):
    with pytest.raises(ValueError, match="lmhead_chunksize is None"), ours.logitless_scoring(model_of(host)):
        pass


@only_without("easydel")
@pytest.mark.parametrize("use", [ours.use_logitless, lambda model: ours.logitless_scoring(model).__enter__()])
def test_a_missing_package_is_named(use):
    with pytest.raises(ImportError, match="pip install easydel==0.3.0"):
        use(SimpleNamespace())


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("logitless.integrations.versions.version", lambda package: "0.2.0")
    with pytest.raises(NotImplementedError, match="easydel 0.2.0 is installed"):
        ours.use_logitless(SimpleNamespace())
