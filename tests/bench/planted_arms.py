"""Arms that a bench must refuse or survive, given to it as `planted_arms:name`."""

import os
import time

import jax

from logitless.bench.cases import plain_loss


def right(*arrays, layout):
    return plain_loss(*arrays, layout=layout)[0]


def wrong_sign(hidden, lm_head, *rest, layout):
    """The right loss, with d_lm_head of the wrong sign."""

    @jax.custom_vjp
    def turned(lm_head):
        return lm_head

    turned.defvjp(lambda lm_head: (lm_head, None), lambda _, grad: (-grad,))
    return plain_loss(hidden, turned(lm_head), *rest, layout=layout)[0]


def wrong_loss(*arrays, layout):
    return plain_loss(*arrays, layout=layout)[0] + 0.01


def dies(*arrays, layout):
    os._exit(7)


def hangs(*arrays, layout):
    time.sleep(600)


def raises(*arrays, layout):
    raise RuntimeError("this arm is broken")
