"""A student that is sure of its token, against 60 decimal digits: float64 jnp has lost the gradient there."""

import decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless import linear_distillation_loss


@pytest.mark.parametrize("kind", ["reverse_kl", "jsd"])
def test_a_student_that_is_sure_keeps_its_gradient(kind):
    # p_student is 1 - 1e-11 and less: its gradient is what the mean over the other columns makes of theirs.
    z_s, z_t = [[26.0, 0.0, 1.0, -2.0], [-1.0, 3.0, 44.0, 1.0]], [[1.0, 0.5, -1.0, 2.0], [0.0, 1.0, 30.0, -2.0]]
    beta = 0.25

    def expected(s: list[float], t: list[float]) -> list[float]:
        with decimal.localcontext() as context:
            context.prec = 60
            p, q = ([decimal.Decimal(x).exp() for x in row] for row in (s, t))
            p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
            share = decimal.Decimal(beta)
            pairs = list(zip(p, q, strict=True))
            if kind == "reverse_kl":
                weigh = [(a / b).ln() for a, b in pairs]
            else:
                weigh = [(1 - share) * (a / (share * b + (1 - share) * a)).ln() for a, b in pairs]
            mean = sum(a * w for a, w in zip(p, weigh, strict=True))
            return [float(a * (w - mean)) for a, w in zip(p, weigh, strict=True)]

    def loss(z):
        eye, sizes = jnp.eye(2), {"block_n": 1, "block_v": 3}
        how = {
            "kind": kind,
            **({"beta": beta} if kind == "jsd" else {}),
            "reduction": "sum",
            "implementation": "chunked",
            "block_sizes": sizes,
        }
        return linear_distillation_loss(eye, z, eye, jnp.asarray(z_t), **how)

    slope = jax.grad(loss)(jnp.asarray(z_s))
    rows = [expected(s, t) for s, t in zip(z_s, z_t, strict=True)]
    np.testing.assert_allclose(slope, rows, rtol=1e-5)
