"""The peers, run on the CPU by their own code: Liger's chunked losses, the losses of TRL's trainers, torch's own.

A trainer of TRL is a stub that holds what its loss method reads; the log-probabilities come from TRL's own chunked op.
Only what the comparison needs is set: an option that a stub lacks fails aloud.
"""

import importlib
from collections import defaultdict
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from peer_inputs import Batch, Pairs, make_teacher, rollout_weights

WHY = "the comparison with peers needs torch, liger-kernel and trl: pip install torch liger-kernel trl"
torch = pytest.importorskip("torch", reason=WHY)


class Result(NamedTuple):
    """A loss and its gradients, in the layout of ours: head `[D, V]`."""

    loss: float
    d_hidden: np.ndarray
    d_lm_head: np.ndarray


class Leaves(NamedTuple):
    """Hidden states and the head as torch lays it out, `[V, D]`; both are differentiated."""

    hidden: Any
    weight: Any

    def result(self, loss: Any) -> Result:
        d_hidden, d_weight = torch.autograd.grad(loss, (self.hidden, self.weight))
        return Result(float(loss.detach()), d_hidden.numpy(), d_weight.numpy().T)


def need(name: str) -> Any:
    """A module of a peer; the test is skipped, with the reason, where it is not installed."""
    pytest.importorskip(name.split(".")[0], reason=WHY)
    return importlib.import_module(name)


def leaves_of(hidden: np.ndarray, lm_head: np.ndarray) -> Leaves:
    return Leaves(torch.from_numpy(hidden.copy()).requires_grad_(), torch.from_numpy(lm_head.T.copy()).requires_grad_())


def tensor(x: np.ndarray | None, dtype: Any = None) -> Any:
    return None if x is None else torch.from_numpy(np.array(x)).to(dtype or torch.float32)


def liger_policy(batch: Batch, options: dict[str, Any]) -> Result:
    """`LigerFusedLinearGRPOLoss`, uncompiled."""
    chunked_loss = need("liger_kernel.chunked_loss")
    options = dict(options)
    rollout, total = options.pop("rollout", None), options.pop("num_items_in_batch", None)
    options.setdefault("beta", 0.0)
    loss = chunked_loss.LigerFusedLinearGRPOLoss(compiled=False, use_ref_model=options["beta"] != 0.0, **options)
    leaves = leaves_of(batch.hidden, batch.lm_head)
    value, _ = loss(
        leaves.hidden,
        leaves.weight,
        tensor(batch.targets, torch.int64),
        tensor(batch.mask),
        tensor(batch.advantages),
        ref_per_token_logps=tensor(batch.ref) if options["beta"] != 0.0 else None,
        old_per_token_logps=tensor(batch.old),
        vllm_is_ratio=None if rollout is None else tensor(rollout_weights(batch, *rollout)),
        num_items_in_batch=total,
    )
    return leaves.result(value)


def trl_logprobs(
    hidden: Any, weight: Any, targets: np.ndarray, mask: np.ndarray, temperature: float = 1.0
) -> tuple[Any, Any]:
    """Log-probabilities and entropies of TRL's chunked op: 0 at tokens that do not count, as its models return."""
    chunked_logprob = need("trl.kernels.chunked_logprob")
    counts = tensor(mask, torch.bool)
    outputs = chunked_logprob.ChunkedLogProbFunction.apply(
        hidden[counts], weight, None, tensor(targets, torch.int64)[counts], temperature, 32, None, 1.0, ("entropy",)
    )
    logprobs, entropy = (outputs[0].new_zeros(mask.shape).masked_scatter(counts, x) for x in outputs[:2])
    return logprobs, entropy


class _Accelerator(SimpleNamespace):
    """One process: whatever is gathered is what is there."""

    num_processes = 1
    device = "cpu"
    sync_gradients = True

    def same(self, x: Any, **_: object) -> Any:
        return x

    gather = gather_for_metrics = reduce = pad_across_processes = same


def trl_policy(batch: Batch, options: dict[str, Any]) -> Result:
    """`GRPOTrainer._compute_loss` of one micro-batch."""
    trainer = need("trl.trainer.grpo_trainer").GRPOTrainer
    leaves = leaves_of(batch.hidden, batch.lm_head)
    temperature = options.get("temperature", 1.0)
    rollout = options.get("rollout")
    self = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            *trl_logprobs(leaves.hidden, leaves.weight, batch.targets, batch.mask, temperature),
            None,
        ),
        args=SimpleNamespace(
            use_bias_correction_kl=options.get("use_bias_correction_kl", False),
            delta=options.get("delta"),
            sapo_temperature_pos=options.get("sapo_temperature_pos", 1.0),
            sapo_temperature_neg=options.get("sapo_temperature_neg", 1.05),
            vespo_k_pos=options.get("vespo_k_pos", 2.0),
            vespo_lambda_pos=options.get("vespo_lambda_pos", 3.0),
            vespo_k_neg=options.get("vespo_k_neg", 3.0),
            vespo_lambda_neg=options.get("vespo_lambda_neg", 2.0),
            steps_per_generation=1,
        ),
        loss_type=options["loss_type"],
        importance_sampling_level=options.get("importance_sampling_level", "token"),
        beta=options.get("beta", 0.0),
        epsilon_low=options.get("epsilon_low", 0.2),
        epsilon_high=options.get("epsilon_high", 0.2),
        max_completion_length=options.get("max_completion_length"),
        top_entropy_quantile=options.get("top_entropy_quantile", 1.0),
        entropy_coef=options.get("entropy_coef", 0.0),
        _entropy_bonus_enabled="entropy_coef" in options,
        use_adaptive_entropy=False,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=rollout is not None,
        vllm_importance_sampling_correction=rollout is not None,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=_Accelerator(),
        get_gamma_weights=trainer.get_gamma_weights,
        _metrics={"train": defaultdict(list)},
    )
    self.get_high_entropy_mask = lambda *args: trainer.get_high_entropy_mask(self, *args)
    total = options.get("num_items_in_batch", int(batch.mask.sum()))
    inputs = {
        "prompt_ids": torch.zeros((len(batch.mask), 1), dtype=torch.int64),
        "prompt_mask": torch.ones((len(batch.mask), 1), dtype=torch.int64),
        "completion_ids": tensor(batch.targets, torch.int64),
        "completion_mask": tensor(batch.mask, torch.int64),
        "advantages": tensor(batch.advantages),
        "ref_per_token_logps": tensor(batch.ref),
        "num_items_in_batch": torch.tensor(total),
    }
    if batch.old is not None:
        inputs["old_per_token_logps"] = tensor(batch.old)
    if rollout is not None:
        inputs["importance_sampling_ratio"] = tensor(rollout_weights(batch, *rollout))
    return leaves.result(trainer._compute_loss(self, None, inputs))


def torch_cross_entropy(
    hidden: np.ndarray, lm_head: np.ndarray, labels: np.ndarray, options: dict[str, Any], *, linear: bool
) -> Result:
    """`torch.nn.functional.cross_entropy` of the logits, or `linear_cross_entropy` in chunks."""
    leaves, options = leaves_of(hidden, lm_head), dict(options)
    functional = torch.nn.functional
    if "weight" in options:
        options["weight"] = tensor(options["weight"])
    target = tensor(labels, torch.int64)
    if linear:
        loss = functional.linear_cross_entropy(leaves.hidden, leaves.weight, target, **options)
    else:
        loss = functional.cross_entropy(functional.linear(leaves.hidden, leaves.weight), target, **options)
    return leaves.result(loss)


def distillation(
    peer: str, hidden: np.ndarray, lm_head: np.ndarray, labels: np.ndarray, options: dict[str, Any]
) -> Result:
    """Liger's `LigerFusedLinearJSDLoss` without its likelihood, or the loss function of TRL's `DistillationTrainer`."""
    leaves = leaves_of(hidden, lm_head)
    teacher = [tensor(x) for x in make_teacher(hidden, lm_head)]
    teacher[1] = teacher[1].T.contiguous()
    if peer == "Liger":
        chunked_loss = need("liger_kernel.chunked_loss")
        loss = chunked_loss.LigerFusedLinearJSDLoss(0.0, 1.0, compiled=False, **options)
        return leaves.result(loss(leaves.hidden, leaves.weight, *teacher, tensor(labels, torch.int64)))
    trainer = need("trl.trainer.distillation_trainer")
    value, _, _ = trainer._chunked_divergence_loss(
        leaves.hidden[None],
        teacher[0][None],
        leaves.weight,
        teacher[1],
        tensor(labels != -100, torch.int64)[None],
        **options,
    )
    return leaves.result(value)


def liger_preference(pairs: Pairs, kind: str, options: dict[str, Any]) -> Result:
    """Liger's chunked preference losses, uncompiled."""
    chunked_loss = need("liger_kernel.chunked_loss")
    leaves = leaves_of(pairs.hidden, pairs.lm_head)
    labels = tensor(np.where(pairs.mask != 0, pairs.targets, -100), torch.int64)
    options = dict(options)
    reference = {"ref_input": tensor(pairs.ref_hidden), "ref_weight": leaves.weight.detach()}
    if kind == "KTO":
        kl = options.pop("kl")
        loss = chunked_loss.LigerFusedLinearKTOLoss(compiled=False, use_ref_model=True, **options)
        good = tensor(pairs.desirable, torch.bool)
        return leaves.result(
            loss(leaves.hidden, leaves.weight, labels, preference_labels=good, kl=torch.tensor(kl), **reference)[0]
        )
    loss = getattr(chunked_loss, f"LigerFusedLinear{kind}Loss")(compiled=False, **options)
    return leaves.result(loss(leaves.weight, leaves.hidden, labels, **(reference if kind == "DPO" else {}))[0])


def _trl_outputs(leaves: Leaves, targets: np.ndarray, mask: np.ndarray) -> SimpleNamespace:
    """What a model of TRL returns with `fused_lm_head=True`; fields that feed metrics only are 0."""
    logprobs, entropy = trl_logprobs(leaves.hidden, leaves.weight, targets, mask)
    zeros = torch.zeros_like(logprobs)
    return SimpleNamespace(
        log_probs=logprobs,
        entropy=entropy,
        mean_logits=zeros,
        log_sum_sq_probs=zeros,
        is_top1=zeros.bool(),
        label_mask=tensor(mask, torch.bool),
    )


def trl_supervised(hidden: np.ndarray, lm_head: np.ndarray, labels: np.ndarray, options: dict[str, Any]) -> Result:
    """`SFTTrainer.compute_loss` of one row."""
    trainer = need("trl.trainer.sft_trainer").SFTTrainer
    leaves = leaves_of(hidden, lm_head)
    outputs = _trl_outputs(leaves, np.maximum(labels, 0), labels != -100)
    accelerator = _Accelerator()
    accelerator.parallelism_config = None
    self = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        args=SimpleNamespace(loss_type=options["loss_type"], average_tokens_across_devices=False),
        aux_loss_enabled=False,
        compute_loss_func=None,
        label_smoother=None,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"labels": tensor(labels, torch.int64), "attention_mask": torch.ones(labels.shape)}
    return leaves.result(trainer.compute_loss(self, lambda **_: outputs, inputs))


def trl_preference(pairs: Pairs, kind: str, options: dict[str, Any]) -> Result:
    """The losses of `DPOTrainer`, `KTOTrainer`, `CPOTrainer` (also SimPO) and `ORPOTrainer`."""
    leaves = leaves_of(pairs.hidden, pairs.lm_head)
    if kind in ("CPO", "ORPO"):
        return leaves.result(_trl_without_reference(leaves, pairs, kind, options))
    reference = Leaves(tensor(pairs.ref_hidden), leaves.weight.detach())
    ref_logps = _trl_outputs(reference, pairs.targets, pairs.mask).log_probs.sum(1)
    outputs = _trl_outputs(leaves, pairs.targets, pairs.mask)
    inputs = _trl_inputs(pairs)
    self = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=_Accelerator(),
        beta=options["beta"],
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    if kind == "KTO":
        trainer = need("trl.trainer.kto_trainer").KTOTrainer
        self.calculate_KL, self.loss_type = True, "kto"
        self.desirable_weight = options.get("desirable_weight", 1.0)
        self.undesirable_weight = options.get("undesirable_weight", 1.0)
        kl = torch.full((len(pairs.mask),), options["kl"])
        self._compute_kl_logps = lambda *_: kl
        inputs |= {"label": tensor(pairs.desirable, torch.bool), "ref_logps": ref_logps}
        inputs["ref_KL_logps"] = torch.zeros_like(kl)
    else:
        trainer = need("trl.trainer.dpo_trainer").DPOTrainer
        self.loss_types, self.loss_weights = [options["loss_type"]], [1.0]
        self.f_divergence_type, self.ld_alpha, self.use_weighting = "reverse_kl", None, False
        self.label_smoothing = options.get("label_smoothing", 0.0)
        inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = ref_logps.chunk(2)
    return leaves.result(trainer._compute_loss(self, lambda **_: outputs, inputs, False))


def _trl_inputs(pairs: Pairs) -> dict[str, Any]:
    """Completions behind a prompt of one token, or two where the first token here is not of the completion."""
    first = np.zeros((len(pairs.mask), 1), np.int32)
    return {
        "input_ids": tensor(np.concatenate([first, pairs.targets], 1), torch.int64),
        "attention_mask": tensor(np.concatenate([first + 1, pairs.attention], 1), torch.int64),
        "completion_mask": tensor(np.concatenate([first, pairs.mask], 1), torch.int64),
    }


def _trl_without_reference(leaves: Leaves, pairs: Pairs, kind: str, options: dict[str, Any]) -> Any:
    """`get_batch_loss_metrics`, of a model that gives the logits of our hidden states."""
    if kind == "CPO":
        trainer = need("trl.experimental.cpo.cpo_trainer").CPOTrainer
    else:
        trainer = need("trl.experimental.orpo.orpo_trainer").ORPOTrainer
    # The last logits predict nothing.
    logits = torch.nn.functional.pad(leaves.hidden @ leaves.weight.T, (0, 0, 0, 1))
    inputs = _trl_inputs(pairs)
    batch = {}
    for half, name in enumerate(("chosen", "rejected")):
        ids = inputs["input_ids"].chunk(2)[half]
        batch[f"{name}_input_ids"], batch[f"{name}_attention_mask"] = ids, inputs["attention_mask"].chunk(2)[half]
        batch[f"{name}_labels"] = ids.masked_fill(inputs["completion_mask"].chunk(2)[half] == 0, -100)
    self = SimpleNamespace(
        accelerator=_Accelerator(),
        is_encoder_decoder=False,
        aux_loss_enabled=False,
        padding_value=0,
        pad_token_id=0,
        alpha=0.0,
        label_smoothing=options.get("label_smoothing", 0.0),
        loss_type=options.get("loss_type"),
        beta=options["beta"],
        cpo_alpha=options.get("cpo_alpha", 1.0),
        simpo_gamma=options.get("simpo_gamma", 0.5),
    )
    for name in ("concatenated_inputs", "get_batch_logps"):
        setattr(self, name, getattr(trainer, name))
    for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(trainer, name):
            setattr(self, name, MethodType(getattr(trainer, name), self))

    def model(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(logits=logits)

    return trainer.get_batch_loss_metrics(self, model, batch)[0]
