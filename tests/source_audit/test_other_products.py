"""Products that are no head, and implementations that are chosen when the program runs."""

import projects
import pytest
from test_verdicts import entries_of

TORCH = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
JAX = "import functools\nimport jax\nimport jax.numpy as jnp\nfrom jax import lax\n"

CASES = {
    "attention": (
        TORCH,
        """\
def attn(q, k, v, mask):
    p = torch.softmax((q @ k.transpose(-1, -2)).masked_fill(mask, -1e9), -1)
    return p @ v
""",
        {"attn": None},
    ),
    "attention then head": (
        TORCH,
        """\
def lm_loss(x, wq, wk, wv, w_head, y):
    q, k, v = x @ wq, x @ wk, x @ wv
    h = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
    return F.cross_entropy(h @ w_head.T, y)
""",
        {"lm_loss": "takes hidden states, holds all logits"},
    ),
    "attention then logits": (
        TORCH,
        """\
def lm_loss(x, wq, wk, wv, w_head, y):
    outs = []
    for q, k, v in zip((x @ wq).chunk(8), (x @ wk).chunk(8), (x @ wv).chunk(8)):
        outs.append(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
    h = torch.cat(outs)
    return F.cross_entropy(h @ w_head.T, y)
""",
        {"lm_loss": "takes hidden states, holds all logits"},
    ),
    "moe aux": (
        TORCH,
        """\
def moe_aux_loss(x, gate, n):
    p = torch.softmax(x @ gate, -1)
    top, idx = p.topk(2, -1)
    load = F.one_hot(idx, n).float().mean((0, 1))
    return (load * p.mean(0)).sum() * n
""",
        {"moe_aux_loss": None},
    ),
    "z loss": (
        TORCH,
        """\
def router_z_loss(x, gate):
    return torch.logsumexp(x @ gate, -1).square().mean()
""",
        {"router_z_loss": None},
    ),
    "clip": (
        TORCH,
        """\
def clip_loss(image, text, scale):
    z = scale * image @ text.t()
    labels = torch.arange(z.shape[0], device=z.device)
    return (F.cross_entropy(z, labels) + F.cross_entropy(z.t(), labels)) / 2
""",
        {"clip_loss": None},
    ),
    "infonce with mask": (
        TORCH,
        """\
def nce_loss(q, k):
    z = F.normalize(q) @ F.normalize(k).T
    lse = torch.logsumexp(z, -1)
    return (lse - torch.diagonal(z)).mean()
""",
        {"nce_loss": None},
    ),
    "contrastive labels param": (
        TORCH,
        """\
def sup_loss(image, text, labels):
    return F.cross_entropy(image @ text.T, labels)
""",
        {"sup_loss": "takes hidden states, holds all logits"},
    ),
    "two heads distill": (
        TORCH,
        """\
def distill_loss(hs, ws, ht, wt):
    s = F.log_softmax(hs @ ws.T, -1)
    t = F.softmax(ht @ wt.T, -1)
    return F.kl_div(s, t, reduction="batchmean")
""",
        {"distill_loss": "takes hidden states, holds all logits"},
    ),
    "two heads distill chunk": (
        TORCH,
        """\
def distill_loss(hs, ws, ht, wt):
    total = 0
    for a, b in zip(hs.chunk(8), ht.chunk(8)):
        s = F.log_softmax(a @ ws.T, -1)
        t = F.log_softmax(b @ wt.T, -1)
        total = total + (t.exp() * (t - s)).sum()
    return total
""",
        {"distill_loss": "head fused, chunked"},
    ),
    "teacher logits": (
        TORCH,
        """\
def distill_loss(hs, ws, teacher_logits):
    s = F.log_softmax(hs @ ws.T, -1)
    t = F.softmax(teacher_logits, -1)
    return F.kl_div(s, t, reduction="batchmean")
""",
        {"distill_loss": "takes hidden states, holds all logits"},
    ),
    "inplace backward": (
        TORCH,
        """\
class CE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, y):
        lse = torch.logsumexp(logits, -1)
        ctx.save_for_backward(logits, lse, y)
        return (lse - logits.gather(-1, y[:, None])[:, 0]).mean()
    @staticmethod
    def backward(ctx, g):
        logits, lse, y = ctx.saved_tensors
        logits.sub_(lse[:, None]).exp_()
        logits.scatter_add_(-1, y[:, None], -torch.ones_like(y[:, None], dtype=logits.dtype))
        return logits.mul_(g), None
""",
        {"CE": "logits-level"},
    ),
    "dict dispatch": (
        TORCH,
        """\
from ext import pallas_loss
def _ref(h, w, y):
    return F.cross_entropy(h @ w.T, y)
IMPL = {"ref": _ref, "fast": pallas_loss}
def api_loss(h, w, y, implementation="ref"):
    return IMPL[implementation](h, w, y)
""",
        {"api_loss": "unknown"},
    ),
    "dict dispatch2": (
        TORCH,
        """\
def _ref(h, w, y):
    return F.cross_entropy(h @ w.T, y)
def _chunked(h, w, y):
    t = 0
    for a, b in zip(h.chunk(4), y.chunk(4)):
        t = t + F.cross_entropy(a @ w.T, b)
    return t
IMPL = {"ref": _ref, "chunked": _chunked}
def api_loss(h, w, y, implementation):
    return IMPL[implementation](h, w, y)
""",
        {"api_loss": "head fused, chunked"},
    ),
    "registry decorator": (
        TORCH,
        """\
REG = {}
def register(name):
    def deco(f):
        REG[name] = f
        return f
    return deco
@register("ref")
def _ref(h, w, y):
    return F.cross_entropy(h @ w.T, y)
def api_loss(h, w, y, implementation):
    return REG[implementation](h, w, y)
""",
        {"api_loss": "unknown"},
    ),
    "getattr": (
        TORCH,
        """\
import mod
def api_loss(h, w, y, implementation):
    return getattr(mod, implementation)(h, w, y)
""",
        {"api_loss": "unknown"},
    ),
    "getattr fallback": (
        TORCH,
        """\
import mod
def api_cross_entropy(h, w, y, implementation):
    if implementation == "ref":
        return F.cross_entropy(h @ w.T, y)
    return getattr(mod, implementation)(h, w, y)
""",
        {"api_cross_entropy": "unknown"},
    ),
    "CE layer attr": (
        TORCH,
        """\
class Model(nn.Module):
    def __init__(self, d, v):
        super().__init__()
        self.head = nn.Linear(d, v)
        self.loss = nn.CrossEntropyLoss()
    def forward(self, h, labels):
        return self.loss(self.head(h), labels)
""",
        {"Model": "takes hidden states, holds all logits"},
    ),
    "embed attend flax": (
        JAX,
        """\
import optax
import flax.linen as nn
class Model(nn.Module):
    def setup(self):
        self.out = nn.Dense(10)
    def __call__(self, h, y):
        return optax.softmax_cross_entropy_with_integer_labels(self.out(h), y).mean()
""",
        {"Model": "takes hidden states, holds all logits"},
    ),
    "tied": (
        TORCH,
        """\
class Model(nn.Module):
    def __init__(self, v, d):
        super().__init__()
        self.wte = nn.Embedding(v, d)
    def forward(self, ids, y):
        h = self.wte(ids)
        return F.cross_entropy(F.linear(h, self.wte.weight), y)
""",
        {"Model": "takes hidden states, holds all logits"},
    ),
    "seq loop": (
        TORCH,
        """\
def seq_loss(h, w, y):
    t = 0
    for i in range(h.shape[1]):
        t = t + F.cross_entropy(h[:, i] @ w.T, y[:, i])
    return t
""",
        {"seq_loss": "head fused, chunked"},
    ),
    "pallas dot": (
        JAX,
        """\
from jax.experimental import pallas as pl
def _k(x_ref, w_ref, y_ref, o_ref):
    z = pl.dot(x_ref[...], w_ref[...])
    cols = lax.broadcasted_iota(jnp.int32, z.shape, 1)
    picked = jnp.sum(jnp.where(cols == y_ref[...][:, None], z, 0.0), -1)
    o_ref[...] = jnp.log(jnp.sum(jnp.exp(z), -1)) - picked
def k_loss(x, w, y):
    return pl.pallas_call(_k, out_shape=jax.ShapeDtypeStruct(y.shape, jnp.float32))(x, w, y)
""",
        {"k_loss": "head fused, one kernel"},
    ),
    "cute": (
        TORCH,
        """\
import cutlass.cute as cute
@cute.kernel
def _k(mX, mW, mY, mO, tiled_mma):
    acc = cute.make_fragment((64, 64))
    sX = cute.copy(mX); sW = cute.copy(mW)
    cute.gemm(tiled_mma, acc, mX, mW, acc)
    m = cute.exp(acc)
    s = m.reduce()
    t = mY[0]
    mO[0] = cute.log(s) - acc[t]
@cute.jit
def _launch(mX, mW, mY, mO):
    _k(mX, mW, mY, mO, None).launch(grid=[1, 1, 1])
def cute_loss(x, w, y):
    o = torch.empty(x.shape[0])
    _launch(x, w, y, o)
    return o.mean()
""",
        {"cute_loss": "unknown"},
    ),
    "cute opaque": (
        TORCH,
        """\
import cutlass.cute as cute
@cute.kernel
def _k(mX, mW, mY, mO, tiled_mma):
    acc = warp_thing.run(mX, mW)
    cute.arch.inline_asm("wgmma", acc)
    mO[0] = cute.log(cute.exp(acc)) - mX[mY[0]]
@cute.jit
def _launch(mX, mW, mY, mO):
    _k(mX, mW, mY, mO, None).launch(grid=[1, 1, 1])
def cute_loss(x, weight, y):
    o = torch.empty(x.shape[0])
    _launch(x, weight, y, o)
    return o.mean()
""",
        {"cute_loss": "unknown"},
    ),
    "jit lib cuda": (
        TORCH,
        """\
import my_ext
def cuda_linear_cross_entropy(x, weight, y):
    return my_ext.linear_cross_entropy(x, weight, y)
""",
        {"cuda_linear_cross_entropy": "delegates to my_ext.linear_cross_entropy"},
    ),
}


@pytest.mark.parametrize(("head", "text", "verdicts"), CASES.values(), ids=CASES)
def test_case(head, text, verdicts, tmp_path):
    found = entries_of(projects.write(tmp_path, model=head + text))
    assert {name: found[name].verdict if name in found else None for name in verdicts} == verdicts
