"""The state of one reading of one entry point, and what each operation does to the facts of a value."""

import ast
from dataclasses import dataclass, field, replace
from typing import Any

from logitless.source_audit.names import Function, Module, Program
from logitless.source_audit.operations import ADVANTAGE_WORDS, LOGPROB_WORDS, PLACE_WORDS
from logitless.source_audit.values import (
    BLANK,
    NOTHING,
    Facts,
    Loop,
    LossEvent,
    Note,
    Pick,
    Product,
    Site,
    Softmax,
    Value,
    joined,
)

DEPTH = 40
"""Calls inside calls that are followed."""


class Exhausted(Exception):
    """The reading of one entry point took more steps than it may."""


@dataclass(eq=False)
class Scope:
    """The names of one call of a function, over those of the function that it is defined in."""

    module: Module
    function: Function | None = None
    parent: "Scope | None" = None
    names: dict[str, Value] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)
    returned: list[Value] = field(default_factory=list)

    def get(self, name: str) -> Value | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None

    def set(self, name: str, value: Value) -> None:
        if name in self.elsewhere:
            scope = self.parent
            while scope is not None:
                if name in scope.names:
                    scope.names[name] = joined_over(scope.names[name], value)
                    return
                scope = scope.parent
        self.names[name] = value


def joined_over(old: Value, new: Value) -> Value:
    """A value that may be the old one still."""
    return joined([old, new])


@dataclass
class Machine:
    """One reading of one entry point: where it stands, and what it has seen."""

    program: Program
    budget: int = 120_000
    loops: list[Loop] = field(default_factory=list)
    kernels: list[tuple[Site, Site | None]] = field(default_factory=list)
    calls: list[Function] = field(default_factory=list)
    phase: str = "forward"
    events: "dict[LossEvent, None]" = field(default_factory=dict)
    notes: "dict[Note, None]" = field(default_factory=dict)
    called: set[int] = field(default_factory=set)
    made: "list[tuple[Value, Scope]]" = field(default_factory=list)
    cache: "dict[Any, Any]" = field(default_factory=dict)
    seen: "dict[Any, Any]" = field(default_factory=dict)
    subject: Any = None
    roots: dict[str, Value] = field(default_factory=dict)
    result: Value = field(default_factory=Value)
    steps: int = 0
    writes: int = 0
    reached: int = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps > self.budget:
            raise Exhausted

    def site(self, node: ast.AST, scope: Scope) -> Site:
        return Site(scope.module.file.path, getattr(node, "lineno", 1))

    def note(self, kind: str, site: Site, text: str = "", facts: Facts = BLANK, phase: str = "") -> None:
        """Keeps what was seen at a line, once for each set of logits."""
        phase = phase or self.phase
        key = ("note", kind, site, text, phase, facts.products)
        if key in self.seen:
            return
        self.seen[key] = True
        self.notes.setdefault(Note(kind, site, phase, text, facts.products, facts.sources))

    @property
    def kernel(self) -> Site | None:
        return self.kernels[-1][0] if self.kernels else None

    def product(self, site: Site, left: Facts, right: Facts, *, named: bool = False) -> Facts:
        """A matrix product: what was known of the operands stays behind, but for the names that they derive from."""
        either = left | right
        if "onehot" in either.marks:
            column, ids = (right, left) if "onehot" in left.marks else (left, right)
            return self.pick(site, column.unmarked("onehot"), ids)
        if not (left.is_data and right.is_data):
            return either.unmarked("iota", "mask", "range")
        scored = bool(either.softmaxes)
        pieces = tuple(loop for loop in self.loops if loop in either.loops)
        key = ("product", site, pieces, self.kernel, self.kernels[-1][1] if self.kernels else None)
        known = self.seen.get(key)
        if known is not None and known.left >= left.sources and known.right >= right.sources:
            return self._multiplied(known, either, site)
        made = self.seen[key] = Product(
            site,
            left.sources,
            right.sources,
            pieces,
            self.kernel,
            self.kernels[-1][1] if self.kernels else None,
            scored,
            named,
        )
        return self._multiplied(made, either, site)

    def _multiplied(self, made: Product, either: Facts, site: Site) -> Facts:
        if either.softmaxes or self.phase == "backward":
            self.note("gradient", site, "product", either)
        mark = f"@{site.path}:{site.line}"
        return Facts(either.sources, either.loops, frozenset({made}), NOTHING, NOTHING, frozenset({mark}))

    def softmax(self, site: Site, facts: Facts, kind: str) -> Facts:
        """Exponentials of logits in some form."""
        if not facts.is_data:
            return facts
        if "logratio" in facts.marks and kind == "exp":
            return facts.marked("ratio")
        if kind == "exp" and any(one.kind in ("lse", "log_softmax") for one in facts.softmaxes):
            return facts
        kernel = self.kernel
        key = (kind, site, facts.products, kernel, tuple(self.loops))
        known = self.seen.get(key)
        if known is not None and known.sources >= facts.sources and known.objects >= facts.objects:
            return replace(facts.unmarked("iota"), softmaxes=facts.softmaxes | {known})
        made = self.seen[key] = Softmax(
            kind, site, facts.products, facts.sources, tuple(self.loops), kernel, facts.picks, facts.objects
        )
        return replace(facts.unmarked("iota"), softmaxes=facts.softmaxes | {made})

    def logarithm(self, site: Site, facts: Facts) -> Facts:
        """The logarithm of a sum of exponentials is a log-sum-exp, where the exponentials were taken."""
        sums = {replace(s, kind="lse") for s in facts.softmaxes if s.kind in ("exp", "softmax")}
        if not sums:
            return facts
        if any(one.products for one in sums):
            self.note("normaliser", site, "", facts)
        return self.settle(site, replace(facts, softmaxes=facts.softmaxes | sums))

    def pick(self, site: Site, facts: Facts, ids: Facts) -> Facts:
        """Columns or rows chosen by ids."""
        if "choice" in ids.marks or not ids.is_data or not facts.is_data or _named_all(ids.sources, PLACE_WORDS):
            return facts
        key = ("pick", site, facts.products)
        made = self.seen.get(key)
        if made is None or not (made.ids >= ids.sources and made.sources >= facts.sources):
            made = self.seen[key] = Pick(site, ids.sources, facts.products, facts.sources, facts.objects)
        picked = replace(facts.unmarked("iota"), picks=facts.picks | {made}, loops=facts.loops | ids.loops)
        return self.settle(site, picked)

    def settle(self, site: Site, facts: Facts) -> Facts:
        """A log-sum-exp and a pick by ids of the same logits make a log-probability."""
        if not facts.softmaxes or not facts.picks:
            return facts
        key = ("settled", facts.softmaxes, facts.picks)
        if key not in self.seen:
            self.seen[key] = self._settle(site, facts)
        return facts.marked("logp") if self.seen[key] else facts

    def _settle(self, site: Site, facts: Facts) -> bool:
        found = False
        for softmax in facts.softmaxes:
            if softmax.kind in ("lse", "log_softmax"):
                for pick in facts.picks:
                    if _same_logits(softmax, pick):
                        found = True
                        self.event("log-probability", site, softmax, pick.ids)
        return found

    def event(
        self,
        kind: str,
        site: Site,
        softmax: Softmax,
        ids: frozenset[str],
        by: str = "",
        pieces: frozenset[Loop] | None = None,
    ) -> None:
        """Logits became a loss or log-probabilities."""
        calls = tuple(function.full_name for function in self.calls)
        self.add_event(
            LossEvent(
                kind,
                site,
                softmax.products,
                softmax.sources,
                softmax,
                ids,
                tuple(self.loops),
                softmax.kernel,
                calls,
                self.phase,
                by,
                pieces,
            )
        )

    def add_event(self, event: LossEvent) -> None:
        """Keeps an event, unless the same logits were seen to become the same thing before."""
        self.reached += 1
        where = event.loops if event.softmax is None else (event.softmax.site, event.softmax.loops)
        key = ("event", event.kind, where, event.products, event.kernel, event.phase, not event.sources)
        if key not in self.seen:
            self.seen[key] = True
            self.events.setdefault(event)

    def cross_entropy(self, site: Site, logits: Facts, targets: Facts, by: str) -> Facts:
        """A named cross-entropy of logits and ids, or of logits and probabilities."""
        either = logits | targets
        if not logits.is_data:
            return either
        if not targets.is_data:
            self.note("positions", site, f"{by} against positions, not ids: no vocabulary", logits)
            return either
        done = self.softmax(site, replace(logits, softmaxes=NOTHING, picks=NOTHING), "log_softmax")
        for softmax in done.softmaxes:
            taken = [old for old in logits.softmaxes if old.kind == "log_softmax"] or [softmax]
            for one in taken:
                kind = "distillation" if targets.softmaxes else "cross-entropy"
                self.event(kind, site, one, targets.sources, by, targets.loops)
        return replace(done, picks=NOTHING, loops=either.loops, sources=either.sources).marked("logp")

    def divergence(self, site: Site, left: Facts, right: Facts, by: str) -> Facts:
        """Two distributions over one vocabulary, compared."""
        pairs = [
            (a, b)
            for a in left.softmaxes
            for b in right.softmaxes
            if "log_softmax" in (a.kind, b.kind) and not _same_origin(a, b)
        ]
        for a, b in pairs:
            for one in (a, b) if bool(a.products) != bool(b.products) else (_both(a, b),):
                self.event("distillation", site, one, NOTHING, by)
        if not pairs and by:
            for one in left.softmaxes | right.softmaxes:
                if one.kind == "log_softmax":
                    self.event("distillation", site, one, NOTHING, by)
        return left | right

    def times(self, site: Site, left: Facts, right: Facts) -> Facts:
        """An elementwise product: with a one-hot, of a ratio with advantages, or of two distributions."""
        either = left | right
        if "onehot" in either.marks:
            column, ids = (right, left) if "onehot" in left.marks else (left, right)
            if is_mask(column):
                return ids
            return self.pick(site, column.unmarked("onehot"), ids)
        if left.softmaxes and right.softmaxes:
            self.divergence(site, left, right, "")
        for one, other in ((left, right), (right, left)):
            if "ratio" in one.marks and other.is_data and other.sources - one.sources:
                if _named(one.sources, LOGPROB_WORDS) or _named(other.sources, ADVANTAGE_WORDS):
                    self.on_logprobs("policy", site, one)
            elif "logp" in one.marks and _named(other.sources, ADVANTAGE_WORDS) and "logp" not in other.marks:
                self.on_logprobs("policy", site, one)
        return self.settle(site, plain(either) if either.is_data else either.unmarked("ptr"))

    def on_logprobs(self, kind: str, site: Site, facts: Facts) -> None:
        """A loss of log-probabilities."""
        calls = tuple(function.full_name for function in self.calls)
        self.add_event(
            LossEvent(
                kind,
                site,
                facts.products,
                facts.sources,
                None,
                NOTHING,
                tuple(self.loops),
                self.kernel,
                calls,
                self.phase,
            )
        )

    def minus(self, site: Site, left: Facts, right: Facts) -> Facts:
        """A difference; of log-probabilities it is a log-ratio."""
        either = left | right
        if {"logp", "logratio"} & left.marks and right.is_data or {"logp"} & right.marks and left.is_data:
            return self.settle(site, either).marked("logratio")
        return self.settle(site, plain(either))

    def write(self, site: Site, target: Value, facts: Facts) -> None:
        """A write in place; of a softmax into its own logits it overwrites them."""
        marks = target.marks()
        for softmax in facts.softmaxes:
            if marks & softmax.objects:
                self.note("overwrite", site, "", Facts(softmax.sources, products=softmax.products))
        self.writes += 1
        target.write(facts)


MASK_NAMES = ("mask", "valid", "keep", "select", "active", "nonzero", "perm", "order")


def is_mask(facts: Facts) -> bool:
    """True where all that the value derives from is named like a mask, or it derives from nothing."""
    names = all(any(word in source.lower() for word in MASK_NAMES) for source in facts.sources)
    return names and not facts.products


def plain(facts: Facts) -> Facts:
    """Facts of a result of arithmetic, which is no bare position, pointer or mask any more."""
    return facts.unmarked("iota", "mask", "range", "ptr")


def _named(sources: frozenset[str], words: Any) -> bool:
    return any(words.search(source) for source in sources)


def _named_all(sources: frozenset[str], words: Any) -> bool:
    return all(words.search(source) for source in sources)


def _both(left: Softmax, right: Softmax) -> Softmax:
    return replace(left, products=left.products | right.products, sources=left.sources | right.sources)


def _same_origin(left: Softmax, right: Softmax) -> bool:
    if left.products or right.products:
        return bool(left.products & right.products) or left.products == right.products
    return bool(left.sources & right.sources)


def _same_logits(softmax: Softmax, pick: Pick) -> bool:
    if pick in softmax.picked or softmax.sources and pick.ids and pick.ids == softmax.sources == pick.sources:
        return False
    if softmax.products and pick.products:
        return bool(softmax.products & pick.products)
    if softmax.products:
        operands = frozenset().union(*(p.left | p.right for p in softmax.products))
        return bool(pick.sources) and pick.sources <= operands
    return not pick.products and bool(softmax.sources & pick.sources)


def root(name: str, *, pointer: bool = False) -> Value:
    """The value of a parameter that nothing more is known of."""
    marks = {f"@{name}"} | ({"ptr"} if pointer else set())
    if LOGPROB_WORDS.search(name):
        marks.add("logp")
    return Value(Facts(frozenset({name}), marks=frozenset(marks)), path=name, mark=f"@{name}")


def view(value: Value, facts: Facts | None = None) -> Value:
    """A view of a value, or of a part of it."""
    return Value(value.facts if facts is None else facts, value.refs, bases=(value,), owner=value.owner)
