"""Packages at pinned versions, whose sources were read by hand: the answers, and what stands on the lines they name."""

import os
import pickle
import re
import subprocess
import sys

import pytest

from logitless.source_audit.targets import resolve

LIGER, ZOO, UNSLOTH, CCE = (
    "liger-kernel==0.8.5",
    "unsloth-zoo==2026.10.9",
    "unsloth==2026.10.9",
    "cut-cross-entropy==25.1.1",
)


# In a process of its own, where calls are not checked against their annotations: that takes ten times as long.
READ = """
import pickle, sys
from logitless.source_audit import source_audit
sys.stdout.buffer.write(pickle.dumps(source_audit(sys.argv[1])))
"""


def read_apart(root):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", READ, str(root)], capture_output=True, check=True, env=environment)
    return pickle.loads(done.stdout)


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    """Each package is fetched and read once."""
    cache, done = tmp_path_factory.mktemp("cache"), {}

    def audit(requirement):
        if requirement not in done:
            try:
                target = resolve(requirement, cache)
            except ValueError as error:
                if "cannot be downloaded" not in str(error):
                    raise
                pytest.skip(reason=f"the registry is out of reach: {error}")
            done[requirement] = target, read_apart(target.root)
        return done[requirement]

    return audit


def entry_of(audit, path, name):
    found = [entry for entry in audit.entries if entry.path == path and entry.name == name]
    assert found, f"{path} has no {name}: {[entry.name for entry in audit.entries if entry.path == path]}"
    return found[0]


CHUNKED, LOGITS, KERNEL, STAGES = "head fused, chunked", "logits-level", "head fused, one kernel", "two stages"
ANSWERS = [
    (LIGER, "liger_kernel/ops/cross_entropy.py", "LigerCrossEntropyFunction", LOGITS),
    (LIGER, "liger_kernel/ops/fused_linear_cross_entropy.py", "LigerFusedLinearCrossEntropyFunction", CHUNKED),
    (LIGER, "liger_kernel/ops/fused_linear_cross_entropy.py", "fused_linear_cross_entropy_forward", CHUNKED),
    (LIGER, "liger_kernel/ops/grpo_loss.py", "GrpoLossFunction", LOGITS),
    (LIGER, "liger_kernel/transformers/grpo_loss.py", "triton_grpo_loss", LOGITS),
    (LIGER, "liger_kernel/chunked_loss/grpo_loss.py", "LigerFusedLinearGRPOFunction", CHUNKED),
    (LIGER, "liger_kernel/chunked_loss/grpo_loss.py", "LigerFusedLinearGRPOLoss", CHUNKED),
    (LIGER, "liger_kernel/chunked_loss/dpo_loss.py", "LigerFusedLinearDPOFunction", CHUNKED),
    (LIGER, "liger_kernel/chunked_loss/cpo_loss.py", "LigerFusedLinearCPOFunction", CHUNKED),
    (LIGER, "liger_kernel/chunked_loss/orpo_loss.py", "LigerFusedLinearORPOFunction", CHUNKED),
    (LIGER, "liger_kernel/chunked_loss/simpo_loss.py", "LigerFusedLinearSimPOFunction", CHUNKED),
    (LIGER, "liger_kernel/chunked_loss/kto_loss.py", "LigerFusedLinearKTOFunction", CHUNKED),
    (ZOO, "unsloth_zoo/fused_losses/cross_entropy_loss.py", "unsloth_fused_ce_loss", CHUNKED),
    (ZOO, "unsloth_zoo/fused_losses/cross_entropy_loss.py", "compute_fused_ce_loss", CHUNKED),
    (
        ZOO,
        "unsloth_zoo/loss_utils.py",
        "fused_linear_cross_entropy",
        "delegates to cut_cross_entropy.linear_cross_entropy",
    ),
    (ZOO, "unsloth_zoo/loss_utils.py", "patch_loss_functions.UnslothForCausalLMLoss", LOGITS),
    (ZOO, "unsloth_zoo/rl_replacements.py", "chunked_hidden_states_selective_log_softmax", CHUNKED),
    (ZOO, "unsloth_zoo/rl_replacements.py", "UnslothEfficientGRPO", STAGES),
    (ZOO, "unsloth_zoo/rl_replacements.py", "grpo_accumulated_loss", STAGES),
    (ZOO, "unsloth_zoo/rl_replacements.py", "_UnslothDistillationJSD", CHUNKED),
    (ZOO, "unsloth_zoo/rl_replacements.py", "_distillation_jsd_chunk", CHUNKED),
    (
        LIGER,
        "liger_kernel/ops/cutedsl/ops/fused_linear_cross_entropy.py",
        "fused_linear_cross_entropy_forward",
        CHUNKED,
    ),
    (
        LIGER,
        "liger_kernel/ops/cute/fused_linear_scaled_cross_entropy_tp.py",
        "LigerFusedLinearScaledCrossEntropyNativeTPFunction",
        "unknown",
    ),
    (UNSLOTH, "unsloth/kernels/cross_entropy_loss.py", "Fast_CrossEntropyLoss", LOGITS),
    (UNSLOTH, "unsloth/kernels/cross_entropy_loss.py", "fast_cross_entropy_loss", LOGITS),
    (CCE, "cut_cross_entropy/cce.py", "LinearCrossEntropyFunction", KERNEL),
    (CCE, "cut_cross_entropy/cce.py", "cce_linear_cross_entropy", KERNEL),
    (CCE, "cut_cross_entropy/linear_cross_entropy.py", "linear_cross_entropy", KERNEL),
]


# Reading all of unsloth, 900,000 lines, takes the better part of a minute on a busy machine.
def _slow(requirement):
    return [pytest.mark.slow] if requirement == UNSLOTH else []


@pytest.mark.parametrize(
    ("requirement", "path", "name", "verdict"),
    [pytest.param(*answer, marks=_slow(answer[0]), id=f"{answer[0]}:{answer[2]}") for answer in ANSWERS],
)
def test_answer(requirement, path, name, verdict, audits):
    target, audit = audits(requirement)
    entry = entry_of(audit, path, name)
    assert entry.verdict == verdict
    line = (target.root / path).read_text(encoding="utf-8").splitlines()[entry.line - 1]
    assert re.search(rf"\b(?:def|class) {name.rsplit('.', 1)[-1]}\b", line)


LINES = [
    (LIGER, "liger_kernel/ops/cross_entropy.py", "LigerCrossEntropyFunction", "overwrite", r"tl\.store\(X_ptr"),
    (
        LIGER,
        "liger_kernel/ops/fused_linear_cross_entropy.py",
        "fused_linear_cross_entropy_forward",
        "product",
        r"weight\.t\(\)",
    ),
    (
        LIGER,
        "liger_kernel/ops/fused_linear_cross_entropy.py",
        "fused_linear_cross_entropy_forward",
        "loop",
        r"for .* in range",
    ),
    (
        LIGER,
        "liger_kernel/ops/fused_linear_cross_entropy.py",
        "fused_linear_cross_entropy_forward",
        "gradient",
        r"grad_logits_chunk",
    ),
    (LIGER, "chunked_loss/grpo_loss.py", "LigerFusedLinearGRPOFunction", "product", r"hidden_chunk @ weight_chunk"),
    (LIGER, "chunked_loss/grpo_loss.py", "LigerFusedLinearGRPOFunction", "loop", r"^for "),
    (LIGER, "chunked_loss/dpo_loss.py", "LigerFusedLinearDPOFunction", "product", r"input_chunk @ weight\.t\(\)"),
    (LIGER, "chunked_loss/dpo_loss.py", "LigerFusedLinearDPOFunction", "gradient", r"grad_and_value"),
    (ZOO, "loss_utils.py", "fused_linear_cross_entropy", "call", r"linear_cross_entropy\("),
    (ZOO, "rl_replacements.py", "UnslothEfficientGRPO", "gradient", r"grad_and_value"),
    (ZOO, "rl_replacements.py", "UnslothEfficientGRPO", "stage", r"def chunked_hidden_states_selective_log_softmax"),
    (CCE, "cce.py", "cce_linear_cross_entropy", "product", r"tl\.dot\(e, c"),
    (CCE, "cce.py", "cce_linear_cross_entropy", "kernel", r"def _cce_lse_forward_kernel"),
    (CCE, "cce.py", "cce_linear_cross_entropy", "launch", r"kernel\[grid\]"),
]


@pytest.mark.parametrize(("requirement", "path", "name", "what", "pattern"), LINES)
def test_the_line_shows_it(requirement, path, name, what, pattern, audits):
    target, audit = audits(requirement)
    entry = next(one for one in audit.entries if one.path.endswith(path) and one.name == name)
    shown = [one for one in entry.evidence if one.what == what]
    assert shown
    for one in shown:
        line = (target.root / one.path).read_text(encoding="utf-8").splitlines()[one.line - 1].strip()
        assert line == one.text
    assert any(re.search(pattern, one.text) for one in shown)


def test_gradients(audits):
    _, audit = audits(LIGER)
    ops = "liger_kernel/ops/"
    fused = entry_of(audit, f"{ops}fused_linear_cross_entropy.py", "LigerFusedLinearCrossEntropyFunction")
    assert (fused.gradient, fused.overwrites) == ("forward", True)
    logits = entry_of(audit, f"{ops}cross_entropy.py", "LigerCrossEntropyFunction")
    assert (logits.gradient, logits.overwrites) == ("forward", True)
    _, audit = audits(CCE)
    assert entry_of(audit, "cut_cross_entropy/cce.py", "LinearCrossEntropyFunction").gradient == "backward"


def test_an_lm_head_argument_that_is_not_used(audits):
    _, audit = audits(ZOO)
    entry = entry_of(audit, "unsloth_zoo/rl_replacements.py", "UnslothEfficientGRPO")
    assert any("`lm_head`" in note for note in entry.notes)


def test_version_and_hash_are_recorded(audits):
    target, _ = audits(CCE)
    assert target.version == "25.1.1"
    assert re.fullmatch("[0-9a-f]{64}", target.sha256)
