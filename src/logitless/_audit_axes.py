"""Where each axis of each traced array comes from: the provenance that `audit` judges by.

Axes that one operation identifies (the two sides of an addition, a contracted pair, a slice and what it was cut from)
fall into one class; a class is named by the argument axes in it. So `[N, V]` logits and a `[D, V]` head differ even
where N == D. Sizes decide only for axes that no argument is tied to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

TOKEN, VOCAB, FEATURE = "token", "vocab", "feature"


class Axes:
    """A union-find over axes, with the splits and merges that reshapes make between classes."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self.merges: list[tuple[int, tuple[int, ...]]] = []

    def fresh(self, shape: Sequence[int]) -> list[int]:
        """New axes, one per dimension, tied to nothing yet."""
        start = len(self._parent)
        self._parent.extend(range(start, start + len(shape)))
        return list(range(start, start + len(shape)))

    def find(self, axis: int) -> int:
        """The representative of an axis's class."""
        while self._parent[axis] != axis:
            self._parent[axis] = self._parent[self._parent[axis]]
            axis = self._parent[axis]
        return axis

    def tie(self, first: int, second: int) -> None:
        """Two axes index the same thing, or one indexes a part of the other."""
        self._parent[self.find(first)] = self.find(second)

    def merge(self, whole: int, parts: Iterable[int]) -> None:
        """A reshape made `whole` out of `parts`, or cut it into them."""
        self.merges.append((whole, tuple(parts)))


@dataclass
class Value:
    """An array in the walk: its shape, its axes, and whether it is an argument under another name."""

    shape: tuple[int, ...]
    axes: list[int]
    is_argument: bool = False


def tie_values(axes: Axes, first: Value, second: Value) -> None:
    """Tie two arrays of one rank position by position; an axis of size 1 says nothing."""
    if len(first.shape) != len(second.shape):
        return
    for a, b, size_a, size_b in zip(first.axes, second.axes, first.shape, second.shape, strict=True):
        if size_a > 1 and size_b > 1:
            axes.tie(a, b)


def reshape_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest factor groups of a reshape, as positions, axes of size 1 left out."""
    left = [i for i, size in enumerate(old) if size != 1]
    right = [i for i, size in enumerate(new) if size != 1]
    if math.prod(old) == 0:
        return []
    groups = []
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        while (size_a := math.prod(old[i] for i in a)) != (size_b := math.prod(new[i] for i in b)):
            if size_a < size_b:
                a.append(left.pop(0))
            else:
                b.append(right.pop(0))
        groups.append((a, b))
    return groups


@dataclass(frozen=True)
class Root:
    """An argument or closed-over constant: what its axes may be is read off its shape and dtype."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: Any

    @property
    def is_index(self) -> bool:
        """Targets, masks and segment ids; a narrow integer is a quantised weight instead."""
        if self.dtype == np.dtype(bool):
            return True
        return bool(jnp.issubdtype(self.dtype, jnp.integer)) and np.dtype(str(self.dtype)).itemsize >= 4


@dataclass
class Sizes:
    """The sizes that speak for a token or a vocabulary axis where provenance is silent."""

    vocab_size: int
    num_tokens: int
    shards: set[int] = field(default_factory=lambda: {1})

    def is_vocab(self, size: int) -> bool:
        """V itself, V padded to a multiple of a power of two up to 1024 or by a tenth, or a shard of these."""
        return any(self._near(size, -(-self.vocab_size // shard)) for shard in self.shards)

    @staticmethod
    def _near(size: int, vocab: int) -> bool:
        if vocab <= size <= 1.1 * vocab:
            return True
        return size > 1 and any(size == -(-vocab // m) * m for m in (8, 16, 32, 64, 128, 256, 512, 1024))

    def is_token(self, size: int) -> bool:
        """N itself, N padded to a multiple of a power of two up to 256, or a shard of these."""
        for shard in self.shards:
            tokens = -(-self.num_tokens // shard)
            if size == tokens or (size > 1 and any(size == -(-tokens // m) * m for m in (8, 16, 32, 64, 128, 256))):
                return True
        return False


class Kinds:
    """Which classes are tokens, which the vocabulary, which features; a class may stay undecided between two."""

    def __init__(self, axes: Axes, roots: Sequence[Root], sizes: Sizes) -> None:
        self._axes, self._sizes = axes, sizes
        self._roots = [root for root in roots if math.prod(root.shape) > 1]
        self._known: dict[int, set[str]] = {}
        self._composite: set[int] = set()
        self._label_arguments()
        self._propagate()

    def _root_classes(self, root: Root) -> list[tuple[int, int]]:
        return [(self._axes.find(a), size) for a, size in zip(root.axes, root.shape, strict=True) if size > 1]

    def _label_arguments(self) -> None:
        tokens = self._index_tokens()
        vocab = self._vocab_classes(tokens)
        beside_vocab = {c for root in self._roots if vocab & (own := self._own(root)) for c in own}
        features = beside_vocab - vocab - tokens
        if not tokens:
            tokens = self._beside_features(vocab, features)
        given_logits = self._logits_rows(vocab, features)
        tokens, features = tokens | given_logits, features - given_logits
        for root in self._roots:
            own = self._root_classes(root)
            rest = [(c, size) for c, size in own if c not in features | vocab]
            if len(rest) < len(own) and math.prod(size for _, size in rest) == self._sizes.num_tokens:
                tokens |= {c for c, _ in rest}
        weights = {
            c
            for root in self._roots
            for c, size in self._root_classes(root)
            if len(root.shape) > 1 and not root.is_index and not self._sizes.is_token(size)
        }
        for c in features | (weights - tokens - vocab):
            self._known[c] = {FEATURE}
        for c in tokens:
            self._known[c] = {TOKEN}
        for c in vocab:
            # Several candidates that cannot be told apart (N == V and no integer argument) may be either.
            decided = c not in tokens and (len(vocab) == 1 or vocab == self._tiled_vocab())
            self._known[c] = {VOCAB} if decided else {TOKEN, VOCAB}

    def _own(self, root: Root) -> set[int]:
        return {c for c, _ in self._root_classes(root)}

    def _index_tokens(self) -> set[int]:
        vocab_size, num_tokens = self._sizes.vocab_size, self._sizes.num_tokens
        tokens = set()
        for root in self._roots:
            if root.is_index and (math.prod(root.shape) == num_tokens or vocab_size not in root.shape):
                tokens |= self._own(root)
        return tokens

    def _vocab_classes(self, tokens: set[int]) -> set[int]:
        sized = {c: size for root in self._roots for c, size in self._root_classes(root)}
        pairs = {(c, size) for root in self._roots for c, size in self._root_classes(root)}
        found = {c for c, size in pairs if size == self._sizes.vocab_size}
        found = found or {c for c in sized if self._sizes.is_vocab(sized[c])} or self._tiled_vocab()
        found = (found - tokens) or found
        if len(found) > 1:
            # A square head: its feature axis is the one that hidden states have too.
            beside_tokens = {c for root in self._roots if tokens & self._own(root) for c in self._own(root)}
            found = (found - beside_tokens) or found
        if len(found) > 1:
            # Tokens that nothing ties to the hidden states: the feature axis is still the one that two matrices share.
            matrices = [self._own(root) for root in self._roots if len(self._own(root)) > 1]
            found = {c for c in found if sum(c in own for own in matrices) < 2} or found
        return found

    def _tiled_vocab(self) -> set[int]:
        """The neighbouring axes of a head given as `[D, V / 128, 128]`."""
        for root in self._roots:
            pairs = self._root_classes(root)
            for i, j in itertools.combinations(range(len(pairs) + 1), 2):
                if j - i < len(pairs) and self._sizes.is_vocab(math.prod(size for _, size in pairs[i:j])):
                    return {c for c, _ in pairs[i:j]}
        return set()

    def _beside_features(self, vocab: set[int], features: set[int]) -> set[int]:
        """Without integer arguments: what stands beside a feature axis in hidden states."""
        owns = [self._own(root) for root in self._roots]
        return {c for own in owns if own & features and not own & vocab for c in own - features}

    def _logits_rows(self, vocab: set[int], features: set[int]) -> set[int]:
        """N rows beside the vocabulary that no argument without a vocabulary shares: logits, not a head."""
        elsewhere = {c for root in self._roots if not vocab & (own := self._own(root)) for c in own}
        rows: set[int] = set()
        for root in self._roots:
            rest = [(c, size) for c, size in self._root_classes(root) if c in features]
            if math.prod(size for _, size in rest) == self._sizes.num_tokens and not elsewhere & {c for c, _ in rest}:
                rows |= {c for c, _ in rest}
        return rows

    def _propagate(self) -> None:
        for _ in range(8):
            before = {c: set(kinds) for c, kinds in self._known.items()}
            for whole_axis, part_axes in self._axes.merges:
                whole, parts = self._axes.find(whole_axis), [self._axes.find(a) for a in part_axes]
                from_parts = {kind for c in parts for kind in self._known.get(c, ())}
                if whole not in self._known and from_parts:
                    self._known[whole] = from_parts
                for c in parts:
                    if c not in self._known and whole in self._known:
                        self._known[c] = set(self._known[whole])
                kinds = [self._known.get(c) for c in parts]
                if ({TOKEN} in kinds and {VOCAB} in kinds) or self._composite & set(parts):
                    self._composite.add(whole)
            if before == self._known:
                return

    def _is_token(self, c: int, size: int) -> bool:
        return TOKEN in self._known[c] if c in self._known else self._sizes.is_token(size)

    def _is_vocab(self, c: int, size: int) -> bool:
        return VOCAB in self._known[c] if c in self._known else self._sizes.is_vocab(size)

    def _pair(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """A token class and another class that is the vocabulary's."""
        return any(
            first != second and self._is_token(first, size_first) and self._is_vocab(second, size_second)
            for first, size_first in pairs
            for second, size_second in pairs
        )

    def logits_elements(self, shape: Sequence[int], axes: Sequence[int]) -> int:
        """The elements a token and a vocabulary axis span together with unknown ones; 0 without such a pair."""
        pairs = [(self._axes.find(a), size) for a, size in zip(axes, shape, strict=True) if size > 1]
        spanned = [(c, size) for c, size in pairs if self._known.get(c) != {FEATURE}]
        elements = math.prod(size for _, size in spanned)
        if self._pair(spanned) or any(c in self._composite for c, _ in spanned):
            return elements
        full = self._sizes.num_tokens * self._sizes.vocab_size
        flat = any(c not in self._known and full <= size <= 1.1 * full for c, size in spanned)
        return elements if flat else 0

    def is_feature(self, axis: int) -> bool:
        """Known to index the hidden dimension or another weight's."""
        return self._known.get(self._axes.find(axis)) == {FEATURE}

    def feature_sizes(self) -> set[int]:
        """The sizes of the arguments' feature axes."""
        return {size for root in self._roots for c, size in self._root_classes(root) if self._known.get(c) == {FEATURE}}
