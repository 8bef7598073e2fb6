"""Small projects, written for these tests, one for each kind of answer and each trap."""

from pathlib import Path

LOGITS = """\
import torch
import torch.nn.functional as F


def causal_loss(logits, labels):
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels[..., 1:].reshape(-1))
"""

HOLDS = """\
import torch


def linear_loss(x, w, y):
    scores = x @ w.t()
    lse = torch.logsumexp(scores, dim=-1)
    return (lse - scores.gather(-1, y.unsqueeze(-1)).squeeze(-1)).mean()
"""

CHUNKED = """\
import torch
import torch.nn.functional as F


def chunked_loss(hidden, weight, labels, size=1024):
    total = 0.0
    for start in range(0, hidden.shape[0], size):
        logits = torch.nn.functional.linear(hidden[start : start + size], weight)
        total = total + F.cross_entropy(logits, labels[start : start + size], reduction="sum")
    return total
"""

SCAN = """\
import jax
import jax.numpy as jnp


def scanned_loss(hidden, head, ids):
    def body(total, piece):
        h, y = piece
        z = jnp.einsum("td,dv->tv", h, head)
        picked = jnp.take_along_axis(z, y[:, None], axis=-1)[:, 0]
        return total + jnp.sum(jax.nn.logsumexp(z, axis=-1) - picked), None

    total, _ = jax.lax.scan(body, 0.0, (hidden.reshape(8, -1, hidden.shape[-1]), ids.reshape(8, -1)))
    return total
"""

CHECKPOINT = """\
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def _piece(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.T, labels)


def checkpointed_loss(hidden, weight, labels):
    return checkpoint(_piece, hidden, weight, labels, use_reentrant=False)
"""

TRITON = """\
import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(X, W, Y, LOSS, n_cols, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    y = tl.load(Y + row)
    best = -float("inf")
    total = 0.0
    picked = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * D + tl.arange(0, D))
        w = tl.load(W + cols[:, None] * D + tl.arange(0, D)[None, :])
        z = tl.dot(x[None, :], tl.trans(w))
        new = tl.maximum(best, tl.max(z))
        total = total * tl.exp(best - new) + tl.sum(tl.exp(z - new))
        picked += tl.sum(tl.where(cols == y, z, 0.0))
        best = new
    tl.store(LOSS + row, best + tl.log(total) - picked)


def kernel_loss(x, w, y):
    loss = torch.empty(x.shape[0], device=x.device)
    _kernel[(x.shape[0],)](x, w, y, loss, w.shape[0], x.shape[1], BLOCK=64)
    return loss.mean()
"""

PALLAS = """\
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def _body(x_ref, w_ref, y_ref, out_ref, *, block):
    z = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    columns = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    picked = jnp.sum(jnp.where(columns == y_ref[...][:, None], z, 0.0), axis=-1)
    out_ref[...] = jnp.log(jnp.sum(jnp.exp(z), axis=-1)) - picked


def pallas_nll(x, w, y):
    call = pl.pallas_call(
        functools.partial(_body, block=128),
        grid=(4,),
        out_shape=jax.ShapeDtypeStruct(y.shape, jnp.float32),
    )
    return call(x, w, y)
"""

STAGES = """\
import torch


def token_logprobs(hidden, lm_head, ids, chunks=4):
    pieces = []
    for h, i in zip(torch.chunk(hidden, chunks), torch.chunk(ids, chunks)):
        z = h @ lm_head.t()
        pieces.append(torch.gather(torch.log_softmax(z, -1), -1, i[..., None])[..., 0])
    return torch.cat(pieces)


def grpo_loss(logprobs, old_logprobs, advantages, lm_head):
    ratio = torch.exp(logprobs - old_logprobs)
    return -torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages).mean()


def train_step_loss(hidden, lm_head, ids, old_logprobs, advantages):
    logprobs = token_logprobs(hidden, lm_head, ids)
    return grpo_loss(logprobs, old_logprobs, advantages, lm_head)
"""

DELEGATES = """\
from elsewhere.kernels import fused_linear_cross_entropy


def my_loss(hidden, weight, labels):
    return fused_linear_cross_entropy(hidden.float(), weight, labels, reduction="mean")
"""

DYNAMIC = """\
import importlib

BUILT = {}
exec("def built_loss(logits, labels):\\n    return logits[labels]", BUILT)


def cross_entropy_by_name(logits, labels, name):
    function = getattr(importlib.import_module("backends"), name)
    return function(logits, labels)


def cross_entropy_from_text(logits, labels, source):
    scope = {}
    exec(source, scope)
    return scope["f"](logits, labels)
"""

IN_PLACE = """\
import torch
import triton
import triton.language as tl


@triton.jit
def _ce(X_ptr, stride, Y_ptr, loss_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    X_ptr += row * stride
    y = tl.load(Y_ptr + row)
    picked = tl.load(X_ptr + y)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(X_ptr + offsets, mask=offsets < n_cols, other=-float("inf"))
    m = tl.max(x)
    d = tl.sum(tl.exp(x - m))
    lse = m + tl.log(d)
    tl.store(X_ptr + offsets, tl.exp(x - lse), mask=offsets < n_cols)
    tl.store(loss_ptr + row, lse - picked)


class InPlaceCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        loss = torch.empty(logits.shape[0], device=logits.device)
        _ce[(logits.shape[0],)](logits, logits.stride(0), labels, loss, logits.shape[1], BLOCK=1024)
        ctx.save_for_backward(logits)
        return loss.mean()

    @staticmethod
    def backward(ctx, grad):
        (d_logits,) = ctx.saved_tensors
        return d_logits * grad, None
"""

FUNCTION = """\
import torch
import torch.nn.functional as F


class ForwardGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, y):
        d_x, d_w, loss = torch.empty_like(x), torch.zeros_like(w), 0.0
        for a in range(0, x.shape[0], 256):
            z = x[a : a + 256] @ w.t()
            p = torch.softmax(z, -1)
            loss = loss + F.cross_entropy(z, y[a : a + 256], reduction="sum")
            d_x[a : a + 256] = p @ w
            d_w.addmm_(p.t(), x[a : a + 256])
        ctx.save_for_backward(d_x, d_w)
        return loss

    @staticmethod
    def backward(ctx, grad):
        d_x, d_w = ctx.saved_tensors
        return d_x * grad, d_w * grad, None


class BackwardGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, y):
        loss = 0.0
        for a in range(0, x.shape[0], 256):
            loss = loss + F.cross_entropy(x[a : a + 256] @ w.t(), y[a : a + 256], reduction="sum")
        ctx.save_for_backward(x, w, y)
        return loss

    @staticmethod
    def backward(ctx, grad):
        x, w, y = ctx.saved_tensors
        p = torch.softmax(x @ w.t(), -1)
        p[torch.arange(p.shape[0]), y] -= 1
        return p @ w * grad, p.t() @ x * grad, None
"""

VJP = """\
import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def blocked_nll(x, w, y, blocks):
    return _forward(x, w, y, blocks)[0]


def _logits(x, w):
    return jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())))


def _forward(x, w, y, blocks):
    def one(i):
        h = jax.lax.dynamic_slice_in_dim(x, i * 8, 8)
        z = _logits(h, w)
        t = jax.lax.dynamic_slice_in_dim(y, i * 8, 8)
        return jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, t[:, None], -1)[:, 0]

    return jax.lax.map(one, jnp.arange(blocks)).reshape(-1), (x, w, y)


def _backward(blocks, residuals, g):
    x, w, y = residuals
    p = jax.nn.softmax(_logits(x, w), -1) * g[:, None]
    return p @ w.T, x.T @ p, None


blocked_nll.defvjp(_forward, _backward)
"""


def write(folder: Path, **files: str) -> Path:
    """Writes files under names in which `__` stands for a slash."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
