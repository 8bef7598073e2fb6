"""Where the head is, and which loops cut what it is given."""

import projects
import pytest
from test_verdicts import entries_of

TORCH = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
JAX = "import functools\nimport jax\nimport jax.numpy as jnp\nfrom jax import lax\n"

CASES = {
    "module head": (
        TORCH,
        """\
class Model(nn.Module):
    def __init__(self, d, v):
        super().__init__()
        self.proj = nn.Linear(d, v)
    def forward(self, h, labels):
        logits = self.proj(h)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
""",
        {"Model": "takes hidden states, holds all logits"},
    ),
    "module head lm": (
        TORCH,
        """\
class Model(nn.Module):
    def forward(self, h, labels):
        logits = self.lm_head(h)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
""",
        {"Model": "takes hidden states, holds all logits"},
    ),
    "module head chunk": (
        TORCH,
        """\
class Model(nn.Module):
    def __init__(self, d, v):
        super().__init__()
        self.lm_head = nn.Linear(d, v)
    def forward(self, h, labels):
        total = 0
        for hc, yc in zip(h.chunk(8), labels.chunk(8)):
            total = total + F.cross_entropy(self.lm_head(hc), yc, reduction="sum")
        return total
""",
        {"Model": "head fused, chunked"},
    ),
    "head as arg called chunk": (
        TORCH,
        """\
def chunked_ce(hidden, lm_head, labels):
    losses = []
    for i in range(0, hidden.shape[0], 1024):
        logits = lm_head(hidden[i:i+1024])
        losses.append(F.cross_entropy(logits, labels[i:i+1024], reduction="sum"))
    return torch.stack(losses).sum()
""",
        {"chunked_ce": "head fused, chunked"},
    ),
    "ckpt chunk function": (
        TORCH,
        """\
import torch.utils.checkpoint
def _chunk(h, w, y):
    logits = h @ w.T
    return F.cross_entropy(logits.float(), y, reduction="sum")
def loss_fn(hidden, weight, labels):
    total = hidden.new_zeros(())
    for h, y in zip(hidden.split(512), labels.split(512)):
        total += torch.utils.checkpoint.checkpoint(_chunk, h, weight, y, use_reentrant=False)
    return total
""",
        {"loss_fn": "head fused, chunked"},
    ),
    "partial scan": (
        JAX,
        """\
def _body(head, carry, xs):
    h, y = xs
    logits = h @ head
    lp = jax.nn.log_softmax(logits)
    return carry - jnp.take_along_axis(lp, y[:, None], -1).sum(), None
def scan_loss(hidden, head, targets):
    out, _ = lax.scan(functools.partial(_body, head), 0.0, (hidden, targets))
    return out
""",
        {"scan_loss": "head fused, chunked"},
    ),
    "partial map": (
        JAX,
        """\
def _one(xs, head):
    h, y = xs
    logits = jnp.dot(h, head)
    return jax.nn.logsumexp(logits, -1) - logits[jnp.arange(y.shape[0]), y]
def map_loss(hidden, head, targets):
    return lax.map(functools.partial(_one, head=head), (hidden.reshape(8, -1, 16), targets.reshape(8, -1))).mean()
""",
        {"map_loss": "head fused, chunked"},
    ),
    "layers loop": (
        TORCH,
        """\
def loss(h, layers, w, y):
    for layer in layers:
        h = h + torch.tanh(h @ layer)
    return F.cross_entropy(h @ w.T, y)
""",
        {"loss": "takes hidden states, holds all logits"},
    ),
    "multi head loop": (
        TORCH,
        """\
def mtp_loss(h, heads, y):
    total = 0
    for w in heads:
        total = total + F.cross_entropy(h @ w.T, y)
    return total
""",
        {"mtp_loss": "takes hidden states, holds all logits"},
    ),
    "micro batches": (
        TORCH,
        """\
def train_loss(model, batches, w):
    total = 0
    for batch in batches:
        h = model(batch["input_ids"])
        total = total + F.cross_entropy(h @ w.T, batch["labels"])
    return total
""",
        {"train_loss": "takes hidden states, holds all logits"},
    ),
    "vocab chunks": (
        TORCH,
        """\
def vocab_loss(h, w, y, step=4096):
    lse = torch.full((h.shape[0],), float("-inf"))
    picked = torch.zeros(h.shape[0])
    for v in range(0, w.shape[0], step):
        z = h @ w[v:v+step].T
        lse = torch.logaddexp(lse, torch.logsumexp(z, -1))
        local = y - v
        inside = (local >= 0) & (local < z.shape[1])
        picked = picked + torch.where(inside, z.gather(1, local.clamp(0, z.shape[1]-1)[:, None])[:, 0], 0.0)
    return (lse - picked).mean()
""",
        {"vocab_loss": "head fused, chunked"},
    ),
    "vocab online": (
        JAX,
        """\
def online_loss(h, w, y, step=4096):
    def body(carry, v):
        m, s = carry
        z = h @ lax.dynamic_slice_in_dim(w, v * step, step, axis=0).T
        m2 = jnp.maximum(m, z.max(-1))
        s = s * jnp.exp(m - m2) + jnp.exp(z - m2[:, None]).sum(-1)
        return (m2, s), None
    (m, s), _ = lax.scan(body, (jnp.full(h.shape[0], -1e30), jnp.zeros(h.shape[0])), jnp.arange(w.shape[0] // step))
    target = jnp.sum(h * w[y], -1)
    return (m + jnp.log(s) - target).mean()
""",
        {"online_loss": "head fused, chunked"},
    ),
    "einsum": (
        TORCH,
        """\
def ein_loss(h, w, y):
    z = torch.einsum("bsd,vd->bsv", h, w)
    return F.cross_entropy(z.transpose(1, 2), y)
""",
        {"ein_loss": "takes hidden states, holds all logits"},
    ),
    "einsum chunk": (
        TORCH,
        """\
def ein_loss(h, w, y):
    t = 0.0
    for i in range(8):
        z = torch.einsum("sd,vd->sv", h[i * 64:(i + 1) * 64], w)
        t = t + F.cross_entropy(z, y[i * 64:(i + 1) * 64])
    return t
""",
        {"ein_loss": "head fused, chunked"},
    ),
    "addmm_": (
        TORCH,
        """\
def am_loss(h, w, b, y):
    t = 0.0
    for hc, yc in zip(h.chunk(4), y.chunk(4)):
        z = b.expand(hc.shape[0], -1).clone()
        z.addmm_(hc, w.t())
        t = t + F.cross_entropy(z, yc)
    return t
""",
        {"am_loss": "head fused, chunked"},
    ),
    "addmm_ whole": (
        TORCH,
        """\
def am_loss(h, w, b, y):
    z = torch.addmm(b, h, w.t())
    return F.cross_entropy(z, y)
""",
        {"am_loss": "takes hidden states, holds all logits"},
    ),
    "out=": (
        TORCH,
        """\
def out_loss(h, w, y):
    z = torch.empty(h.shape[0], w.shape[0])
    torch.matmul(h, w.mT, out=z)
    return F.cross_entropy(z, y)
""",
        {"out_loss": "takes hidden states, holds all logits"},
    ),
    "permute": (
        TORCH,
        """\
def perm_loss(h, w, y):
    wt = w.permute(1, 0).contiguous()
    return F.nll_loss(F.log_softmax(h.matmul(wt), dim=-1), y)
""",
        {"perm_loss": "takes hidden states, holds all logits"},
    ),
    "decorator wraps": (
        TORCH,
        """\
import functools
def timed(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        return fn(*args, **kwargs)
    return inner
@timed
def d_loss(h, w, y):
    return F.cross_entropy(h @ w.T, y)
def caller_loss(a, b, c):
    return d_loss(a, b, c)
""",
        {"d_loss": "takes hidden states, holds all logits"},
    ),
    "cond import": (
        TORCH,
        """\
try:
    from fancy import fused_linear_cross_entropy as flce
except ImportError:
    def flce(h, w, y):
        return F.cross_entropy(h @ w.T, y)
def c_loss(h, w, y):
    return flce(h, w, y)
""",
        {"c_loss": "takes hidden states, holds all logits"},
    ),
    "value head": (
        TORCH,
        """\
def value_loss(h, v_head, returns):
    v = (h @ v_head).squeeze(-1)
    return ((v - returns) ** 2).mean()
def ppo_loss(logits, labels, h, v_head, returns, old_logprobs, advantages):
    lp = F.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]
    ratio = torch.exp(lp - old_logprobs)
    v = (h @ v_head).squeeze(-1)
    return -(ratio * advantages).mean() + ((v - returns) ** 2).mean()
""",
        {"value_loss": None, "ppo_loss": "logits-level"},
    ),
    "reward bt": (
        TORCH,
        """\
def reward_loss(h_chosen, h_rejected, v_head):
    c = (h_chosen @ v_head).squeeze(-1)
    r = (h_rejected @ v_head).squeeze(-1)
    return -F.logsigmoid(c - r).mean()
""",
        {"reward_loss": None},
    ),
}


@pytest.mark.parametrize(("head", "text", "verdicts"), CASES.values(), ids=CASES)
def test_case(head, text, verdicts, tmp_path):
    found = entries_of(projects.write(tmp_path, model=head + text))
    assert {name: found[name].verdict if name in found else None for name in verdicts} == verdicts
