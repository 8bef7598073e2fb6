"""One project for each kind of answer: the verdict, and the lines that a reader would open to see it."""

import projects
import pytest

from logitless.source_audit import source_audit

CASES = {
    "logits": (projects.LOGITS, "causal_loss", "logits-level"),
    "holds": (projects.HOLDS, "linear_loss", "takes hidden states, holds all logits"),
    "chunked": (projects.CHUNKED, "chunked_loss", "head fused, chunked"),
    "scan": (projects.SCAN, "scanned_loss", "head fused, chunked"),
    "checkpoint": (projects.CHECKPOINT, "checkpointed_loss", "head fused, chunked"),
    "triton": (projects.TRITON, "kernel_loss", "head fused, one kernel"),
    "triton kernel": (projects.TRITON, "_kernel", "head fused, one kernel"),
    "pallas": (projects.PALLAS, "pallas_nll", "head fused, one kernel"),
    "log-prob stage": (projects.STAGES, "token_logprobs", "head fused, chunked"),
    "loss of log-probs": (projects.STAGES, "grpo_loss", "two stages"),
    "both stages": (projects.STAGES, "train_step_loss", "two stages"),
    "delegates": (projects.DELEGATES, "my_loss", "delegates to elsewhere.kernels.fused_linear_cross_entropy"),
    "getattr": (projects.DYNAMIC, "cross_entropy_by_name", "unknown"),
    "exec": (projects.DYNAMIC, "cross_entropy_from_text", "unknown"),
    "in place": (projects.IN_PLACE, "InPlaceCE", "logits-level"),
    "forward gradient": (projects.FUNCTION, "ForwardGradient", "head fused, chunked"),
    "backward gradient": (projects.FUNCTION, "BackwardGradient", "head fused, chunked"),
    "custom_vjp": (projects.VJP, "blocked_nll", "head fused, chunked"),
}


def entries_of(folder):
    return {entry.name: entry for entry in source_audit(folder).entries}


def lines(entry, what):
    return [one.text for one in entry.evidence if one.what == what]


@pytest.mark.parametrize(("text", "name", "verdict"), CASES.values(), ids=CASES)
def test_verdict(text, name, verdict, tmp_path):
    entry = entries_of(projects.write(tmp_path, model=text))[name]
    assert entry.verdict == verdict
    defined = text.splitlines()[entry.line - 1]
    assert name in defined


PRODUCTS = {
    "holds": (projects.HOLDS, "linear_loss", "scores = x @ w.t()", None),
    "chunked": (projects.CHUNKED, "chunked_loss", "functional.linear(", "for start in range("),
    "scan": (projects.SCAN, "scanned_loss", 'jnp.einsum("td,dv->tv"', "jax.lax.scan(body"),
    "checkpoint": (projects.CHECKPOINT, "checkpointed_loss", "hidden @ weight.T", "checkpoint(_piece"),
    "stages": (projects.STAGES, "grpo_loss", "z = h @ lm_head.t()", "for h, i in zip("),
    "vjp": (projects.VJP, "blocked_nll", "jax.lax.dot_general(", "jax.lax.map(one"),
    "function": (projects.FUNCTION, "ForwardGradient", "z = x[a : a + 256] @ w.t()", "for a in range("),
}


@pytest.mark.parametrize(("text", "name", "product", "loop"), PRODUCTS.values(), ids=PRODUCTS)
def test_the_lines_of_product_and_loop_show_them(text, name, product, loop, tmp_path):
    entry = entries_of(projects.write(tmp_path, model=text))[name]
    assert all(product in line for line in lines(entry, "product"))
    assert lines(entry, "product")
    if loop is None:
        assert [one.note for one in entry.evidence if one.what == "loop"] == [
            "no loop, scan or checkpoint around the product"
        ]
    else:
        assert lines(entry, "loop")
        assert all(loop in line for line in lines(entry, "loop"))


def test_a_kernel_is_shown_with_its_launch(tmp_path):
    entry = entries_of(projects.write(tmp_path, model=projects.TRITON))["kernel_loss"]
    assert any("tl.dot(" in line for line in lines(entry, "product"))
    assert any("def _kernel(" in line for line in lines(entry, "kernel"))
    assert any("_kernel[(x.shape[0],)]" in line for line in lines(entry, "launch"))


def test_where_the_gradient_is_computed(tmp_path):
    found = entries_of(projects.write(tmp_path, model=projects.FUNCTION, other=projects.IN_PLACE))
    assert found["ForwardGradient"].gradient == "forward"
    assert found["ForwardGradient"].kind == "autograd Function"
    assert any("d_x" in line or "d_w" in line for line in lines(found["ForwardGradient"], "gradient"))
    assert found["BackwardGradient"].gradient == "backward"
    assert found["InPlaceCE"].gradient == "forward"


def test_d_logits_over_the_logits(tmp_path):
    found = entries_of(projects.write(tmp_path, model=projects.FUNCTION, other=projects.IN_PLACE))
    assert found["InPlaceCE"].overwrites is True
    assert any("tl.store(X_ptr" in line for line in lines(found["InPlaceCE"], "overwrite"))
    assert found["ForwardGradient"].overwrites is False


def test_a_custom_vjp_is_named_as_one(tmp_path):
    entry = entries_of(projects.write(tmp_path, model=projects.VJP))["blocked_nll"]
    assert (entry.kind, entry.gradient) == ("custom_vjp", "backward")


def test_the_family_of_a_loss(tmp_path):
    found = entries_of(projects.write(tmp_path, model=projects.STAGES, other=projects.CHUNKED))
    assert found["grpo_loss"].family == "policy"
    assert found["token_logprobs"].family == "log-probability"
    assert found["chunked_loss"].family == "cross-entropy"


def test_an_unknown_says_why(tmp_path):
    found = entries_of(projects.write(tmp_path, model=projects.DYNAMIC))
    assert "getattr" in " ".join(found["cross_entropy_by_name"].notes)
    assert "string" in " ".join(found["cross_entropy_from_text"].notes)
