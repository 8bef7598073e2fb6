"""Names of the target: modules, functions and classes, and what each name means where it is used."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from logitless.source_audit.tree import SourceFile, SourceTree, is_test
from logitless.source_audit.values import Outside

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(eq=False)
class Module:
    """A file, and what its top level binds.

    Attributes:
        file: that it is.
        scope: each name, with everything that the top level may bind it to, in order.
        stars: modules whose names are imported whole.
        rules: by function, the call that gives it a custom VJP.
        entries: by mapping, the keys and values that are put into it after it was made.
    """

    file: SourceFile
    scope: "dict[str, list[Any]]" = field(default_factory=dict)
    stars: list["Imported"] = field(default_factory=list)
    rules: dict[str, ast.Call] = field(default_factory=dict)
    entries: "dict[str, list[tuple[ast.expr, ast.expr]]]" = field(default_factory=dict)


@dataclass(eq=False)
class Function:
    """A function, method or lambda of the target.

    Attributes:
        name: its own, or `<lambda>`.
        full_name: with the classes and functions around it.
        node: its syntax.
        module: that it is in.
        owner: its class, if it is a method.
        kernel: a decorator or a call made a kernel of it.
        custom: a decorator gives it gradients of its own.
        gradients: the forward and backward functions of a custom VJP, as values.
        language: that its kernel is written in, where it is one of its own; None where that was not asked.
    """

    name: str
    full_name: str
    node: FunctionNode
    module: Module
    owner: "Class | None" = None
    kernel: bool = False
    custom: bool = False
    gradients: "list[Any]" = field(default_factory=list)
    language: str | None = None

    @property
    def parameters(self) -> list[ast.arg]:
        arguments = self.node.args
        return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]

    @property
    def decorators(self) -> list[ast.expr]:
        return [] if isinstance(self.node, ast.Lambda) else self.node.decorator_list

    def is_static(self) -> bool:
        return any(_last(decorator) == "staticmethod" for decorator in self.decorators)

    def is_class_method(self) -> bool:
        return any(_last(decorator) == "classmethod" for decorator in self.decorators)


@dataclass(eq=False)
class Class:
    """A class of the target, with its methods and what its body assigns."""

    name: str
    full_name: str
    node: ast.ClassDef
    module: Module
    methods: dict[str, Function] = field(default_factory=dict)
    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    scope: Any = None


@dataclass(frozen=True)
class Imported:
    """`import a.b` (no name), or `from a import name`; `level` dots before it."""

    dotted: str
    name: str | None
    level: int
    whole: bool = False


@dataclass(eq=False)
class Assigned:
    """An expression that a name of a module is bound to; `at` counts into a tuple that is taken apart."""

    node: ast.expr
    module: Module
    at: int | None = None
    name: str = ""


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _last(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


class Program:
    """All modules of a target, read on demand."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self._modules: dict[str, Module] = {}
        self._functions: dict[int, Function] = {}
        self._by_last: dict[str, list[str]] = {}
        self.cache: dict[Any, Any] = {}
        self._folders = {path.rpartition("/")[0] for path in tree.files if path.endswith("__init__.py")}
        for path in tree.files:
            self._by_last.setdefault(_dotted(path)[-1] if _dotted(path) else "", []).append(path)

    def module(self, path: str) -> Module:
        """The module of a file."""
        if path not in self._modules:
            module = self._modules[path] = Module(self.tree.files[path])
            self._bind(module, module.file.parsed().body)
        return self._modules[path]

    def function(self, node: FunctionNode, module: Module, around: str = "", owner: Class | None = None) -> Function:
        """The one `Function` of a syntax node."""
        if id(node) not in self._functions:
            name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
            full = f"{around}.{name}" if around else name
            self._functions[id(node)] = Function(name, full, node, module, owner)
        return self._functions[id(node)]

    def new_class(self, node: ast.ClassDef, module: Module, around: str = "") -> Class:
        """A class with its methods; those of its body's `if` and `try` too."""
        full = f"{around}.{node.name}" if around else node.name
        made = Class(node.name, full, node, module)
        for statement in _flat(node.body):
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                made.methods[statement.name] = self.function(statement, module, full, made)
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        made.assigned.setdefault(target.id, []).append(statement.value)
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                values = [statement.value] if statement.value is not None else []
                made.assigned.setdefault(statement.target.id, []).extend(values)
        return made

    def _bind(self, module: Module, body: list[ast.stmt]) -> None:
        for statement in _flat(body):
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                module.scope.setdefault(statement.name, []).append(self.function(statement, module))
            elif isinstance(statement, ast.ClassDef):
                module.scope.setdefault(statement.name, []).append(self.new_class(statement, module))
            elif isinstance(statement, ast.Import | ast.ImportFrom):
                for name, imported in imports(statement):
                    if name == "*":
                        module.stars.append(imported)
                    else:
                        module.scope.setdefault(name, []).append(imported)
            elif isinstance(statement, ast.Expr):
                _bind_rule(module, statement.value)
            else:
                for name, node, at in _assignments(statement):
                    module.scope.setdefault(name, []).append(Assigned(node, module, at, name))
                if isinstance(statement, ast.Assign):
                    _bind_entries(module, statement)

    def lookup(self, module: Module, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> list[Any]:
        """What a name of a module's top level may be: functions, classes, modules, assignments, outside names."""
        key = (module.file.path, name)
        if key in seen:
            return []
        found: list[Any] = []
        for binding in module.scope.get(name, ()):
            found += self.imported(binding, module, seen | {key}) if isinstance(binding, Imported) else [binding]
        if not found:
            for star in module.stars:
                source = self._named(star.dotted, module.file.path, star.level)
                if source is not None:
                    found += self.lookup(source, name, seen | {key})
        return list(dict.fromkeys(found))

    def imported(self, binding: Imported, module: Module, seen: frozenset[tuple[str, str]] = frozenset()) -> list[Any]:
        """What an import statement binds."""
        path = module.file.path
        if binding.name is None:
            dotted = binding.dotted if binding.whole else binding.dotted.split(".")[0]
            target = self._named(dotted, path, 0)
            return [target if target is not None else Outside(dotted)]
        source = self._named(binding.dotted, path, binding.level)
        inner = self._named(f"{binding.dotted}.{binding.name}".strip("."), path, binding.level)
        if source is not None:
            found = self.lookup(source, binding.name, seen)
            if found or inner is None:
                return found or [Outside(f"{binding.dotted}.{binding.name}".strip("."))]
        if inner is not None:
            return [inner]
        return [Outside(f"{'.' * binding.level}{binding.dotted}.{binding.name}".removeprefix("."))]

    def member(self, module: Module, name: str) -> list[Any]:
        """`module.name`: a name that it binds, or a module below it."""
        found = self.lookup(module, name)
        if found:
            return found
        inside = _dotted(module.file.path)
        path = self._existing("/".join([*inside, name]))
        return [self.module(path)] if path is not None else []

    def _existing(self, stem: str) -> str | None:
        return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in self.tree.files), None)

    def _named(self, dotted: str, path: str, level: int) -> Module | None:
        parts = [part for part in dotted.split(".") if part]
        if level:
            folder = path.split("/")[:-level]
            if len(path.split("/")) < level:
                return None
            found = self._existing("/".join([*folder, *parts])) if parts or folder else None
            return self.module(found) if found is not None else None
        if not parts:
            return None
        return self._absolute(parts, path)

    def _absolute(self, parts: list[str], path: str) -> Module | None:
        folder = path.rpartition("/")[0]
        best: str | None = None
        for candidate in self._by_last.get(parts[-1], ()):
            inside = _dotted(candidate)
            if inside[-len(parts) :] != parts:
                continue
            above = "/".join(inside[: -len(parts)])
            if above in self._folders and above != folder:
                continue
            if above in self._folders and len(parts) == 1 and parts[0] in _STANDARD:
                continue
            if best is None or len(candidate) < len(best):
                best = candidate
        return self.module(best) if best is not None else None

    def aliases(self, names: Iterable[str]) -> dict[str, set[str]]:
        """Other names that these go by: of imports, and of what a top level makes of them."""
        wanted = frozenset(names)
        found: dict[str, set[str]] = {}
        for path, file in self.tree.files.items():
            if not file.words & wanted or is_test(path):
                continue
            for name, words in self._made_of(path):
                if name not in wanted and words & wanted:
                    found.setdefault(name, set()).add(path)
        return found

    def _made_of(self, path: str) -> list[tuple[str, frozenset[str]]]:
        key = ("made of", path)
        if key not in self.cache:
            module = self.module(path)
            rows = [(name, _mentioned(one)) for name, bindings in module.scope.items() for one in bindings]
            rows += [(name, _words(value)) for name, put in module.entries.items() for _, value in put]
            self.cache[key] = [(name, words) for name, words in rows if words]
        return self.cache[key]

    def modules_with(self, words: Iterable[str]) -> Iterator[Module]:
        """Modules whose text holds any of these words."""
        wanted = frozenset(words)
        for path, file in self.tree.files.items():
            if file.words & wanted:
                yield self.module(path)


def _mentioned(binding: Any) -> frozenset[str]:
    """Names that a binding goes by somewhere else, or is made of."""
    if isinstance(binding, Imported):
        return frozenset({binding.name} if binding.name else ())
    return _words(binding.node) if isinstance(binding, Assigned) else frozenset()


def _words(node: ast.expr) -> frozenset[str]:
    parts = [part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)]
    return frozenset(part.id if isinstance(part, ast.Name) else part.attr for part in parts)


_STANDARD = {"torch", "jax", "numpy", "triton", "math", "functools", "typing", "types", "operator", "copy", "logging"}


def _dotted(path: str) -> list[str]:
    parts = path.removesuffix(".py").split("/")
    return parts[:-1] if parts[-1] == "__init__" else parts


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, and of the `if`, `try`, `with` and loops in it."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for name in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, name, []))
            for handler in getattr(statement, "handlers", []):
                yield from _flat(handler.body)


def imports(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Imported]]:
    """Each name that an import statement binds."""
    for alias in statement.names:
        if isinstance(statement, ast.Import):
            name = alias.asname or alias.name.split(".")[0]
            yield name, Imported(alias.name, None, 0, whole=alias.asname is not None)
        else:
            yield alias.asname or alias.name, Imported(statement.module or "", alias.name, statement.level)


def _bind_rule(module: Module, node: ast.expr) -> None:
    """`f.defvjp(forward, backward)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "defvjp":
        if isinstance(node.func.value, ast.Name):
            module.rules[node.func.value.id] = node


def _bind_entries(module: Module, statement: ast.Assign) -> None:
    """`MAPPING[key] = value`."""
    for target in statement.targets:
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            module.entries.setdefault(target.value.id, []).append((target.slice, statement.value))


def _assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.expr, int | None]]:
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value, None
            elif isinstance(target, ast.Tuple | ast.List):
                for at, part in enumerate(target.elts):
                    if isinstance(part, ast.Name):
                        yield part.id, statement.value, at
    elif (
        isinstance(statement, ast.AnnAssign) and statement.value is not None and isinstance(statement.target, ast.Name)
    ):
        yield statement.target.id, statement.value, None
