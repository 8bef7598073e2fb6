"""What is compared: our options beside theirs, and where a peer's convention differs, both numbers."""

import math
from typing import Any, NamedTuple

import numpy as np
from peer_inputs import V

BOTH = ("TRL", "Liger")


class Difference(NamedTuple):
    """A known difference of convention: the loss that each gives, and whose gradient is finite."""

    ours: float
    theirs: float
    why: str
    finite: bool = True


class Case(NamedTuple):
    """One comparison; a peer without an entry in `differs` must agree in loss and gradients.

    Attributes:
        family: `"policy"`, `"supervised"` or `"preference"`.
        name: row of the table.
        kind: function of ours: `"policy_loss"`, `"cross_entropy"`, `"dft"`, `"dpo"`, ...
        ours: its options.
        theirs: options of each peer.
        inputs: name of the inputs.
        differs: what is known to differ, for each peer.
    """

    family: str
    name: str
    kind: str
    ours: dict[str, Any]
    theirs: dict[str, dict[str, Any]]
    inputs: str
    differs: dict[str, Difference]


def policy(
    name: str,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    inputs: str = "ragged",
    peers: tuple[str, ...] = BOTH,
    **differs: Difference,
) -> Case:
    """TRL and Liger name their options alike."""
    return Case("policy", name, "policy_loss", ours, dict.fromkeys(peers, theirs), inputs, differs)


KL = {"kl": "k3", "kl_coef": 0.04}
GRPO = {"loss_type": "grpo"}
SEQUENCE = {"ratio_level": "sequence"}
THEIR_SEQUENCE = {"importance_sampling_level": "sequence"}
NARROW, THEIR_NARROW = {"clip_low": 3e-4, "clip_high": 4e-4}, {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
WIDE, THEIR_WIDE = {"clip_low": 0.12, "clip_high": 0.17}, {"epsilon_low": 0.12, "epsilon_high": 0.17}
BNPO, THEIR_BNPO = {"aggregation": "token_mean"}, {"loss_type": "bnpo"}
DR_GRPO = {"aggregation": "constant", "max_completion_length": 16}
THEIR_DR_GRPO = {"loss_type": "dr_grpo", "max_completion_length": 16}
DAPO, THEIR_DAPO = {"aggregation": "given_total", "clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}
GSPO, THEIR_GSPO = {**SEQUENCE, **NARROW}, {**GRPO, **THEIR_SEQUENCE, **THEIR_NARROW}
LUSPO = {**SEQUENCE, **NARROW, "aggregation": "sequence_sum"}
THEIR_LUSPO = {**THEIR_SEQUENCE, **THEIR_NARROW, "loss_type": "luspo"}
CISPO = {"surrogate": "cispo", "cispo_max": 1.3, "aggregation": "given_total"}
THEIR_CISPO = {"loss_type": "cispo", "epsilon_high": 1.3}
SAPO, THEIR_SAPO = {"surrogate": "sapo"}, {"loss_type": "sapo"}
VESPO, THEIR_VESPO = {"surrogate": "vespo", "aggregation": "given_total"}, {"loss_type": "vespo"}
VESPO_KNOBS = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.5}
MASK_MODE = {"rollout_mode": "mask", "rollout_min": 0.5, "rollout_max": 2.0}
ANY_RATIO, THEIR_ANY_RATIO = {"surrogate": "none"}, {**GRPO, "epsilon_low": 1.0, "epsilon_high": 1e9}

OVERFLOW = (
    "ours caps the log-ratio at 80 before exp; theirs overflows to inf, and torch's gradient of the branch not taken "
    "is 0 times inf"
)
OUTSIDE = (
    "old and ref NaN outside the mask: theirs multiplies by the mask, so that NaN reaches the loss; ours selects. "
    "TRL's log-probabilities are constant there, so that its gradients stay those of ours"
)
BONUS = "TRL's bonus is the mean over all tokens whatever the loss; ours goes through the loss's own aggregation"
BONUS_TOP = "with `top_entropy_quantile` TRL's bonus is the mean over the tokens kept; ours counts every token"
LUSPO_PADDING = "Liger sums over the padding wherever the token loss is not one number a sequence; TRL masks, as ours"
CISPO_DEFAULT = "the bound on the ratio is 5 by default here, and `epsilon_high` by default there, 0.2"
VESPO_OUTSIDE = (
    "theirs adds log weights outside the mask too; TRL's sampler makes them 0 there, so that only a caller who hands "
    "over other weights sees it"
)

POLICY = [
    policy("grpo", {}, GRPO),
    policy("grpo, k3", KL, {**GRPO, "beta": 0.04}),
    policy(
        "grpo, k3, bias-corrected",
        {**KL, "kl_bias_correction": True},
        {**GRPO, "beta": 0.04, "use_bias_correction_kl": True},
    ),
    policy("grpo, delta 1.5", {"delta": 1.5}, {**GRPO, "delta": 1.5}),
    policy(
        "grpo, delta 1.5, k3, bias-corrected",
        {"delta": 1.5, **KL, "kl_bias_correction": True},
        {**GRPO, "delta": 1.5, "beta": 0.04, "use_bias_correction_kl": True},
    ),
    policy("grpo, temperature 0.7", {"temperature": 0.7}, {**GRPO, "temperature": 0.7}),
    policy("grpo, on-policy", {}, GRPO, "on_policy"),
    policy(
        "grpo, on-policy, clip 0",
        {"clip_low": 0.0, "clip_high": 0.0},
        {**GRPO, "epsilon_low": 0.0, "epsilon_high": 0.0},
        "on_policy",
    ),
    policy("grpo, a masked row", {}, GRPO, "masked_row"),
    policy("grpo, all masked", KL, {**GRPO, "beta": 0.04}, "all_masked"),
    policy("grpo, A = 0 in a row", {}, GRPO, "zero_advantage"),
    policy("grpo, advantages per token", {}, GRPO, "token_advantages", ("TRL",)),
    policy("grpo, rollout weights", {}, {**GRPO, "rollout": ("token", "truncate")}),
    policy(
        "grpo, rollout weights, masked, k3", {**MASK_MODE, **KL}, {**GRPO, "rollout": ("token", "mask"), "beta": 0.04}
    ),
    policy(
        "grpo, rollout weights, sequence", {"rollout_level": "sequence"}, {**GRPO, "rollout": ("sequence", "truncate")}
    ),
    policy(
        "grpo, rollout weights, sequence, masked",
        {"rollout_level": "sequence", **MASK_MODE},
        {**GRPO, "rollout": ("sequence", "mask")},
    ),
    policy(
        "grpo, top half of entropies, k3",
        {"top_entropy_quantile": 0.5, **KL},
        {**GRPO, "top_entropy_quantile": 0.5, "beta": 0.04},
        peers=("TRL",),
    ),
    policy("grpo, no clipping", ANY_RATIO, THEIR_ANY_RATIO),
    policy(
        "grpo, log-ratio 100, A > 0",
        {},
        GRPO,
        "wild_positive",
        TRL=Difference(0.095513254, 0.095513254, OVERFLOW, finite=False),
        Liger=Difference(0.095513254, 0.095513254, OVERFLOW, finite=False),
    ),
    policy(
        "grpo, log-ratio 100, A < 0",
        {},
        GRPO,
        "wild_negative",
        TRL=Difference(1.385155714e33, math.inf, OVERFLOW, finite=False),
        Liger=Difference(1.385155714e33, math.inf, OVERFLOW, finite=False),
    ),
    policy(
        "grpo, NaN outside the mask",
        KL,
        {**GRPO, "beta": 0.04},
        "nan_outside",
        TRL=Difference(0.121787444, math.nan, OUTSIDE),
        Liger=Difference(0.121787444, math.nan, OUTSIDE, finite=False),
    ),
    policy(
        "grpo, entropy bonus",
        {"entropy_coef": 0.01},
        {**GRPO, "entropy_coef": 0.01},
        peers=("TRL",),
        TRL=Difference(0.088500567, 0.088290282, BONUS),
    ),
    policy("bnpo", BNPO, THEIR_BNPO),
    policy("bnpo, k3", {**BNPO, **KL}, {**THEIR_BNPO, "beta": 0.04}),
    policy("bnpo, a masked row", BNPO, THEIR_BNPO, "masked_row"),
    policy("bnpo, all masked", BNPO, THEIR_BNPO, "all_masked"),
    policy("bnpo, entropy bonus", {**BNPO, "entropy_coef": 0.01}, {**THEIR_BNPO, "entropy_coef": 0.01}, peers=("TRL",)),
    policy(
        "bnpo, entropy bonus, top half of entropies",
        {**BNPO, "entropy_coef": 0.01, "top_entropy_quantile": 0.5},
        {**THEIR_BNPO, "entropy_coef": 0.01, "top_entropy_quantile": 0.5},
        peers=("TRL",),
        TRL=Difference(-0.064484380, -0.068285458, BONUS_TOP),
    ),
    policy("dr_grpo", DR_GRPO, THEIR_DR_GRPO),
    policy("dr_grpo, k3", {**DR_GRPO, **KL}, {**THEIR_DR_GRPO, "beta": 0.04}),
    policy("dr_grpo, a masked row", DR_GRPO, THEIR_DR_GRPO, "masked_row"),
    policy("dapo", DAPO, THEIR_DAPO),
    policy("dapo, k3", {**DAPO, **KL}, {**THEIR_DAPO, "beta": 0.04}),
    policy("dapo, total 50", {**DAPO, "total": 50}, {**THEIR_DAPO, "num_items_in_batch": 50}),
    policy("dapo, total 0", {**DAPO, "total": 0}, {**THEIR_DAPO, "num_items_in_batch": 0}),
    policy("dapo, a masked row", DAPO, THEIR_DAPO, "masked_row"),
    policy("dapo, all masked", DAPO, THEIR_DAPO, "all_masked"),
    policy("gspo", GSPO, THEIR_GSPO),
    policy("gspo, clip 0.12 / 0.17", {**SEQUENCE, **WIDE}, {**GRPO, **THEIR_SEQUENCE, **THEIR_WIDE}),
    policy(
        "gspo, k3, bias-corrected",
        {**GSPO, **KL, "kl_bias_correction": True},
        {**THEIR_GSPO, "beta": 0.04, "use_bias_correction_kl": True},
    ),
    policy("gspo, delta 1.05", {**GSPO, "delta": 1.05}, {**THEIR_GSPO, "delta": 1.05}),
    policy("gspo, rollout weights", GSPO, {**THEIR_GSPO, "rollout": ("token", "truncate")}),
    policy("gspo, a masked row", GSPO, THEIR_GSPO, "masked_row"),
    policy("gspo ratio, dapo mean", {**DAPO, **SEQUENCE}, {**THEIR_DAPO, **THEIR_SEQUENCE}),
    policy("luspo", LUSPO, THEIR_LUSPO),
    policy("luspo, a masked row", LUSPO, THEIR_LUSPO, "masked_row"),
    policy(
        "luspo, k3",
        {**LUSPO, **KL},
        {**THEIR_LUSPO, "beta": 0.04},
        Liger=Difference(1.722174168, 1.722099423, LUSPO_PADDING),
    ),
    policy(
        "luspo, token ratios",
        {"aggregation": "sequence_sum"},
        {"loss_type": "luspo"},
        Liger=Difference(1.176006794, 1.333480000, LUSPO_PADDING),
    ),
    policy("cispo", CISPO, THEIR_CISPO),
    policy("cispo, k3", {**CISPO, **KL}, {**THEIR_CISPO, "beta": 0.04}),
    policy("cispo, total 50", {**CISPO, "total": 50}, {**THEIR_CISPO, "num_items_in_batch": 50}),
    policy("cispo, a masked row", CISPO, THEIR_CISPO, "masked_row"),
    policy("cispo, rollout weights", CISPO, {**THEIR_CISPO, "rollout": ("token", "truncate")}),
    policy("cispo, bound 0.2", {**CISPO, "cispo_max": 0.2}, {"loss_type": "cispo"}),
    policy(
        "cispo, default bounds",
        {"surrogate": "cispo", "aggregation": "given_total"},
        {"loss_type": "cispo"},
        TRL=Difference(-0.787414670, -0.147163972, CISPO_DEFAULT),
        Liger=Difference(-0.787414670, -0.147163972, CISPO_DEFAULT),
    ),
    policy("sapo", SAPO, THEIR_SAPO),
    policy(
        "sapo, tau 0.5 / 2",
        {**SAPO, "tau_positive": 0.5, "tau_negative": 2.0},
        {**THEIR_SAPO, "sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0},
    ),
    policy("sapo, k3", {**SAPO, **KL}, {**THEIR_SAPO, "beta": 0.04}),
    policy("sapo, A = 0 in a row", SAPO, THEIR_SAPO, "zero_advantage"),
    policy("sapo, a masked row", SAPO, THEIR_SAPO, "masked_row"),
    policy("vespo", VESPO, THEIR_VESPO),
    policy("vespo, other k and lambda", {**VESPO, **VESPO_KNOBS}, {**THEIR_VESPO, **VESPO_KNOBS}),
    policy("vespo, k3", {**VESPO, **KL}, {**THEIR_VESPO, "beta": 0.04}),
    policy("vespo, A = 0 in a row", VESPO, THEIR_VESPO, "zero_advantage"),
    policy("vespo, a masked row", VESPO, THEIR_VESPO, "masked_row"),
    policy("vespo, rollout weights", VESPO, {**THEIR_VESPO, "rollout": ("token", "truncate")}),
    policy("vespo, rollout weights, masked", {**VESPO, **MASK_MODE}, {**THEIR_VESPO, "rollout": ("token", "mask")}),
    policy(
        "vespo, rollout weights outside the mask",
        VESPO,
        {**THEIR_VESPO, "rollout": ("token", "truncate")},
        "rollout_outside",
        TRL=Difference(-0.645261824, -0.976371527, VESPO_OUTSIDE),
        Liger=Difference(-0.645261824, -0.976371527, VESPO_OUTSIDE),
    ),
]

W = np.linspace(0.5, 2.0, V).astype(np.float32)
NO_LABELS = "torch divides 0 by 0; ours is 0"
CLASS_SMOOTHING = "torch's weights are of classes, and weigh each class within the smoothing; ours are of tokens"


def supervised(
    name: str,
    kind: str,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    inputs: str = "some_ignored",
    differs: Difference | None = None,
) -> Case:
    """Both functions of torch."""
    peers: tuple[str, ...] = ("torch cross_entropy", "torch linear_cross_entropy")
    stated: dict[str, Difference] = {} if differs is None else dict.fromkeys(peers, differs)
    return Case("supervised", name, kind, ours, dict.fromkeys(peers, theirs), inputs, stated)


def sft(name: str, kind: str, loss_type: str, inputs: str = "some_ignored") -> Case:
    """TRL's `SFTTrainer`."""
    return Case("supervised", name, kind, {}, {"TRL": {"loss_type": loss_type}}, inputs, {})


def distill(
    name: str, ours: dict[str, Any], beta: float, inputs: str = "some_ignored", temperature: float = 1.0
) -> Case:
    """Theirs has one name and beta: 0 is the forward KL, 1 the reverse."""
    theirs = {"beta": beta, "temperature": temperature}
    return Case("supervised", name, "distillation", ours, dict.fromkeys(BOTH, theirs), inputs, {})


SUM = {"reduction": "sum"}
SUPERVISED = [
    supervised("cross-entropy", "cross_entropy", {}, {}),
    supervised("cross-entropy, sum", "cross_entropy", SUM, SUM),
    supervised("cross-entropy, smoothing 0.1", "cross_entropy", {"label_smoothing": 0.1}, {"label_smoothing": 0.1}),
    supervised(
        "cross-entropy, smoothing 0.1, sum",
        "cross_entropy",
        {"label_smoothing": 0.1, **SUM},
        {"label_smoothing": 0.1, **SUM},
    ),
    supervised("cross-entropy, weights", "cross_entropy", {"weights": W}, {"weight": W}),
    supervised(
        "cross-entropy, weights, smoothing 0.1",
        "cross_entropy",
        {"weights": W, "label_smoothing": 0.1},
        {"weight": W, "label_smoothing": 0.1},
        differs=Difference(5.675940514, 5.661557198, CLASS_SMOOTHING),
    ),
    supervised(
        "cross-entropy, all ignored", "cross_entropy", {}, {}, "all_ignored", Difference(0.0, math.nan, NO_LABELS)
    ),
    supervised("cross-entropy, all ignored, sum", "cross_entropy", SUM, SUM, "all_ignored"),
    sft("cross-entropy", "cross_entropy", "nll"),
    sft("cross-entropy, all ignored", "cross_entropy", "nll", "all_ignored"),
    sft("DFT", "dft", "dft"),
    sft("DFT, all ignored", "dft", "dft", "all_ignored"),
    distill("distillation, forward KL", {"kind": "forward_kl"}, 0.0),
    distill("distillation, reverse KL", {"kind": "reverse_kl"}, 1.0),
    distill("distillation, JSD 0.5", {"kind": "jsd", "beta": 0.5}, 0.5),
    distill("distillation, JSD 0.2", {"kind": "jsd", "beta": 0.2}, 0.2),
    distill("distillation, forward KL, temperature 2", {"temperature": 2.0}, 0.0, temperature=2.0),
    distill("distillation, JSD 0.5, all ignored", {"kind": "jsd"}, 0.5, "all_ignored"),
]

SMOOTHING = "`label_smoothing` does nothing with loss_type `sigmoid`; ours is that of the cDPO note"
ROBUST = "loss_type `robust` subtracts the flipped term and divides by 1 - 2 s, an unbiased estimate; ours adds it"
EMPTY = "the mean of a completion without tokens: theirs divides 0 by 0, ours is 0"
CERTAIN = "log(1 - p) of a completion of probability 1: theirs is -inf, with a gradient of NaN; ours is bounded"
SIMPO_NLL = "Liger adds the likelihood of the chosen completions by default; ours has none"
KTO_KL = "Liger takes a negative kl as it is; ours, as TRL's, counts it as 0"
ORPO_PROMPT = "TRL's likelihood counts the prompt's tokens (here one a pair); ours is what the caller hands over"


def preference(
    name: str,
    kind: str,
    ours: dict[str, Any],
    trl: dict[str, Any] | None,
    liger: dict[str, Any] | None,
    inputs: str = "ragged",
    **differs: Difference,
) -> Case:
    """`trainer` is their class."""
    theirs = {peer: options for peer, options in (("TRL", trl), ("Liger", liger)) if options is not None}
    return Case("preference", name, kind, ours, theirs, inputs, differs)


BETA = {"beta": 0.1}
DPO = {"trainer": "DPO", **BETA}
SIMPO = {"beta": 2.0, "gamma": 0.5}
TRL_SIMPO = {"trainer": "CPO", "loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}
LIGER_SIMPO = {"trainer": "SimPO", **SIMPO, "compute_nll_loss": False}
TRL_CPO, CPO = {"trainer": "CPO", "loss_type": "sigmoid", **BETA}, {"trainer": "CPO", **BETA}
ORPO, KTO = {"trainer": "ORPO", **BETA}, {"trainer": "KTO", **BETA}
S = {"label_smoothing": 0.2}

PREFERENCE = [
    preference("DPO", "dpo", BETA, {**DPO, "loss_type": "sigmoid"}, DPO),
    preference("DPO, an empty completion", "dpo", BETA, {**DPO, "loss_type": "sigmoid"}, DPO, "empty_row"),
    preference(
        "DPO, smoothing 0.2",
        "dpo",
        {**BETA, **S},
        {**DPO, "loss_type": "sigmoid", **S},
        {**DPO, **S},
        TRL=Difference(0.705044448, 0.712626159, SMOOTHING),
        Liger=Difference(0.705044448, 0.712626159, SMOOTHING),
    ),
    preference(
        "DPO, smoothing 0.2, robust",
        "dpo",
        {**BETA, **S},
        {**DPO, "loss_type": "robust", **S},
        {**DPO, "loss_type": "robust", **S},
        TRL=Difference(0.705044448, 0.725262344, ROBUST),
        Liger=Difference(0.705044448, 0.725262344, ROBUST),
    ),
    preference(
        "DPO, hinge", "dpo", {**BETA, "kind": "hinge"}, {**DPO, "loss_type": "hinge"}, {**DPO, "loss_type": "hinge"}
    ),
    preference("IPO", "ipo", BETA, {**DPO, "loss_type": "ipo"}, None),
    preference("IPO, an empty completion", "ipo", BETA, {**DPO, "loss_type": "ipo"}, None, "empty_row"),
    preference("SimPO", "simpo", SIMPO, TRL_SIMPO, LIGER_SIMPO),
    preference("SimPO, smoothing 0.2", "simpo", {**SIMPO, **S}, {**TRL_SIMPO, **S}, {**LIGER_SIMPO, **S}),
    preference(
        "SimPO, with Liger's default likelihood",
        "simpo",
        SIMPO,
        None,
        {"trainer": "SimPO", **SIMPO},
        Liger=Difference(1.914283872, 7.875061989, SIMPO_NLL),
    ),
    preference(
        "SimPO, an empty completion",
        "simpo",
        SIMPO,
        TRL_SIMPO,
        LIGER_SIMPO,
        "empty_row",
        TRL=Difference(4.920750618, math.nan, EMPTY, finite=False),
        Liger=Difference(4.920750618, math.nan, EMPTY, finite=False),
    ),
    preference("CPO", "cpo", BETA, TRL_CPO, CPO),
    preference(
        "CPO, smoothing 0.2, nll_coef 0.5",
        "cpo",
        {**BETA, **S, "nll_coef": 0.5},
        {**TRL_CPO, **S, "cpo_alpha": 0.5},
        {**CPO, **S, "alpha": 0.5},
    ),
    preference("CPO, a longer prompt", "cpo", BETA, TRL_CPO, CPO, "prompt"),
    preference("ORPO", "orpo", BETA, ORPO, ORPO),
    preference(
        "ORPO, a longer prompt",
        "orpo",
        BETA,
        ORPO,
        ORPO,
        "prompt",
        TRL=Difference(5.933556557, 6.030879021, ORPO_PROMPT),
    ),
    preference(
        "ORPO, an empty completion",
        "orpo",
        BETA,
        ORPO,
        ORPO,
        "empty_row",
        TRL=Difference(6.604702950, math.nan, EMPTY, finite=False),
        Liger=Difference(6.604702950, math.nan, EMPTY, finite=False),
    ),
    preference(
        "ORPO, chosen of probability 1",
        "orpo",
        BETA,
        ORPO,
        ORPO,
        "certain",
        TRL=Difference(0.0, 0.0, CERTAIN, finite=False),
        Liger=Difference(0.0, 0.0, CERTAIN, finite=False),
    ),
    preference("KTO", "kto", {**BETA, "kl": 0.3}, {**KTO, "kl": 0.3}, {**KTO, "kl": 0.3}),
    preference(
        "KTO, kl -3",
        "kto",
        {**BETA, "kl": -3.0},
        {**KTO, "kl": -3.0},
        {**KTO, "kl": -3.0},
        Liger=Difference(0.512094438, 0.511854053, KTO_KL),
    ),
    preference(
        "KTO, weights 1.5 and 0.5",
        "kto",
        {**BETA, "kl": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5},
        {**KTO, "kl": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5},
        None,
    ),
]

CASES = POLICY + SUPERVISED + PREFERENCE
PAIRS = [(case, peer) for case in CASES for peer in case.theirs]
