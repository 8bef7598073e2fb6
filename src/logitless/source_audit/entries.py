"""Entry points of a target: which functions and classes are read, and what each reading saw."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from logitless.source_audit.callables import CALLABLE, Bound, Checkpointed, Closure
from logitless.source_audit.calls import apply, call, call_ref
from logitless.source_audit.expressions import global_value
from logitless.source_audit.machine import Exhausted, Machine, Scope, root
from logitless.source_audit.members import bases_of, member_of_class, outside_bases
from logitless.source_audit.names import Class, Function, Module, Program
from logitless.source_audit.operations import LOGPROB_WORDS, LOSS_WORDS, POLICY_WORDS, may_hold_a_loss
from logitless.source_audit.summary import Summary
from logitless.source_audit.tree import is_test
from logitless.source_audit.values import LossEvent, Note, Site, Value

SCALARS = {"int", "float", "bool", "str"}
ENTRY_METHODS = ("forward", "__call__")


@dataclass(eq=False)
class Reading:
    """What the reading of one entry point saw.

    Attributes:
        name: of the entry point, with the classes and functions around it.
        kind: function, class, autograd Function, custom_vjp or kernel.
        site: where it is defined.
        parameters: its own, in order.
        events: losses that it reaches.
        notes: what else was seen.
        called: syntax nodes of the functions that it went through.
        complete: it was read to its end.
        owner: the autograd class that it is a method of, by full name.
    """

    name: str
    kind: str
    site: Site
    parameters: tuple[str, ...] = ()
    events: list[LossEvent] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    called: set[int] = field(default_factory=set)
    complete: bool = True
    owner: str = ""
    node: Any = None
    subject: Any = None
    function: int = 0
    summary: Summary | None = None


@dataclass(eq=False)
class Candidate:
    """A function or class that may hold or reach a loss."""

    subject: Function | Class
    words: frozenset[str]


def words_in(node: ast.AST) -> frozenset[str]:
    """Names and attributes in a piece of syntax."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.alias):
            found.add(part.name.rsplit(".", 1)[-1])
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(part.name)
    return frozenset(found)


def has_seed(words: frozenset[str]) -> bool:
    return may_hold_a_loss(" ".join(words))


def candidates_of(program: Program, module: Module) -> list[Candidate]:
    """Functions of the top level, classes, and methods that stand for themselves."""
    key = ("candidates", module.file.path)
    if key not in program.cache:
        program.cache[key] = list(_candidates_of(module))
    return program.cache[key]


def _candidates_of(module: Module) -> Iterator[Candidate]:
    seen: set[int] = set()
    for bindings in module.scope.values():
        for one in bindings:
            if isinstance(one, Function | Class) and id(one.node) not in seen:
                seen.add(id(one.node))
                yield Candidate(one, words_in(one.node))
                if isinstance(one, Class):
                    for method in one.methods.values():
                        if method.name not in (*ENTRY_METHODS, "backward", "__init__", "setup_context"):
                            yield Candidate(method, words_in(method.node))


def is_autograd(machine: Machine, made: Class) -> bool:
    """True for a `torch.autograd.Function`, also through a base class of the target."""
    methods = {name for one in bases_of(machine, made) for name in one.methods}
    if not {"forward", "backward"} <= methods:
        return False
    return any(base.rsplit(".", 1)[-1] == "Function" for base in outside_bases(machine, made))


def read(program: Program, subject: Function | Class, *, budget: int, arguments: bool = False) -> list[Reading]:
    """Reads one entry point, and what it defines but does not call itself; once, unless with known arguments."""
    known = program.cache.setdefault("readings", {})
    # What is launched as a kernel may have been read before as a plain function.
    key = id(subject.node), isinstance(subject, Function) and subject.kernel
    if key in known and not arguments:
        return known[key]
    machine = Machine(program, budget=budget)
    machine.subject = subject
    kind, complete = "function", True
    program.cache.setdefault("reading", set()).add(id(subject.node))
    try:
        kind = _start(machine, subject, arguments)
    except (Exhausted, RecursionError):
        complete = False
    program.cache["reading"].discard(id(subject.node))
    first = _reading(machine, subject, kind, complete)
    first.summary = Summary(machine.roots, machine.result, first.events, first.notes, machine.called, first.site)
    first.subject = subject
    entry = subject if isinstance(subject, Function) else _entry_of(machine, subject)
    first.function = id(entry.node) if entry is not None else 0
    readings = [first, *_nested(program, machine, budget)]
    if not arguments:
        known[key] = readings
    return readings


def summary_of(machine: Machine, subject: Function | Class) -> Summary | None:
    """The summary of a function or an autograd class, read now if need be; None where it cannot be had."""
    program = machine.program
    if id(subject.node) in program.cache.get("reading", ()) or not worth_a_summary(subject):
        return None
    first = read(program, subject, budget=BUDGET)[0]
    if not first.complete or any(note.kind == "dynamic" for note in first.notes):
        return None
    return first.summary


def worth_a_summary(subject: Function | Class) -> bool:
    """Short functions are read anew, in their context."""
    length = (subject.node.end_lineno or 0) - subject.node.lineno
    return length >= 12


def _reading(machine: Machine, subject: Function | Class, kind: str, complete: bool) -> Reading:
    site = Site(subject.module.file.path, subject.node.lineno)
    owner = subject.owner if isinstance(subject, Function) else None
    owned = owner.full_name if owner is not None and is_autograd(machine, owner) else ""
    return Reading(
        subject.full_name,
        kind,
        site,
        tuple(one.arg for one in parameters_of(machine, subject)),
        list(machine.events),
        list(machine.notes),
        machine.called,
        complete,
        owned,
        subject.node,
    )


def parameters_of(machine: Machine, subject: Function | Class) -> list[ast.arg]:
    """The parameters that a caller gives."""
    function = subject if isinstance(subject, Function) else _entry_of(machine, subject)
    if function is None:
        return []
    hidden = {"self", "cls", "ctx"} if function.owner is not None else set()
    return [one for one in function.parameters if one.arg not in hidden]


def _entry_of(machine: Machine, made: Class) -> Function | None:
    for one in bases_of(machine, made):
        for name in ENTRY_METHODS:
            if name in one.methods:
                return one.methods[name]
    return None


def _start(machine: Machine, subject: Function | Class, arguments: bool) -> str:
    site = Site(subject.module.file.path, subject.node.lineno)
    scope = Scope(subject.module)
    if isinstance(subject, Class):
        return _start_class(machine, subject, site, scope, arguments)
    if subject.owner is None:
        # Decorators and later assignments may make a kernel of it.
        global_value(machine, subject.module, subject.name)
    closure = Closure(subject, None)
    args = [_root_of(machine, subject, one, arguments) for one in _positional(subject)]
    kwargs = {one.arg: _root_of(machine, subject, one, arguments) for one in subject.node.args.kwonlyargs}
    if subject.node.args.kwarg is not None:
        kwargs["**"] = root(subject.node.args.kwarg.arg)
    machine.result = call_ref(machine, closure, args, kwargs, site, scope)
    if subject.kernel:
        return "kernel"
    return "custom_vjp" if subject.custom else "function"


def _positional(function: Function) -> list[ast.arg]:
    return [*function.node.args.posonlyargs, *function.node.args.args]


def _root_of(machine: Machine, function: Function, parameter: ast.arg, arguments: bool) -> Value:
    machine.roots[parameter.arg] = value = _root_value(machine, function, parameter, arguments)
    return value


def _root_value(machine: Machine, function: Function, parameter: ast.arg, arguments: bool) -> Value:
    name = parameter.arg
    if function.owner is not None and parameter is (_positional(function) or [None])[0] and not function.is_static():
        if function.is_class_method():
            return Value(refs=(function.owner,))
        return Value(owner=function.owner, path="self", fields={})
    if arguments:
        known = machine.program.cache.get("arguments", {}).get((id(function.node), name))
        if known:
            return Value(refs=known, path=name)
    return root(name) if not _is_scalar(function, parameter) else Value()


def _is_scalar(function: Function, parameter: ast.arg) -> bool:
    note = parameter.annotation
    if isinstance(note, ast.Name) and note.id in SCALARS:
        return True
    if isinstance(note, ast.Attribute) and note.attr == "constexpr":
        return True
    spec = function.node.args
    pairs = [*zip(reversed([*spec.posonlyargs, *spec.args]), reversed(spec.defaults), strict=False)]
    pairs += [(one, node) for one, node in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if node is not None]
    for one, default in pairs:
        if one is parameter and isinstance(default, ast.Constant):
            return isinstance(default.value, int | float | str)
    return False


def _start_class(machine: Machine, made: Class, site: Site, scope: Scope, arguments: bool) -> str:
    function = _entry_of(machine, made)
    if function is None:
        return "class"
    if is_autograd(machine, made):
        parameters = [one for one in function.parameters if one.arg not in ("self", "cls", "ctx")]
        if parameters and not function.is_class_method() and "ctx" not in {one.arg for one in function.parameters}:
            parameters = parameters[1:] if "setup_context" not in made.methods else parameters
        args = [_root_of_static(machine, function, one, arguments) for one in parameters]
        more = function.node.args.vararg
        machine.result = apply(machine, made, [*args, *([] if more is None else [root(more.arg)])], {}, site)
        return "autograd Function"
    instance = Value(owner=made, path="self", fields={})
    method = member_of_class(machine, made, function.name, instance)
    parameters = _positional(function)[0 if function.is_static() else 1 :]
    args = [_root_of_static(machine, function, one, arguments) for one in parameters]
    kwargs = {one.arg: _root_of_static(machine, function, one, arguments) for one in function.node.args.kwonlyargs}
    if function.node.args.kwarg is not None:
        kwargs["**"] = root(function.node.args.kwarg.arg)
    if method is not None:
        call(machine, method, args, kwargs, site, scope)
    return "class"


def _root_of_static(machine: Machine, function: Function, parameter: ast.arg, arguments: bool) -> Value:
    machine.roots[parameter.arg] = value = _static_value(machine, function, parameter, arguments)
    return value


def _static_value(machine: Machine, function: Function, parameter: ast.arg, arguments: bool) -> Value:
    if arguments:
        known = machine.program.cache.get("arguments", {}).get((id(function.node), parameter.arg))
        if known:
            return Value(refs=known, path=parameter.arg)
    return root(parameter.arg) if not _is_scalar(function, parameter) else Value()


def _nested(program: Program, outer: Machine, budget: int) -> list[Reading]:
    """Functions and classes that were defined inside and not called there: they are handed out."""
    found = []
    for value, _ in outer.made:
        for ref in value.refs:
            subject = _subject(ref)
            if subject is None or id(subject.node) in outer.called or not has_seed(words_in(subject.node)):
                if subject is None or id(subject.node) in outer.called or not LOSS_WORDS.search(subject.name):
                    continue
            machine = Machine(program, budget=budget // 2)
            complete, kind = True, "class" if isinstance(subject, Class) else "function"
            try:
                kind = _start_nested(machine, subject, ref)
            except (Exhausted, RecursionError):
                complete = False
            found.append(_reading(machine, subject, kind, complete))
    return found


def _subject(ref: Any) -> Function | Class | None:
    if isinstance(ref, Class):
        return ref
    if isinstance(ref, Checkpointed):
        return _subject(ref.ref)
    if isinstance(ref, Bound):
        return ref.closure.function
    return ref.function if isinstance(ref, Closure) else None


def _start_nested(machine: Machine, subject: Function | Class, ref: Any) -> str:
    site = Site(subject.module.file.path, subject.node.lineno)
    scope = Scope(subject.module)
    if isinstance(subject, Class):
        return _start_class(machine, subject, site, scope, False)
    args = [_root_of(machine, subject, one, False) for one in _positional(subject)]
    kwargs = {one.arg: _root_of(machine, subject, one, False) for one in subject.node.args.kwonlyargs}
    call_ref(machine, ref, args, kwargs, site, scope)
    return "kernel" if subject.kernel else "function"


def read_all(program: Program, progress: Callable[[int, int], None] | None = None) -> list[Reading]:
    """Reads all that may hold a loss, then what calls it, as long as it hands its own operands on."""
    readings: list[Reading] = []
    done: set[int] = set()
    waiting, wave = list(_with_seeds(program)), 0
    while waiting:
        wave += 1
        reached: dict[str, set[str]] = {}
        for at, candidate in enumerate(waiting):
            if progress is not None:
                progress(at, len(waiting))
            if id(candidate.subject.node) in done:
                continue
            done.add(id(candidate.subject.node))
            for reading in read(program, candidate.subject, budget=BUDGET):
                readings.append(reading)
                for name in names_to_follow(reading) or (_hands_out(reading) if wave > 1 else ()):
                    reached.setdefault(name, set()).add(reading.site.path)
        for name, paths in program.aliases(reached).items():
            reached.setdefault(name, set()).update(paths)
        waiting = [one for one in _callers(program, reached) if id(one.subject.node) not in done]
    return [_again(program, reading) for reading in readings]


BUDGET = 120_000


def _again(program: Program, reading: Reading) -> Reading:
    """Where a parameter is called, the entry point is read again with the functions that other code hands over."""
    if reading.kind == "function" and isinstance(reading.subject, Function) and reading.subject.kernel:
        return read(program, reading.subject, budget=BUDGET)[0]
    called = {name for name in reading.parameters if any(f"`{name}`" in note.text for note in reading.notes)}
    if LOSS_WORDS.search(reading.name):
        called |= set(reading.parameters)
    known = program.cache.get("arguments", {})
    if reading.events or reading.subject is None or not any((reading.function, name) in known for name in called):
        return reading
    again = read(program, reading.subject, budget=BUDGET, arguments=True)[0]
    return again if again.events else reading


def _with_seeds(program: Program) -> Iterator[Candidate]:
    for path, file in program.tree.files.items():
        if file.tree is None or is_test(path):
            continue
        for candidate in candidates_of(program, program.module(path)):
            if has_seed(candidate.words) or _is_policy(candidate.subject) or _dispatches(candidate.subject):
                yield candidate


def _dispatches(subject: Function | Class) -> bool:
    """A loss by its name that calls what it takes from a mapping, or from `getattr`."""
    if isinstance(subject, Class) or not LOSS_WORDS.search(subject.name) or len(subject.parameters) < 2:
        return False
    taken = set()
    for node in ast.walk(subject.node):
        if isinstance(node, ast.Call) and _takes_from_a_mapping(node.func):
            return True
        if isinstance(node, ast.Assign) and _takes_from_a_mapping(node.value):
            taken |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    called = {node.func.id for node in ast.walk(subject.node) if isinstance(node, ast.Call) and _is_name(node.func)}
    return bool(taken & called)


def _is_name(node: ast.expr) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def _takes_from_a_mapping(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Name | ast.Attribute)
    if not isinstance(node, ast.Call):
        return False
    return isinstance(node.func, ast.Name) and node.func.id == "getattr" or getattr(node.func, "attr", "") == "get"


def _is_policy(subject: Function | Class) -> bool:
    if isinstance(subject, Class):
        return False
    if not POLICY_WORDS.search(subject.full_name):
        return False
    return any(LOGPROB_WORDS.search(one.arg) for one in subject.parameters)


def names_to_follow(reading: Reading) -> set[str]:
    """Names whose callers are read too: of what hands its own operands to a loss."""
    own = {*reading.parameters, "self"}
    linked = any(
        source.split(".")[0].split("[")[0] in own
        for event in reading.events
        for source in (event.sources | frozenset().union(*(p.left | p.right for p in event.products)))
    )
    outside = any(note.kind in ("outside", "normaliser", "own") for note in reading.notes)
    if not (linked or outside):
        return set()
    name = reading.name.rsplit(".", 1)[-1]
    if "." in reading.name and reading.kind == "function" and not LOSS_WORDS.search(name):
        return set()
    return {name}


def _hands_out(reading: Reading) -> set[str]:
    """The name of a function that gives back a function, made of a loss that it calls by no argument."""
    result = reading.summary.result if reading.summary is not None else Value()
    return (
        {reading.name}
        if reading.kind == "function" and any(isinstance(one, CALLABLE) for one in result.refs)
        else set()
    )


SHORT = 3
"""A name of fewer letters may mean anything elsewhere: only its own file is searched for it."""


def _callers(program: Program, names: dict[str, set[str]]) -> Iterator[Candidate]:
    if not names:
        return
    for module in program.modules_with(names):
        path = module.file.path
        if is_test(path):
            continue
        wanted = {name for name, paths in names.items() if len(name) >= SHORT or path in paths}
        for candidate in candidates_of(program, module):
            own = candidate.subject.name
            if candidate.words & wanted and (candidate.words - {own}) & wanted:
                yield candidate
