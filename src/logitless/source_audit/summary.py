"""What a function does to its operands, read once and then applied wherever it is called."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from logitless.source_audit.callables import CALLABLE
from logitless.source_audit.machine import Machine
from logitless.source_audit.names import Class
from logitless.source_audit.values import (
    BLANK,
    NOTHING,
    Facts,
    LossEvent,
    Note,
    Pick,
    Product,
    Site,
    Softmax,
    Value,
)

HEAD = re.compile(r"^[^.\[]+")
STATEFUL = {"logp", "logratio", "ratio", "onehot", "loaded", "iota", "choice"}


@dataclass(eq=False)
class Summary:
    """A reading in terms of the parameters.

    Attributes:
        roots: the value of each parameter, with all that was written to it.
        result: what is returned.
        events: losses that are reached.
        notes: what else was seen.
        called: syntax nodes of the functions that it went through.
        site: where it is defined.
    """

    roots: dict[str, Value]
    result: Value
    events: list[LossEvent]
    notes: list[Note]
    called: set[int]
    site: Site


def usable(given: dict[str, Value]) -> bool:
    """True where operands are plain arrays, of which a summary knows all that matters."""
    for value in given.values():
        if value.items is not None or value.fields or value.element is not None or value.kind in ("star", "context"):
            return False
        if any(isinstance(ref, (*CALLABLE, Class)) for ref in value.refs) or value.owner is not None:
            return False
        if value.facts.softmaxes or value.facts.picks or value.facts.marks & STATEFUL:
            return False
    return True


@dataclass
class Substitution:
    """Parameters of a summary and the operands of one call."""

    machine: Machine
    given: dict[str, Value]
    site: Site
    defined: Site
    made: dict[Any, Any] = field(default_factory=dict)

    def facts_of(self, name: str) -> Facts:
        value = self.given.get(name)
        return value.facts if value is not None else BLANK

    def sources(self, names: frozenset[str]) -> frozenset[str]:
        found: set[str] = set()
        for name in names:
            head = HEAD.match(name)
            base = head.group() if head else name
            value = self.given.get(base)
            if value is None:
                if (
                    base == "grad_output"
                    or base == "cotangent"
                    or "<" in name
                    or "." in name
                    and base not in self.given
                ):
                    found.add(name)
                continue
            rest = name[len(base) :]
            found |= {f"{value.path}{rest}"} if value.path and rest and value.facts.is_data else value.facts.sources
        return frozenset(found)

    def loops(self, names: frozenset[str]) -> frozenset[Any]:
        bases = {match.group() for name in names if (match := HEAD.match(name))}
        return frozenset().union(*(self.facts_of(base).loops for base in bases)) if bases else NOTHING

    def direct(self, marks: frozenset[str]) -> Facts:
        """Facts of operands that the value is made of element by element."""
        facts = BLANK
        for mark in marks:
            if mark.startswith("@") and mark[1:] in self.given:
                facts = facts | self.facts_of(mark[1:])
        return facts

    def objects(self, marks: frozenset[str]) -> frozenset[str]:
        found: set[str] = set()
        for mark in marks:
            value = self.given.get(mark[1:])
            found |= value.marks() | value.facts.objects if value is not None else {mark}
        return frozenset(found)

    def _launch(self, launch: Site | None) -> Site | None:
        return self.site if launch == self.defined else launch

    def product(self, old: Product) -> Product | None:
        left, right = self.sources(old.left), self.sources(old.right)
        if not left or not right:
            return None
        outer = self.loops(old.left | old.right)
        pieces = tuple(loop for loop in self.machine.loops if loop in outer)
        return replace(old, left=left, right=right, pieces=(*pieces, *old.pieces), launch=self._launch(old.launch))

    def products(self, old: frozenset[Product]) -> frozenset[Product]:
        return frozenset(made for one in old if (made := self.product(one)) is not None)

    def softmax(self, old: Softmax) -> Softmax | None:
        if old in self.made:
            return self.made[old]
        direct = self.direct(old.objects)
        products = self.products(old.products) | direct.products
        sources = self.sources(old.sources)
        made = None
        if sources and (products or not old.products):
            loops = (*self.machine.loops, *old.loops)
            made = replace(
                old,
                products=products,
                sources=sources,
                loops=loops,
                picked=frozenset(self.pick(one) for one in old.picked),
                objects=self.objects(old.objects),
            )
        self.made[old] = made
        return made

    def pick(self, old: Pick) -> Pick:
        products = self.products(old.products)
        if not old.products:
            heads = {match.group() for name in old.sources if (match := HEAD.match(name))}
            products = products.union(*(self.facts_of(name).products for name in heads if f"@{name}" in old.objects))
        return Pick(old.site, self.sources(old.ids), products, self.sources(old.sources), old.objects)

    def facts(self, old: Facts) -> Facts:
        direct = self.direct(old.marks)
        softmaxes = frozenset(made for one in old.softmaxes if (made := self.softmax(one)) is not None)
        own = Facts(
            self.sources(old.sources),
            old.loops | self.loops(old.sources),
            self.products(old.products),
            softmaxes,
            frozenset(made for one in old.picks if (made := self.pick(one)).ids),
            frozenset(mark for mark in old.marks if mark[1:] not in self.given and mark != "ptr"),
        )
        return own | direct.unmarked("iota", "mask", "ptr")

    def value(self, old: Value, depth: int = 4) -> Value:
        made = Value(self.facts(old.facts), old.refs, constant=old.constant, mark=old.mark, kind=old.kind)
        if depth and old.items is not None:
            made.items = [self.value(one, depth - 1) for one in old.items]
        if depth and old.fields is not None:
            made.fields = {name: self.value(one, depth - 1) for name, one in old.fields.items()}
        if depth and old.element is not None:
            made.element = self.value(old.element, depth - 1)
        if old.path and HEAD.match(old.path) and old.path in self.given:
            return self.given[old.path]
        return made


def apply_summary(machine: Machine, summary: Summary, given: dict[str, Value], site: Site) -> Value:
    """The effects of a call on the reading that it stands in."""
    change = Substitution(machine, given, site, summary.site)
    machine.called |= summary.called
    for event in summary.events:
        _event(machine, change, event)
    for note in summary.notes:
        _note(machine, change, note)
    for name, value in given.items():
        root = summary.roots.get(name)
        if root is not None:
            written = change.facts(root.facts)
            if written != value.facts and (written | value.facts) != value.facts:
                machine.writes += 1
                value.write(written)
    result = change.value(summary.result)
    result.facts = machine.settle(site, result.facts)
    return result


def _event(machine: Machine, change: Substitution, old: LossEvent) -> None:
    calls = (*(function.full_name for function in machine.calls), *old.calls)
    phase = machine.phase if machine.phase == "backward" else old.phase
    if old.softmax is None:
        direct = frozenset().union(*(change.facts_of(name).products for name in old.sources))
        products = change.products(old.products) | direct
        sources = change.sources(old.sources)
        if sources:
            loops = (*machine.loops, *old.loops)
            machine.add_event(replace(old, products=products, sources=sources, loops=loops, calls=calls, phase=phase))
        return
    softmax = change.softmax(old.softmax)
    ids = change.sources(old.ids)
    if softmax is None or old.ids and not ids:
        return
    pieces = None if old.pieces is None else old.pieces | change.loops(old.ids)
    made = replace(
        old,
        pieces=pieces,
        products=softmax.products,
        sources=softmax.sources,
        softmax=softmax,
        ids=ids,
        loops=(*machine.loops, *old.loops),
        calls=calls,
        phase=phase,
    )
    machine.add_event(made)


def _note(machine: Machine, change: Substitution, old: Note) -> None:
    if old.kind == "dynamic" and old.products == NOTHING and not old.sources:
        pass
    site = change.site if old.kind == "launch" and old.site == change.defined else old.site
    facts = Facts(change.sources(old.sources), products=change.products(old.products))
    if not facts.products and old.kind in ("overwrite", "gradient"):
        heads = [change.facts_of(name) for name in old.sources]
        facts = replace(facts, products=frozenset().union(*(one.products for one in heads)))
    phase = machine.phase if machine.phase == "backward" else old.phase
    machine.note(old.kind, site, old.text, facts, phase)
