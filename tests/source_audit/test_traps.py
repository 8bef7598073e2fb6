"""What looks like one thing and is another, and files that are hard to read."""

import codecs

import projects
import pytest
from test_verdicts import entries_of, lines

from logitless.source_audit import source_audit

TRAPS = {
    "a head that is not used": (
        """\
import torch.nn.functional as F


def cross_entropy(lm_head, hidden_states, logits, labels):
    return F.cross_entropy(logits, labels)
""",
        "cross_entropy",
        "logits-level",
    ),
    "a product that is not the head's": (
        """\
import torch
import torch.nn.functional as F


def loss_with_penalty(logits, labels, features, projection):
    penalty = (features @ projection).square().mean()
    return F.cross_entropy(logits, labels) + penalty
""",
        "loss_with_penalty",
        "logits-level",
    ),
    "a product before hidden states": (
        """\
import torch.nn.functional as F


def adapted_loss(x, adapter, w, y):
    hidden = F.gelu(x @ adapter)
    total = 0
    for piece, ids in zip(hidden.split(64), y.split(64)):
        total = total + F.cross_entropy(F.linear(piece, w), ids)
    return total
""",
        "adapted_loss",
        "head fused, chunked",
    ),
    "logits under another name": (
        """\
import torch


def energy_nll(hidden_states, targets):
    z = torch.logsumexp(hidden_states, -1)
    return (z - torch.take_along_dim(hidden_states, targets[:, None], -1)[:, 0]).sum()
""",
        "energy_nll",
        "logits-level",
    ),
    "logits that chunks are put together to": (
        """\
import torch
import torch.nn.functional as F


def late_loss(hidden, head, ids):
    pieces = []
    for h in hidden.split(128):
        pieces.append(h @ head.T)
    return F.cross_entropy(torch.cat(pieces), ids)
""",
        "late_loss",
        "takes hidden states, holds all logits",
    ),
    "a loop that cuts nothing": (
        """\
import torch.nn.functional as F


def repeated_loss(hidden, head, ids, steps):
    total = 0
    for _ in range(steps):
        total = total + F.cross_entropy(hidden @ head.T, ids)
    return total
""",
        "repeated_loss",
        "takes hidden states, holds all logits",
    ),
    "vmap is no loop": (
        """\
import jax
import jax.numpy as jnp


def mapped_nll(hidden, head, ids):
    def one(h, i):
        return -jax.nn.log_softmax(h @ head)[i]

    return jax.vmap(one)(hidden, ids).mean()
""",
        "mapped_nll",
        "takes hidden states, holds all logits",
    ),
    "a product written into a buffer": (
        """\
import torch
import torch.nn.functional as F


def buffered_loss(x, w, y, size):
    store = torch.empty((size, w.shape[0]))
    total = 0
    start = 0
    while start < x.shape[0]:
        torch.mm(x[start : start + size], w.t(), out=store)
        total = total + F.cross_entropy(store, y[start : start + size])
        start += size
    return total
""",
        "buffered_loss",
        "head fused, chunked",
    ),
    "a gradient of pieces": (
        """\
import torch
import torch.nn.functional as F


def piece_loss(h, w, y):
    return F.cross_entropy(h @ w.T, y)


def accumulated_loss(hidden, weight, labels):
    def accumulate(h, y):
        (d_h, d_w), value = torch.func.grad_and_value(piece_loss, argnums=(0, 1))(h, weight, y)
        return value

    total = 0
    for h, y in zip(torch.chunk(hidden, 8), torch.chunk(labels, 8)):
        total = total + accumulate(h, y)
    return total
""",
        "accumulated_loss",
        "head fused, chunked",
    ),
}


@pytest.mark.parametrize(("text", "name", "verdict"), TRAPS.values(), ids=TRAPS)
def test_trap(text, name, verdict, tmp_path):
    assert entries_of(projects.write(tmp_path, model=text))[name].verdict == verdict


def test_an_argument_that_is_not_used_is_named(tmp_path):
    entry = entries_of(projects.write(tmp_path, model=TRAPS["a head that is not used"][0]))["cross_entropy"]
    assert any("`lm_head`" in note for note in entry.notes)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\n\n\ndef attention(q, k, v):\n    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v\n",
        "import torch\n\n\ndef route(x, w):\n    p = torch.softmax(x @ w, -1)\n    return p.gather(-1, p.topk(2)[1])\n",
        "import torch.nn.functional as F\n\n\ndef embed(ids, table, w):\n    return F.embedding(ids, table) @ w\n",
        "import torch\nimport torch.nn.functional as F\n\n\ndef contrast(a, b):\n"
        "    z = a @ b.T\n    return F.cross_entropy(z, torch.arange(z.shape[0]))\n",
    ],
    ids=["attention", "router", "embedding", "contrastive"],
)
def test_what_is_no_loss_over_a_vocabulary_is_left_out(text, tmp_path):
    assert not source_audit(projects.write(tmp_path, model=text)).entries


def test_a_loop_in_a_helper_of_another_file(tmp_path):
    projects.write(
        tmp_path,
        pkg____init__="from .api import fused_loss\n",
        pkg__loops="""\
def over_chunks(function, hidden, weight, labels, size):
    total = 0
    for start in range(0, len(hidden), size):
        total = total + function(hidden[start : start + size], weight, labels[start : start + size])
    return total
""",
        pkg__math="""\
import torch.nn.functional as F


def nll_of(h, w, y):
    return F.cross_entropy(h @ w.t(), y, reduction="sum")
""",
        pkg__api="""\
from functools import partial

from . import math as m
from .loops import over_chunks as run


def fused_loss(hidden, weight, labels):
    return run(partial(m.nll_of), hidden, weight, labels, 512)
""",
    )
    entry = entries_of(tmp_path)["fused_loss"]
    assert entry.verdict == "head fused, chunked"
    assert [one.path for one in entry.evidence if one.what == "loop"] == ["pkg/loops.py"]
    assert [one.path for one in entry.evidence if one.what == "product"] == ["pkg/math.py"]
    assert all("for start in range" in line for line in lines(entry, "loop"))


def test_a_base_class_in_another_file(tmp_path):
    projects.write(
        tmp_path,
        base="""\
import torch


class Base(torch.autograd.Function):
    @staticmethod
    def forward(cls, ctx, x, w, y):
        total = 0.0
        for h, t in zip(torch.chunk(x, 4), torch.chunk(y, 4)):
            total = total + cls.loss_of(torch.log_softmax(h @ w.t(), -1).gather(-1, t[:, None]))
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None
""",
        derived="""\
from base import Base


class Derived(Base):
    @staticmethod
    def loss_of(logps):
        return -logps.sum()

    @classmethod
    def forward(cls, ctx, x, w, y):
        return super().forward(cls=cls, ctx=ctx, x=x, w=w, y=y)


derived_loss = Derived.apply
""",
    )
    entry = entries_of(tmp_path)["Derived"]
    assert (entry.verdict, entry.kind) == ("head fused, chunked", "autograd Function")
    assert [one.path for one in entry.evidence if one.what == "loop"] == ["base.py"]


def test_imports_in_a_circle_and_recursion_end(tmp_path):
    projects.write(
        tmp_path,
        a="from b import helper\n\n\ndef a_loss(logits, labels):\n    return helper(logits, labels)\n",
        b="""\
import torch.nn.functional as F
from a import a_loss


def helper(logits, labels, depth=3):
    if depth:
        return helper(logits, labels, depth - 1) + a_loss(logits, labels)
    return F.cross_entropy(logits, labels)
""",
        c="from d import x\n",
        d="from c import x\n",
    )
    assert entries_of(tmp_path)["a_loss"].verdict == "logits-level"


def test_one_file_that_is_no_python_does_not_stop_the_rest(tmp_path):
    projects.write(tmp_path, broken="def f(:\n", good=projects.LOGITS)
    (tmp_path / "nul.py").write_bytes(b"x = 1\0\n")
    audit = source_audit(tmp_path)
    assert [entry.name for entry in audit.entries] == ["causal_loss"]
    assert {one.path for one in audit.unread} == {"broken.py", "nul.py"}
    assert any("line 1" in one.reason for one in audit.unread)


def test_windows_line_ends_and_byte_order_marks_keep_line_numbers(tmp_path):
    (tmp_path / "windows.py").write_bytes(codecs.BOM_UTF8 + projects.HOLDS.replace("\n", "\r\n").encode())
    entry = entries_of(tmp_path)["linear_loss"]
    assert entry.line == 4
    assert lines(entry, "product") == ["scores = x @ w.t()"]


def test_other_encodings(tmp_path):
    text = "# coding: latin-1\n# \u00e9\u00e8\n" + projects.LOGITS
    (tmp_path / "latin.py").write_bytes(text.encode("latin-1"))
    (tmp_path / "undeclared.py").write_bytes("# \u00e9\n".encode("latin-1") + projects.CHUNKED.encode())
    audit = source_audit(tmp_path)
    assert [entry.name for entry in audit.entries] == ["causal_loss"]
    assert [one.path for one in audit.unread] == ["undeclared.py"]


def test_a_file_of_fifty_thousand_lines(tmp_path):
    filler = "".join(f"def f{at}(x, y):\n    z = x + y\n    return z * {at}\n\n\n" for at in range(10_000))
    projects.write(tmp_path, long=filler + projects.CHUNKED)
    audit = source_audit(tmp_path)
    assert audit.lines > 50_000
    (entry,) = audit.entries
    assert (entry.name, entry.verdict) == ("chunked_loss", "head fused, chunked")
    assert "def chunked_loss" in (tmp_path / "long.py").read_text().splitlines()[entry.line - 1]


def test_nothing_is_imported_or_run(tmp_path):
    mark = tmp_path / "ran"
    projects.write(tmp_path, evil=f"open({str(mark)!r}, 'w').close()\n" + projects.LOGITS)
    source_audit(tmp_path)
    assert not mark.exists()
