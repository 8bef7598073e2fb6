"""The Tunix adapter: stock Tunix's numbers, without its logits."""

import importlib.metadata
from typing import Any

import pytest

pytest.importorskip("tunix", reason="google-tunix is not installed (pip install '.[train]')")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx  # pyright: ignore[reportMissingImports]
from tunix.rl import common  # pyright: ignore[reportMissingImports]
from tunix.rl.grpo.grpo_learner import GRPOConfig  # pyright: ignore[reportMissingImports]

from logitless import HeadSharding, audit, dapo_loss, grpo_loss
from logitless.integrations.tunix import TokenOptions, token_statistics, use_logitless
from logitless.integrations.tunix_loss import options_of_tunix
from logitless.integrations.tunix_model import head_of, hidden_states
from logitless.train.config import LoraConfig
from logitless.train.models import add_lora
from logitless.train.session import make_mesh
from logitless.train.step import step_memory, step_program
from logitless.train.warm_start import labelled_rows, model_inputs
from tunix_runs import (
    COMPLETION,
    PROMPT,
    Recorder,
    V,
    batches,
    example,
    learner,
    sft_trainer,
    tiny_policy,
)

pytestmark = [
    pytest.mark.usefixtures("lenient_jax"),
    # Tunix reads the variables of Flax in a way that is deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EPS = np.finfo(np.float32).eps


def stock_and_ours(**options):
    """Two learners that begin alike."""
    return [learner(tiny_policy(), **options) for _ in range(2)]


@pytest.fixture(scope="module")
def kept():
    """Stock Tunix, and Tunix with our loss, of equal weights that no test changes."""
    stock, ours = stock_and_ours()
    return stock, use_logitless(ours)


@pytest.fixture
def pair(kept):
    """Both of them with the options of a test, which their losses read anew each time."""
    before = [dict(vars(made.algo_config)) for made in kept]

    def configured(**options):
        for made in kept:
            for name, value in options.items():
                setattr(made.algo_config, name, value)
        return kept

    yield configured
    for made, options in zip(kept, before, strict=True):
        vars(made.algo_config).clear()
        vars(made.algo_config).update(options)


def near_policy(made, **options):
    """A batch whose old and reference policies are near to that of a learner."""
    batch = example()
    graph, state = nnx.split(made.rl_cluster.actor_trainer.model)
    logprobs = common.compute_per_token_logps(graph, state, batch.prompt_ids, batch.completion_ids, 0, 1)
    return example(logprobs=logprobs, **options)


def loss_and_gradient(made, batch, trained=nnx.Param):
    """The trainer's loss, its metrics and its gradient in a flat dict, by Flax's own derivative."""
    trainer = made.rl_cluster.actor_trainer

    def loss(model, batch):
        return trainer.loss_fn(model, train_example=batch, algo_config=made.algo_config)

    (value, aux), gradients = nnx.jit(nnx.value_and_grad(loss, argnums=nnx.DiffState(0, trained), has_aux=True))(
        trainer.model, batch
    )
    flat = {str(path): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(gradients)}
    return float(value), {name: float(x) for name, x in aux.items()}, flat


def assert_same_gradients(ours, theirs, steps=60):
    """Within so many float32 roundings of the largest element of each array."""
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        # A gradient that is rounding alone (a frozen or unused weight) is measured against all others.
        scale = max(np.abs(want).max(), 1e-3 * max(np.abs(x).max() for x in theirs.values()))
        worst = np.abs(ours[name] - want).max()
        assert worst <= steps * EPS * scale, f"{name}: {worst} of {scale}"


@pytest.mark.slow
@pytest.mark.parametrize("level", ["hidden", "logits"])
def test_twenty_updates_are_those_of_stock_tunix(level):
    stock, ours = stock_and_ours(num_iterations=2)
    use_logitless(ours, level=level)
    records = [Recorder(stock), Recorder(ours)]
    for made in (stock, ours):
        made.train(batches(10))
    for name in ("loss", "kl", "grad_norm"):
        want, got = records[0].series(name), records[1].series(name)
        assert len(want) == 20 and np.ptp(want) > 0
        # Rounding grows from update to update, as it does between two programs of stock Tunix.
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5, err_msg=name)
    assert records[0].series("pg_clipfrac").max() > 0, "no token was clipped: the ratio was never put to the test"
    np.testing.assert_allclose(records[1].series("pg_clipfrac"), records[0].series("pg_clipfrac"), atol=1e-6)
    states = [dict(nnx.to_flat_state(nnx.state(made.rl_cluster.actor_trainer.model))) for made in (stock, ours)]
    for path, want in states[0].items():
        np.testing.assert_allclose(states[1][path][...], want[...], rtol=1e-3, atol=1e-4, err_msg=str(path))


MODES = [
    {"loss_agg_mode": mode}
    for mode in (
        "token-mean",
        "sequence-mean-token-mean",
        "sequence-mean-token-scale",
        "seq-mean-token-sum",
        "sequence-mean-token-sum-norm",
    )
]
VARIANTS = [
    *MODES,
    {"loss_algo": "gspo-token"},
    {"kl_loss_mode": "kl"},
    {"kl_loss_mode": "mse_kl"},
    {"beta": 0.0},
    {"epsilon": 0.05},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_loss_of_every_mode_is_that_of_stock_tunix_with_an_empty_completion(pair, options):
    stock, ours = pair(**options)
    batch = near_policy(stock, ref=options.get("beta") != 0.0, empty_row=2)
    want, got = loss_and_gradient(stock, batch), loss_and_gradient(ours, batch)
    assert abs(got[0] - want[0]) <= 30 * EPS * max(1, abs(want[0])), (got[0], want[0])
    assert_same_gradients(got[2], want[2])
    for name in ("kl", "pg_clipfrac", "is_ratio/mean", "is_ratio/max", "ppo_kl", "entropy"):
        assert got[1][name] == pytest.approx(want[1][name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("options", [{"epsilon_high": 0.4}, {"epsilon_c": 1.5}], ids=str)
def test_wider_and_double_clips_are_those_of_stock_tunix(pair, options):
    batch = near_policy(pair()[0])
    plain = loss_and_gradient(pair()[0], batch)
    stock, ours = pair(**options)
    want, got = loss_and_gradient(stock, batch), loss_and_gradient(ours, batch)
    assert abs(plain[0] - want[0]) > 1e-4, "the option changes nothing here"
    assert got[0] == pytest.approx(want[0], rel=float(30 * EPS))
    assert_same_gradients(got[2], want[2])


@pytest.mark.parametrize("level", ["hidden", "logits"])
def test_a_temperature_counts_in_policy_reference_and_old_policy(level):
    stock, ours = stock_and_ours(temperature=0.7, num_iterations=2)
    use_logitless(ours, level=level)
    batch = example(old=False)
    want, got = loss_and_gradient(stock, batch), loss_and_gradient(ours, batch)
    assert got[0] == pytest.approx(want[0], rel=float(30 * EPS), abs=1e-6)
    assert_same_gradients(got[2], want[2])
    cluster = ours.rl_cluster
    call = {"prompt_tokens": batch.prompt_ids, "completion_tokens": batch.completion_ids}
    old = cluster.get_old_per_token_logps(**call)
    reference = cluster.get_ref_per_token_logps(**call, pad_id=0, eos_id=1)
    # At equal weights the ratio is 1 and the divergence 0, which stock 0.1.7 misses at a temperature.
    _, aux, _ = loss_and_gradient(ours, batch.replace(old_per_token_logps=old, ref_per_token_logps=reference))
    assert aux["is_ratio/max"] == pytest.approx(1, abs=1e-5) and aux["kl"] == pytest.approx(0, abs=1e-6)


def test_reference_and_old_logprobs_are_those_of_stock_tunix(kept):
    stock, ours = kept
    batch = example(empty_row=1)
    call = {"prompt_tokens": batch.prompt_ids, "completion_tokens": batch.completion_ids}
    counts = np.asarray(batch.completion_mask)
    for name, more in (("get_old_per_token_logps", {}), ("get_ref_per_token_logps", {"pad_id": 0, "eos_id": 1})):
        want = np.asarray(getattr(stock.rl_cluster, name)(**call, **more))
        got = np.asarray(getattr(ours.rl_cluster, name)(**call, **more))
        np.testing.assert_allclose(got[counts], want[counts], rtol=1e-5, atol=1e-5)
        assert not got[~counts].any()


def test_the_entropy_is_that_of_the_logits(pair):
    ours = pair(loss_agg_mode="token-mean")[1]
    batch = example()
    model = ours.rl_cluster.actor_trainer.model
    tokens, positions, attended, segments = common.process_ids(batch.prompt_ids, batch.completion_ids, 0, 1)
    logits, _ = model(tokens, positions, None, attended, segment_ids=segments)
    logprobs = jax.nn.log_softmax(np.asarray(logits[:, PROMPT - 1 : -1], np.float64))
    entropy = -np.sum(np.exp(logprobs) * logprobs, axis=-1)
    counts = np.asarray(batch.completion_mask)
    _, aux, _ = loss_and_gradient(ours, batch)
    assert aux["entropy"] == pytest.approx(float(np.asarray(entropy)[counts].mean()), rel=1e-5)
    _, aux, _ = loss_and_gradient(use_logitless(learner(tiny_policy()), entropy=False), batch)
    assert "entropy" not in aux


@pytest.mark.parametrize("named", [dapo_loss, grpo_loss], ids=["dapo", "grpo, whose mean counts empty rows"])
def test_a_named_loss_is_that_loss_of_stock_logprobs(kept, named):
    name = named.__name__.removesuffix("_loss")
    stock = kept[0]
    ours = use_logitless(learner(tiny_policy(), beta=0.05), loss=name, loss_options={"clip_high": 0.4})
    batch = example(empty_row=3)
    graph, state = nnx.split(stock.rl_cluster.actor_trainer.model)
    logprobs = common.compute_per_token_logps(graph, state, batch.prompt_ids, batch.completion_ids, 0, 1)
    want = named(
        logprobs,
        batch.old_per_token_logps,
        batch.advantages,
        batch.completion_mask,
        clip_high=0.4,
        kl="k3",
        kl_coef=0.05,
        ref_logprobs=batch.ref_per_token_logps,
    ).loss
    assert loss_and_gradient(ours, batch)[0] == pytest.approx(float(want), rel=1e-5)


@pytest.mark.parametrize(("algorithm", "theirs"), [("grpo", 20.0), ("gspo-token", 10.0)])
def test_log_ratios_are_bounded_further_out_than_by_stock_tunix(algorithm, theirs):
    stock, ours = stock_and_ours(loss_algo=algorithm)
    use_logitless(ours)
    batch = example()
    far = batch.replace(old_per_token_logps=batch.old_per_token_logps - 30.0)
    _, aux, _ = loss_and_gradient(ours, far)
    assert float(aux["is_ratio/max"]) > np.exp(25.0)
    _, aux, _ = loss_and_gradient(stock, far)
    assert float(aux["is_ratio/max"]) == pytest.approx(np.exp(theirs), rel=1e-5)


def audited(made, batch):
    program = step_program(made.rl_cluster.actor_trainer, batch)
    count = batch.completion_ids.size
    return audit(program.update, *program.arguments, vocab_size=V, num_tokens=count, differentiate=())


@pytest.mark.parametrize("old", [False, True], ids=["on policy", "off policy"])
def test_no_update_holds_logits_and_stock_tunix_does(kept, old):
    stock, ours = kept
    batch = example(old=old)
    assert not audited(stock, batch).ok
    report = audited(ours, batch)
    assert report.ok, str(report)


def test_the_log_probabilities_of_reference_and_old_policy_hold_no_logits(kept):
    ours = kept[1]
    batch = example()
    cluster = ours.rl_cluster

    def both(prompts, completions):
        old = cluster.rollout.get_per_token_logps(prompts, completions)
        return old + cluster.inference_worker.get_ref_per_token_logps(prompts, completions, 0, 1)

    count = batch.completion_ids.size
    report = audit(both, batch.prompt_ids, batch.completion_ids, vocab_size=V, num_tokens=count)
    assert report.ok, str(report)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_found_where_tunix_keeps_it(tied):
    model = tiny_policy(tied=tied).model
    head = head_of(model)
    assert (head.layout, head.weight.shape) == (("VD", (V, 16)) if tied else ("DV", (16, V)))
    tokens = jnp.arange(3, 11)[None]
    inputs = {"positions": jnp.arange(8)[None], "attention_mask": jnp.tril(jnp.ones((1, 8, 8), bool))}
    logits, _ = model(tokens, cache=None, **inputs)
    states = hidden_states(model, tokens, **inputs)
    again = states @ (head.weight.T if tied else head.weight)
    np.testing.assert_allclose(again, logits, rtol=1e-5, atol=1e-5)
    assert not nnx.state(model, nnx.Intermediate), "the model itself keeps no states"


WIDE = 32_768


def lora_learner(**options):
    policy = tiny_policy(vocab_size=WIDE)
    mesh = make_mesh({"fsdp": 1, "tp": 1})
    adapted = add_lora(policy.model, LoraConfig(rank=2, alpha=4.0), mesh, 0)
    return learner(type(policy)(adapted, policy.tokenizer, policy.template, WIDE), **options)


def test_with_lora_the_adapters_alone_are_trained_and_the_frozen_head_costs_nothing():
    stock, ours = lora_learner(), lora_learner()
    use_logitless(ours)
    batch = near_policy(stock)
    want, got = (loss_and_gradient(made, batch, nnx.LoRAParam) for made in (stock, ours))
    assert got[0] == pytest.approx(want[0], rel=float(30 * EPS))
    assert_same_gradients(got[2], want[2])
    before = dict(nnx.to_flat_state(nnx.state(ours.rl_cluster.actor_trainer.model, nnx.Param)))
    kept = {path: np.asarray(value[...]) for path, value in before.items()}
    ours.train(batches(2))
    after = dict(nnx.to_flat_state(nnx.state(ours.rl_cluster.actor_trainer.model, nnx.Param)))
    changed = {path for path, value in after.items() if not np.array_equal(value[...], kept[path])}
    assert changed and all("lora" in str(path) for path in changed)
    memory = step_memory(step_program(ours.rl_cluster.actor_trainer, example()))
    assert memory["temp"] < WIDE * 16 * 4, f"{memory}: room for a gradient of the head"


def test_a_head_with_adapters_is_refused():
    policy = tiny_policy(tied=False)
    adapted = add_lora(
        policy.model, LoraConfig(rank=2, modules=".*(lm_head|q_proj)"), make_mesh({"fsdp": 1, "tp": 1}), 0
    )
    with pytest.raises(NotImplementedError, match="LoRA parameters of its own"):
        head_of(adapted)


@pytest.mark.parametrize("level", ["hidden", "logits"])
def test_supervised_updates_are_those_of_stock_tunix(level):
    from logitless.train.config import DataConfig
    from logitless.train.data import Problems

    problems, losses, states = Problems(DataConfig(), 0), [], []
    for own in (False, True):
        policy = tiny_policy()
        trainer = sft_trainer(policy)
        trainer.with_gen_model_input_fn(model_inputs)
        if own:
            use_logitless(trainer, level=level)
        history = []

        def save(step, *_, trainer: Any = trainer, history=history, **__):
            if step == len(history) + 1:
                history.append(float(trainer._prev_buffered_train_metrics.loss))

        trainer.checkpoint_manager.save = save  # pyright: ignore[reportAttributeAccessIssue]
        trainer.train(labelled_rows(problems.batch(i, 8), "{question}", policy.tokenizer, 9) for i in range(5))
        losses.append(history)
        states.append(dict(nnx.to_flat_state(nnx.state(policy.model))))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    for path, want in states[0].items():
        np.testing.assert_allclose(states[1][path][...], want[...], rtol=1e-3, atol=1e-5, err_msg=str(path))


class Embedding(nnx.Module):
    def __init__(self):
        self.input_embedding = nnx.Param(jax.random.normal(jax.random.key(0), (V, 8)))


class OneBefore(nnx.Module):
    """Predicts each token from the one before it: a model in which documents of a packed row cannot mix."""

    def __init__(self):
        self.embedder = Embedding()

    def __call__(self, tokens, positions, cache, attention_mask=None, output_hidden_states=False, segment_ids=None):
        states = jnp.sin(self.embedder.input_embedding[...][tokens] * 3)
        if output_hidden_states:
            self.sow(nnx.Intermediate, "all_hidden_states", states)
        return states @ self.embedder.input_embedding[...].T, None


@pytest.mark.parametrize("level", ["hidden", "logits"])
def test_packed_rows_have_the_logprobs_of_their_documents_in_the_places_of_their_tokens(level):
    apart = example(rows=2, old=False, ref=False)
    model, how = OneBefore(), TokenOptions(level)
    want = token_statistics(how, model, apart, (0, 1), temperature=1.0).logprobs
    rows = [
        np.concatenate([p, c]) for p, c in zip(*map(np.asarray, (apart.prompt_ids, apart.completion_ids)), strict=True)
    ]
    packed = apart.replace(
        prompt_ids=jnp.zeros((1, 0), jnp.int32),
        completion_ids=jnp.asarray(np.concatenate(rows)[None]),
        segment_ids=jnp.repeat(jnp.array([[1, 2]]), len(rows[0]), axis=1),
        segment_positions=jnp.tile(jnp.arange(len(rows[0])), 2)[None],
    )
    got = token_statistics(how, model, packed, (0, 1), temperature=1.0).logprobs
    assert got.shape == packed.completion_ids.shape and got[0, 0] == 0
    np.testing.assert_allclose(got.reshape(2, -1)[:, PROMPT:], want, rtol=1e-5)


def test_over_a_mesh_of_devices_the_loss_is_the_same():
    one = use_logitless(learner(tiny_policy(vocab_size=208)))
    mesh = make_mesh({"fsdp": 4, "tp": 2})
    many = learner(tiny_policy(vocab_size=208), mesh=mesh)
    use_logitless(many, sharding=HeadSharding(mesh, tokens=("fsdp",), vocab=("tp",)))
    batch = example(rows=8)
    want = loss_and_gradient(one, batch)
    with mesh:
        got = loss_and_gradient(many, batch)
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    assert_same_gradients(got[2], want[2], steps=200)


class TestBadInput:
    def test_an_unknown_version(self, kept, monkeypatch):
        made = kept[0]
        real = importlib.metadata.version
        fake = {"google-tunix": "0.3.0"}
        monkeypatch.setattr("logitless.integrations.versions.version", lambda name: fake.get(name) or real(name))
        with pytest.raises(
            NotImplementedError, match=r"google-tunix 0\.3\.0 is installed.*pip install google-tunix==0\.1\.7"
        ):
            use_logitless(made)

    def test_no_tunix(self, monkeypatch):
        def missing(name):
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr("logitless.integrations.versions.version", missing)
        with pytest.raises(ImportError, match="pip install google-tunix==0.1.7"):
            use_logitless(None)

    def test_another_trainer(self):
        with pytest.raises(NotImplementedError, match=r"got builtins\.dict; needed is a GRPOLearner"):
            use_logitless({})

    def test_a_cluster_without_a_learner(self):
        made = learner(tiny_policy())
        made.rl_cluster.actor_trainer.rl_metrics_to_log = {}
        with pytest.raises(ValueError, match="build the GRPOLearner first"):
            use_logitless(made.rl_cluster)

    def test_a_learner_that_logs_more_than_the_loss_gives(self):
        made = learner(tiny_policy())
        made.rl_cluster.actor_trainer.rl_metrics_to_log |= {"pg_loss": np.mean}
        with pytest.raises(NotImplementedError, match=r"does not give \(pg_loss\); supported is tunix"):
            use_logitless(made)

    @pytest.mark.parametrize(("name", "value"), [("policy_loss_fn", "mine"), ("loss_algo", "gspo")])
    def test_a_loss_that_would_be_replaced_unseen(self, name, value):
        config = GRPOConfig()
        vars(config)[name] = value
        with pytest.raises(NotImplementedError, match=f"{name}='{value}'"):
            options_of_tunix(config, 8, has_reference=True)

    def test_options_without_their_loss(self, kept):
        with pytest.raises(ValueError, match="loss_options need loss="):
            use_logitless(kept[0], loss_options={"clip_high": 0.3})

    @pytest.mark.parametrize(("name", "value"), [("loss", "gpro"), ("level", "hiden")])
    def test_unknown_names(self, kept, name, value):
        with pytest.raises(ValueError, match=f"{name}='{value}'"):
            use_logitless(kept[0], **{name: value})

    def test_a_policy_loss_for_a_supervised_trainer(self):
        with pytest.raises(ValueError, match="has no meaning for a PeftTrainer"):
            use_logitless(sft_trainer(tiny_policy()), loss="grpo")

    def test_rounded_logits_at_the_level_of_logits(self, kept):
        with pytest.raises(ValueError, match="logits_dtype has no meaning with level='logits'"):
            use_logitless(kept[0], level="logits", logits_dtype="bfloat16")

    def test_ready_made_rollout_weights(self, kept):
        made = kept[1]
        batch = example().replace(sampler_is_weights=jnp.ones((6, COMPLETION)))
        with pytest.raises(NotImplementedError, match="sampler_is_weights"):
            loss_and_gradient(made, batch)

    def test_a_divergence_without_its_reference(self, kept):
        made = kept[1]
        with pytest.raises(ValueError, match="needs ref_per_token_logps"):
            loss_and_gradient(made, example(ref=False))

    def test_a_model_without_a_head(self):
        with pytest.raises(NotImplementedError, match=r"neither lm_head\.w nor embedder\.input_embedding"):
            head_of(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))

    def test_a_model_without_hidden_states(self):
        with pytest.raises(NotImplementedError, match="takes no output_hidden_states=True"):
            hidden_states(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.zeros((1, 2), jnp.int32))
