"""Prints `docs/peers.md`: `python tests/peers/peer_table.py > docs/peers.md`, with the peers installed."""

import importlib.metadata
import subprocess
from pathlib import Path

import numpy as np
from peer_cases import PAIRS
from peer_compare import gradient_gap, ours_of, theirs_of

ROOT = Path(__file__).parents[2]
VERSIONS = ("jax", "torch", "liger-kernel", "trl")


def git(*arguments: str) -> str:
    """What git says of this checkout."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Runs every comparison and prints the page."""
    commit = git("rev-parse", "--short", "HEAD") + (" with changes not committed" if git("status", "-s", "src") else "")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONS)
    print("# Beside the peers\n")
    print(f"logitless at {commit}, {versions}; on the CPU, float32.\n")
    print(INTRODUCTION)
    differences = []
    print("| variant | peer | loss ours | loss theirs | largest gradient difference | |")
    print("|---|---|---|---|---|---|")
    for index, (case, peer) in enumerate(PAIRS):
        ours, theirs = ours_of(index), theirs_of(case, peer)
        stated = case.differs.get(peer)
        verdict = "agrees" if stated is None else "differs, see below"
        gap = gradient_gap(ours, theirs)
        print(f"| {case.name} | {peer} | {ours.loss:.7g} | {theirs.loss:.7g} | {gap:.1e} | {verdict} |")
        if stated is not None:
            finite = all(np.isfinite(x).all() for x in theirs[1:])
            differences.append((case.name, peer, ours.loss, theirs.loss, gap, finite, stated.why))
    print("\n## Differences of convention\n")
    print("Ours is finite in loss and gradients throughout.\n")
    grouped: dict[str, list[str]] = {}
    for name, peer, ours_loss, theirs_loss, gap, finite, why in differences:
        gradients = f"gradients {gap:.1e} apart" if finite else "its gradients hold NaN"
        text = f"{name}, {peer}: ours {ours_loss:.7g}, theirs {theirs_loss:.7g}, {gradients}"
        grouped.setdefault(why, []).append(text)
    for why, texts in grouped.items():
        print(f"* {why}.")
        for text in texts:
            print(f"    * {text}.")


INTRODUCTION = """\
Made by `python tests/peers/peer_table.py > docs/peers.md`. `tests/peers/test_peers.py` (marker `peers`) asserts every
line, and is skipped where the peers are not installed (`pip install torch liger-kernel trl`, torch for the CPU).

Both sides get the same numbers: hidden states `[4, 12, 16]`, 64 columns, ragged masks with a hole, ratios far enough
from 1 that every bound bites. Compared are the loss and its gradients by hidden states and head; a difference of
gradients is relative to the largest element of theirs. "Agrees" means within 1e-5 in both: rounding of float32.

Each peer runs its own code. Liger: its chunked losses, uncompiled. TRL: the loss methods of its trainers, on a stub
that holds what they read, with TRL's chunked op for log-probabilities and entropies (CPO, SimPO and ORPO: its
log-softmax). torch: `cross_entropy` and `linear_cross_entropy`. The rollout weights are what TRL's sampler makes, whose
code cannot be called alone: it was read, and rebuilt in numpy.

Not compared: z-loss, because Liger's is a Triton kernel and the others have none; GSPO-token, k1 and k2, `kl_clamp` and
`segment_ids`, because no peer has them.
"""

if __name__ == "__main__":
    main()
