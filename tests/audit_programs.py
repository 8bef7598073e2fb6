"""What `test_audit.py` judges: a dense program, a blocked one, and blocked ones with one leak planted in each."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

B, T, D, V, BLOCK = 4, 8, 16, 512, 64
N = B * T
# Sizes that a test of sizes alone gets wrong: (N, D, V).
TRAPS = {
    "usual": (32, 16, 512),
    "N == D": (32, 32, 512),
    "D > N": (16, 64, 512),
    "N == V": (256, 16, 256),
    "D == V": (32, 256, 256),
    "N == D == V": (128, 128, 128),
    "prime V": (32, 32, 509),
}


def problem(n=N, d=D, v=V):
    struct = jax.ShapeDtypeStruct
    return struct((n, d), jnp.float32), struct((d, v), jnp.float32), struct((n,), jnp.int32)


def dense(hidden, lm_head, targets):
    logits = hidden @ lm_head
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def _block(lm_head, start, block):
    return jax.lax.dynamic_slice_in_dim(lm_head, start, block, axis=1)


def _starts(lm_head, block):
    return jnp.arange(0, lm_head.shape[1], block)


def _padded(lm_head, block):
    return jnp.pad(lm_head, ((0, 0), (0, -lm_head.shape[1] % block)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocked(hidden, lm_head, targets, block):
    return _blocked_fwd(hidden, lm_head, targets, block)[0]


def _tile(hidden, lm_head, start, block, vocab):
    logits = hidden @ _block(lm_head, start, block)
    return jnp.where((start + jnp.arange(block))[None] < vocab, logits, -jnp.inf)


def _blocked_fwd(hidden, lm_head, targets, block):
    wide = _padded(lm_head, block)

    def step(carry, start):
        lse, picked = carry
        tile = _tile(hidden, wide, start, block, lm_head.shape[1])
        hit = targets[:, None] == (start + jnp.arange(block))[None]
        picked = picked + jnp.where(hit, tile, 0.0).sum(-1)
        return (jnp.logaddexp(lse, jax.nn.logsumexp(tile, axis=-1)), picked), None

    zeros = jnp.zeros(hidden.shape[0])
    (lse, picked), _ = jax.lax.scan(step, (zeros - jnp.inf, zeros), _starts(wide, block))
    return picked - lse, (hidden, lm_head, targets, lse)


def _blocked_bwd(block, residuals, d_logprobs):
    hidden, lm_head, targets, lse = residuals
    wide = _padded(lm_head, block)

    def step(carry, start):
        d_hidden, d_lm_head = carry
        tile = _tile(hidden, wide, start, block, lm_head.shape[1])
        hit = targets[:, None] == (start + jnp.arange(block))[None]
        d_tile = (hit.astype(jnp.float32) - jnp.exp(tile - lse[:, None])) * d_logprobs[:, None]
        d_hidden = d_hidden + d_tile @ _block(wide, start, block).T
        return (d_hidden, jax.lax.dynamic_update_slice(d_lm_head, hidden.T @ d_tile, (0, start))), None

    (d_hidden, d_lm_head), _ = jax.lax.scan(step, (hidden * 0, jnp.zeros(wide.shape)), _starts(wide, block))
    return d_hidden, d_lm_head[:, : lm_head.shape[1]], None


_blocked.defvjp(_blocked_fwd, _blocked_bwd)


def blocked(hidden, lm_head, targets, block=BLOCK) -> Any:
    return _blocked(hidden, lm_head, targets, block)


# Leaks that hide in a program that is blocked otherwise. Each takes and returns what `blocked` does.


def one_hot_float(hidden, lm_head, targets):
    return blocked(hidden, lm_head, targets) + jax.nn.one_hot(targets, lm_head.shape[1]).sum(-1)


def one_hot_bool(hidden, lm_head, targets):
    return blocked(hidden, lm_head, targets) + (targets[:, None] == jnp.arange(lm_head.shape[1])[None]).any(-1).astype(
        jnp.float32
    )


def one_hot_int(hidden, lm_head, targets):
    hot = jax.nn.one_hot(targets, lm_head.shape[1], dtype=jnp.int8)
    return blocked(hidden, lm_head, targets) + jnp.argmax(hot, axis=-1).astype(jnp.float32)


def one_hot_scatter(hidden, lm_head, targets):
    hot = jnp.zeros((hidden.shape[0], lm_head.shape[1])).at[jnp.arange(hidden.shape[0]), targets].set(1.0)
    return blocked(hidden, lm_head, targets) + hot.max(-1)


def transposed(hidden, lm_head, targets):
    return blocked(hidden, lm_head, targets) + jnp.einsum("nd,dv->vn", hidden, lm_head).max(0)


def padded(hidden, lm_head, targets):
    return blocked(hidden, lm_head, targets) + (hidden @ jnp.pad(lm_head, ((0, 0), (0, 128)))).max(-1)


def flattened(hidden, lm_head, targets):
    flat = jnp.sin((hidden @ lm_head).reshape(-1))
    return blocked(hidden, lm_head, targets) + flat.max()


def tiled(hidden, lm_head, targets):
    logits = jnp.einsum("nd,dab->nab", hidden, lm_head.reshape(hidden.shape[1], -1, 128))
    return blocked(hidden, lm_head, targets) + logits.max((1, 2))


def scanned(hidden, lm_head, targets):
    def step(carry, scale):
        return carry + (scale * hidden @ lm_head).max(-1), None

    return blocked(hidden, lm_head, targets) + jax.lax.scan(step, jnp.zeros(hidden.shape[0]), jnp.arange(3.0))[0]


def stacked(hidden, lm_head, targets):
    def step(carry, start):
        return carry, hidden @ _block(lm_head, start, BLOCK)

    tiles = jax.lax.scan(step, 0, _starts(lm_head, BLOCK))[1]
    return blocked(hidden, lm_head, targets) + jnp.sort(tiles, axis=0)[-1].max(-1)


def token_rows(hidden, lm_head, targets):
    rows = jax.lax.map(lambda row: row @ lm_head, hidden)
    return blocked(hidden, lm_head, targets) + jnp.sort(rows)[:, 0]


def loop_buffer(hidden, lm_head, targets):
    def body(i, out):
        return jax.lax.dynamic_update_slice(out, hidden @ _block(lm_head, i * BLOCK, BLOCK), (0, i * BLOCK))

    out = jnp.zeros((hidden.shape[0], lm_head.shape[1]))
    out = jax.lax.stop_gradient(jax.lax.fori_loop(0, lm_head.shape[1] // BLOCK, body, out))
    return blocked(hidden, lm_head, targets) + jnp.sort(out)[:, 0]


def while_loop(hidden, lm_head, targets):
    def body(state):
        i, lse = state
        return i + 1, lse + jax.lax.stop_gradient(jnp.sort(hidden @ lm_head)[:, i])

    start = (0, jnp.zeros(hidden.shape[0]))
    extra = jax.lax.while_loop(lambda s: s[0] < targets[0], body, start)[1]
    return blocked(hidden, lm_head, targets) + jax.lax.stop_gradient(extra)


def branch(hidden, lm_head, targets):
    full = functools.partial(jax.lax.cond, targets[0] > 3, lambda h, w: (h @ w).max(-1), lambda h, w: h.max(-1))
    return blocked(hidden, lm_head, targets) + full(hidden, lm_head)


def jitted(hidden, lm_head, targets):
    return blocked(hidden, lm_head, targets) + jax.jit(dense)(hidden, lm_head, targets)


def rematerialised(hidden, lm_head, targets):
    return jax.checkpoint(dense)(hidden, lm_head, targets)


def mapped(hidden, lm_head, targets):
    return jax.vmap(dense, in_axes=(0, None, 0))(hidden, lm_head, targets)


LEAKS = [one_hot_float, one_hot_bool, one_hot_int, one_hot_scatter, transposed, padded, flattened, tiled, scanned]
LEAKS += [stacked, token_rows, loop_buffer, while_loop, branch, jitted, rematerialised, mapped]
# XLA may fuse these to nothing: they are leaks of the trace alone.
FUSED = [one_hot_float, one_hot_bool, one_hot_int]
