"""What of the target's can be called, besides classes and names from outside."""

from dataclasses import dataclass
from typing import Any

from logitless.source_audit.machine import Scope
from logitless.source_audit.names import Class, Function
from logitless.source_audit.values import Site, Value


@dataclass(frozen=True)
class Closure:
    """A function with the scope that it was defined in."""

    function: Function
    scope: Scope | None


@dataclass(frozen=True)
class Bound:
    """A function with its first argument."""

    closure: Closure
    receiver: Value


@dataclass(frozen=True)
class Super:
    """`super()` of a class, for an instance or the class itself."""

    owner: Class
    receiver: Value


@dataclass(frozen=True, eq=False)
class Partial:
    """`functools.partial`: what is called, and the arguments that it has already."""

    ref: Any
    args: tuple[Value, ...]
    kwargs: dict[str, Value]


@dataclass(frozen=True)
class Gradient:
    """A function that also gives gradients, as `jax.value_and_grad` makes one."""

    ref: Any
    by: str


@dataclass(frozen=True, eq=False)
class Launch:
    """A Pallas kernel with its grid and specs, ready for its operands."""

    ref: Any
    site: Site


@dataclass(frozen=True, eq=False)
class Checkpointed:
    """A function whose insides are computed again in the backward pass."""

    ref: Any
    site: Site


CALLABLE = (Closure, Bound, Partial, Gradient, Launch, Checkpointed)


@dataclass
class Call:
    """One call, with its operands worked out.

    Attributes:
        site: its line.
        name: last word of what is called.
        dotted: all of it.
        args: operands by position; of a method the first is its receiver.
        kwargs: operands by name; `**` for a mapping that is unpacked.
        method: it is a method of a value.
        scope: that it stands in.
    """

    site: Site
    name: str
    dotted: str
    args: list[Value]
    kwargs: dict[str, Value]
    method: bool
    scope: Scope

    def arg(self, at: int, *names: str) -> Value | None:
        """An operand by position or by one of its names."""
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        if at < len(self.args):
            return self.args[at]
        return None

    def everything(self) -> list[Value]:
        return [*self.args, *self.kwargs.values()]

    def functions(self) -> list[Any]:
        """What among the operands can be called."""
        found = [ref for value in self.everything() for ref in value.all_refs() if isinstance(ref, CALLABLE)]
        return list(dict.fromkeys(found))
