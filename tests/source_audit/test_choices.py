"""Implementations that are chosen when the program runs, and what goes by another name."""

import projects
from test_other_products import CASES, JAX, TORCH
from test_verdicts import entries_of

from logitless.source_audit import source_audit

DISPATCH = """\
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


class Reference:
    def __call__(self, x, y, w):
        z = jax.nn.log_softmax(x @ w)
        return -jnp.take_along_axis(z, y[:, None], -1).sum()


def kernel(x_ref, y_ref, w_ref, loss_ref, tile_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        loss_ref[0] = 0.0

    tile_ref[...] += x_ref[...] @ w_ref[...]

    @pl.when(pl.program_id(0) == 3)
    def _():
        picked = jnp.sum(jax.nn.one_hot(y_ref[...], 128) * tile_ref[...])
        loss_ref[0] += jnp.sum(jax.nn.logsumexp(tile_ref[...], -1)) - picked


class Fused(Reference):
    def __call__(self, x, y, w):
        return pl.pallas_call(kernel, grid=(4,), out_shape=jax.ShapeDtypeStruct((1,), jnp.float32))(x, y, w)


IMPLEMENTATIONS = {"xla": Reference()}
try:
    IMPLEMENTATIONS["tpu"] = Fused()
except ImportError:
    pass


def head_loss(x, y, w, implementation=None):
    for name in IMPLEMENTATIONS:
        try:
            return IMPLEMENTATIONS[name](x, y, w)
        except NotImplementedError:
            continue
"""


def test_every_implementation_that_can_be_seen_is_listed(tmp_path):
    entry = entries_of(projects.write(tmp_path, model=DISPATCH))["head_loss"]
    assert entry.verdict == "head fused, one kernel"
    assert any("another path: takes hidden states, holds all logits" in note for note in entry.notes)


def test_an_implementation_that_cannot_be_seen_makes_it_unknown(tmp_path):
    entry = entries_of(projects.write(tmp_path, model=TORCH + CASES["dict dispatch"][1]))["api_loss"]
    assert any("chosen at run time" in note and "pallas_loss" in note for note in entry.notes)
    assert any("the branch that can be followed" in note for note in entry.notes)


def test_a_criterion_chosen_among_classes(tmp_path):
    text = """\
class Fused(nn.Module):
    def forward(self, x, y, w):
        total = 0
        for h, t in zip(x.split(64), y.split(64)):
            total = total + F.cross_entropy(F.linear(h, w), t)
        return total


class Model(nn.Module):
    def __init__(self, d, v):
        super().__init__()
        self.lm_head = nn.Linear(d, v)

    def forward(self, x, y, fuse):
        if fuse:
            criterion = Fused()
        else:
            criterion = nn.CrossEntropyLoss()
        if fuse:
            return criterion(x, y, self.lm_head.weight)
        return criterion(self.lm_head(x), y)
"""
    entry = entries_of(projects.write(tmp_path, model=TORCH + text))["Model"]
    assert entry.verdict == "head fused, chunked"
    assert any("holds all logits" in note for note in entry.notes)


def test_a_product_of_a_kernel_language_is_believed_by_its_name_and_its_output(tmp_path):
    text = """\
import cutlass.cute as cute


@cute.kernel
def _kernel(a, b, c):
    cute.gemm(None, c, a, b, c)


@cute.jit
def _host(a, b, c):
    _kernel(a, b, c).launch(grid=[1, 1, 1])


def run_gemm(a, b, out):
    cute.compile(_host)


def native_loss(x, w, y):
    z = torch.empty(256, w.shape[0])
    total = 0
    for at in range(0, x.shape[0], 256):
        run_gemm(x[at : at + 256], w, z)
        total = total + F.cross_entropy(z, y[at : at + 256])
    return total
"""
    entry = entries_of(projects.write(tmp_path, model=TORCH + text))["native_loss"]
    assert entry.verdict == "head fused, chunked"
    assert any("only its name" in one.note for one in entry.evidence if one.what == "product")


def test_a_head_that_flax_applies_by_the_name_of_a_method(tmp_path):
    text = """\
def tiled_loss(model, params, hidden, labels):
    def body(total, piece):
        h, y = piece
        z = model.apply({"params": params}, h, method="logits_from_hidden_states")
        return total - jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], -1).sum(), None

    return lax.scan(body, 0.0, (hidden, labels))[0]
"""
    assert entries_of(projects.write(tmp_path, model=JAX + text))["tiled_loss"].verdict == "head fused, chunked"


def test_a_tokenizer_decodes_and_is_no_head(tmp_path):
    text = """\
def scored_loss(self, ids, logits, labels):
    texts = self.tokenizer.decode(ids)
    return F.cross_entropy(logits * self.score(texts), labels)
"""
    assert entries_of(projects.write(tmp_path, model=TORCH + text))["scored_loss"].verdict == "logits-level"


def test_a_registered_torch_operator(tmp_path):
    text = """\
@torch.library.custom_op("mine::head_nll", mutates_args=())
def _op(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = x.new_zeros(())
    for at in range(0, x.shape[0], 64):
        total = total + F.cross_entropy(x[at : at + 64] @ w.T, y[at : at + 64])
    return total


def op_loss(x, w, y):
    return torch.ops.mine.head_nll(x, w, y)
"""
    found = {entry.name: entry.verdict for entry in source_audit(projects.write(tmp_path, model=TORCH + text)).entries}
    assert found["_op"] == "head fused, chunked"


def test_a_checkpoint_without_a_loop_says_that_all_logits_are_alive(tmp_path):
    entry = entries_of(projects.write(tmp_path, model=projects.CHECKPOINT))["checkpointed_loss"]
    assert any("no loop" in note for note in entry.notes)


def test_names_of_an_export(tmp_path):
    files = {
        "pkg/__init__.py": "from .losses import *\n",
        "pkg/losses/__init__.py": "from .impl import linear_ce as lce\n\n__all__ = ['lce']\n",
        "pkg/losses/impl.py": "import torch.nn.functional as F\n\n\ndef linear_ce(x, weight, target):\n"
        "    return F.cross_entropy(F.linear(x, weight), target)\n",
        "pkg/model.py": "import torch\nfrom pkg import lce\n\n\nclass Loss(torch.nn.Module):\n"
        "    def __init__(self, v, d):\n        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.zeros(v, d))\n\n"
        "    def forward(self, x, target):\n        return lce(x, self.weight, target)\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert entries_of(tmp_path)["Loss"].verdict == "takes hidden states, holds all logits"


def test_a_chunk_function_that_another_function_hands_out(tmp_path):
    text = """\
KNOWN = {}


def _piece(h, w, y):
    return F.cross_entropy(h @ w.T, y)


def gradient_of(which):
    known = KNOWN.get(which)
    if known is not None:
        return known
    made = torch.func.grad_and_value(_piece, argnums=which)
    KNOWN[which] = made
    return made


def all_pieces(x, w, y):
    step, total = gradient_of((0, 1)), 0
    for at in range(0, x.shape[0], 64):
        d, value = step(x[at : at + 64], w, y[at : at + 64])
        total = total + value
    return total
"""
    found = entries_of(projects.write(tmp_path, model=TORCH + text))
    assert found["all_pieces"].verdict == "head fused, chunked"
    assert found["_piece"].verdict == "head fused, chunked"
    assert any("one chunk at a time" in note for note in found["_piece"].notes)
