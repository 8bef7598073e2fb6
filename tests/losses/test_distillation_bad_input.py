"""What the distillation losses refuse, and what they say."""

from typing import Any

import jax.numpy as jnp
import pytest

from logitless import distillation_loss, linear_distillation_loss

GOOD: dict[str, Any] = {
    "student_hidden": jnp.ones((2, 3, 4)),
    "student_head": jnp.ones((4, 7)),
    "teacher_hidden": jnp.ones((2, 3, 5)),
    "teacher_head": jnp.ones((5, 7)),
    "labels": jnp.zeros((2, 3), jnp.int32),
}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"student_hidden": jnp.ones((2, 3, 4), jnp.int32)}, TypeError, "student_hidden is int32"),
        ({"teacher_hidden": jnp.ones((2, 3, 5), bool)}, TypeError, "teacher_hidden is bool"),
        ({"labels": jnp.zeros((2, 3))}, TypeError, "labels is float32"),
        ({"labels": jnp.zeros(3, jnp.int32)}, ValueError, r"labels of shape \(3,\), student_hidden of shape \(2, 3, 4"),
        ({"weights": jnp.zeros((3, 2))}, ValueError, r"weights of shape \(3, 2\), student_hidden of shape \(2, 3, 4\)"),
        ({"teacher_hidden": jnp.ones((3, 2, 5))}, ValueError, r"\(2, 3, 4\), teacher_hidden of shape \(3, 2, 5\)"),
        ({"teacher_head": jnp.ones((5, 8))}, ValueError, r"student_head of shape \(4, 7\).*of shape \(5, 8\).*7 and 8"),
        ({"student_head": jnp.ones((7, 4))}, ValueError, r'lm_head of shape \(7, 4\).*layout="VD" would fit'),
        ({"teacher_head": jnp.ones((7, 5))}, ValueError, r"\(teacher\): got .*of shape \(7, 5\)"),
        ({"teacher_layout": "VD"}, ValueError, r"\(teacher\): got .*layout=\"DV\" would fit"),
        ({"teacher_bias": jnp.ones(5)}, ValueError, r"\(teacher\): got bias of shape \(5,\)"),
        ({"kind": "forward"}, ValueError, "kind='forward' is unknown.*did you mean 'forward_kl'"),
        ({"kind": "jsd", "beta": 1.0}, ValueError, "beta=1; it must be above 0 and below 1"),
        ({"kind": "jsd", "beta": jnp.ones(2)}, ValueError, r"beta of shape \(2,\)"),
        ({"beta": 0.1}, ValueError, "beta=0.1 has no meaning with kind='forward_kl'"),
        ({"temperature": 0.0}, ValueError, "temperature=0; it must be a finite number above 0"),
        ({"teacher_softcap": -1.0}, ValueError, r"\(teacher\): softcap=-1"),
        ({"reduction": "avg"}, ValueError, "reduction='avg' is unknown"),
        ({"implementation": "chunk"}, ValueError, "implementation='chunk' is unknown.*did you mean 'chunked'"),
        ({"block_sizes": {"block_m": 8}}, ValueError, "block_m"),
    ],
)
def test_bad_input_is_refused_with_what_was_given_and_what_is_needed(change, error, says):
    with pytest.raises(error, match=says):
        linear_distillation_loss(**{**GOOD, **change})


def test_logits_level_refusals():
    with pytest.raises(ValueError, match=r"student_logits of shape \(2, 5\), teacher_logits of shape \(2, 6\)"):
        distillation_loss(jnp.ones((2, 5)), jnp.ones((2, 6)))
    with pytest.raises(ValueError, match=r"student_logits of shape \(2, 5\), teacher_logits of shape \(3, 5\)"):
        distillation_loss(jnp.ones((2, 5)), jnp.ones((3, 5)))
    with pytest.raises(ValueError, match="empty vocabulary"):
        distillation_loss(jnp.ones((2, 0)), jnp.ones((2, 0)))
    with pytest.raises(TypeError, match="teacher_logits is int32"):
        distillation_loss(jnp.ones((2, 5)), jnp.ones((2, 5), jnp.int32))
