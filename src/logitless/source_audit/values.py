"""What the inspector knows of a value: where it comes from, which products, softmaxes and picks it went through."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Site:
    """A line of the target that a reader can open.

    Attributes:
        path: of the file, from the root of the target.
        line: counted from 1.
    """

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Loop:
    """A loop that a value can be a piece of: `for`, `while`, a scan, a map, a comprehension or a checkpoint."""

    site: Site
    kind: str


@dataclass(frozen=True)
class Product:
    """A matrix product, in one context.

    Attributes:
        site: its line.
        left: names that the first operand derives from.
        right: names that the second operand derives from.
        pieces: loops around it of which an operand is one piece.
        kernel: where the kernel is defined whose body holds it; None outside kernels.
        launch: where that kernel is launched.
        scored: an operand is derived from a softmax, as the gradient of logits is.
        named: only the name of what is called says that this is a product.
    """

    site: Site
    left: frozenset[str]
    right: frozenset[str]
    pieces: tuple[Loop, ...] = ()
    kernel: Site | None = None
    launch: Site | None = None
    scored: bool = False
    named: bool = False


@dataclass(frozen=True)
class Softmax:
    """Exponentials of logits, their sum, or its logarithm.

    Attributes:
        kind: exp, softmax, lse or log_softmax.
        site: its line.
        products: that gave the logits; empty where they were handed over.
        sources: names that the logits derive from.
        loops: around it, outermost first.
        kernel: that it is in.
        picked: picks that the logits had gone through before.
        objects: arrays that the logits lie in, as marks of where each was made.
    """

    kind: str
    site: Site
    products: frozenset[Product]
    sources: frozenset[str]
    loops: tuple[Loop, ...]
    kernel: Site | None = None
    picked: frozenset["Pick"] = frozenset()
    objects: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Pick:
    """A choice of columns or rows by ids: gather, an index, a comparison with a range."""

    site: Site
    ids: frozenset[str]
    products: frozenset[Product]
    sources: frozenset[str]
    objects: frozenset[str] = frozenset()


NOTHING: frozenset[Any] = frozenset()


@dataclass(frozen=True)
class Facts:
    """What is known of a value, joined over all paths that lead to it."""

    sources: frozenset[str] = NOTHING
    loops: frozenset[Loop] = NOTHING
    products: frozenset[Product] = NOTHING
    softmaxes: frozenset[Softmax] = NOTHING
    picks: frozenset[Pick] = NOTHING
    marks: frozenset[str] = NOTHING

    def __or__(self, other: "Facts") -> "Facts":
        if other is self or other is BLANK or self == other:
            return self
        if self is BLANK:
            return other
        return Facts(
            self.sources | other.sources,
            self.loops | other.loops,
            self.products | other.products,
            self.softmaxes | other.softmaxes,
            self.picks | other.picks,
            self.marks | other.marks,
        )

    def marked(self, *marks: str) -> "Facts":
        return self.with_marks(self.marks.union(marks))

    def unmarked(self, *marks: str) -> "Facts":
        return self if self.marks.isdisjoint(marks) else self.with_marks(self.marks.difference(marks))

    def with_marks(self, marks: frozenset[str]) -> "Facts":
        return Facts(self.sources, self.loops, self.products, self.softmaxes, self.picks, marks)

    @property
    def is_data(self) -> bool:
        """It holds numbers that come from outside: not a constant, a size or a position."""
        return bool(self.sources or self.products)

    @property
    def objects(self) -> frozenset[str]:
        """Arrays that it may lie in or be made of."""
        return frozenset(mark for mark in self.marks if mark.startswith("@"))


BLANK = Facts()


@dataclass(eq=False)
class Value:
    """An object of the target's program: facts that only grow, and what it can be called as or taken apart into.

    Attributes:
        facts: of its numbers.
        refs: functions, classes and outside names that it may be.
        items: of a tuple or list that is written out.
        fields: attributes of an instance, or entries of a dict under constant keys.
        bases: what it may be a view of; a write to the view is a write to these.
        constant: a string or number, where it is one.
        path: its name from a parameter on (`batch.labels`), while nothing has been done to it.
        owner: the class of the target that it is an instance of.
        element: of a list that is appended to or of a comprehension, any of its elements.
        kind: zip, enumerate or range, of what is iterated over.
        mark: of the array that it is, where it is no view.
        choices: values of which the program takes one when it runs, where each is read for itself.
    """

    facts: Facts = BLANK
    refs: tuple[Any, ...] = ()
    items: list["Value"] | None = None
    fields: dict[str, "Value"] | None = None
    bases: "tuple[Value, ...]" = ()
    constant: Any = None
    path: str = ""
    owner: Any = None
    element: "Value | None" = None
    kind: str = ""
    mark: str = ""
    choices: "tuple[Value, ...]" = ()

    def write(self, facts: Facts, depth: int = 12) -> None:
        """Joins what is written in place into the value and all that it is a view of."""
        self.facts = self.facts | facts.unmarked("iota", "mask", "onehot", "range", "ptr")
        if depth:
            for base in self.bases:
                base.write(facts, depth - 1)

    def marks(self, depth: int = 12) -> frozenset[str]:
        """Of the arrays that a write to it changes."""
        own = frozenset({self.mark} if self.mark else ())
        return own.union(*(base.marks(depth - 1) for base in self.bases)) if depth else own

    def all_facts(self, depth: int = 4) -> Facts:
        """Facts of the value and of what it holds."""
        facts = self.facts
        if depth:
            for part in self.parts():
                facts = facts | part.all_facts(depth - 1)
        return facts

    def parts(self) -> "tuple[Value, ...]":
        """What it holds, where that is written out."""
        element = () if self.element is None else (self.element,)
        return (*(self.items or ()), *(self.fields or {}).values(), *element)

    def all_refs(self, depth: int = 3) -> tuple[Any, ...]:
        """What the value, or a part of it, can be called as."""
        refs = list(self.refs)
        if depth:
            for part in self.parts():
                refs += [ref for ref in part.all_refs(depth - 1) if ref not in refs]
        return tuple(refs)


def joined(values: Iterable[Value]) -> Value:
    """One value that may be any of these."""
    several = list(dict.fromkeys(values))
    if len(several) == 1:
        return several[0]
    if not several:
        return Value()
    facts, refs = BLANK, []
    for value in several:
        facts = facts | value.facts
        refs += [ref for ref in value.refs if ref not in refs]
    value = Value(facts, tuple(refs), _joined_items(several), _joined_fields(several), tuple(several))
    value.owner = next((one.owner for one in several if one.owner is not None), None)
    value.choices = _choices(several) if value.owner is not None else ()
    elements = [one.element for one in several if one.element is not None]
    value.element = joined(elements) if elements else None
    if len({(one.kind, one.path) for one in several}) == 1:
        value.kind, value.path = several[0].kind, several[0].path
    return value


def _choices(values: list[Value]) -> tuple[Value, ...]:
    """Instances of several classes, and functions beside them: each is called for itself."""
    flat = [one for value in values for one in (value.choices or (value,))]
    callable_ones = {id(one.owner) if one.owner is not None else one: one for one in flat if one.owner or one.refs}
    return tuple(callable_ones.values()) if len(callable_ones) > 1 else ()


def _joined_items(values: list[Value]) -> list[Value] | None:
    rows = [value.items for value in values if value.items is not None]
    if not rows or len({len(row) for row in rows}) != 1:
        if rows:
            longest = max(rows, key=len)
            return [joined([row[at] for row in rows if at < len(row)]) for at in range(len(longest))]
        return None
    return [joined(column) for column in zip(*rows, strict=True)]


def _joined_fields(values: list[Value]) -> dict[str, Value] | None:
    several = [value.fields for value in values if value.fields is not None]
    if not several:
        return None
    if len(several) == 1:
        return several[0]
    names = dict.fromkeys(name for fields in several for name in fields)
    return {name: joined([fields[name] for fields in several if name in fields]) for name in names}


@dataclass(frozen=True)
class Outside:
    """A name from outside the target, dotted: `torch.nn.functional.cross_entropy`."""

    name: str


@dataclass(frozen=True, eq=False)
class Method:
    """A method, by its name, of a value that is no instance of a class of the target: `logits.gather`."""

    name: str
    receiver: Value


@dataclass(frozen=True)
class LossEvent:
    """Logits become a loss or log-probabilities.

    Attributes:
        kind: cross-entropy, log-probability, distillation, policy or preference.
        site: its line.
        products: that gave the logits.
        sources: names that the logits derive from.
        softmax: where the logits are consumed.
        ids: names that the ids derive from.
        loops: around it, outermost first.
        kernel: that it is in.
        calls: functions that it was reached through, outermost first.
        phase: forward or backward.
        by: how it was recognised, in words.
        pieces: loops of which the ids are a piece; None where that was not asked.
    """

    kind: str
    site: Site
    products: frozenset[Product]
    sources: frozenset[str]
    softmax: Softmax | None
    ids: frozenset[str]
    loops: tuple[Loop, ...]
    kernel: Site | None
    calls: tuple[str, ...]
    phase: str
    by: str = ""
    pieces: frozenset[Loop] | None = None


@dataclass(frozen=True)
class Note:
    """Something else that was seen on the way.

    Attributes:
        kind: gradient, overwrite, launch, outside, dynamic or transform.
        site: its line.
        phase: forward or backward.
        text: what was seen.
        products: that it concerns.
        sources: that it concerns.
    """

    kind: str
    site: Site
    phase: str
    text: str = ""
    products: frozenset[Product] = NOTHING
    sources: frozenset[str] = NOTHING
