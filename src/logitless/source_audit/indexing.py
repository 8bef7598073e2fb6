"""Indexing: what picks columns or rows by ids, and what only cuts pieces."""

import ast
from dataclasses import replace
from typing import Any

from logitless.source_audit.callables import CALLABLE
from logitless.source_audit.expressions import evaluate
from logitless.source_audit.machine import Machine, Scope, is_mask, root
from logitless.source_audit.operations import LOGPROB_WORDS
from logitless.source_audit.values import BLANK, NOTHING, Facts, Loop, Value, joined


def subscript(machine: Machine, node: ast.Subscript, scope: Scope) -> Value:
    """`value[index]`: an item, a field, a piece that a loop cuts, or a pick by ids."""
    value = evaluate(machine, node.value, scope)
    index = node.slice
    if isinstance(index, ast.Constant) or isinstance(index, ast.UnaryOp):
        key = evaluate(machine, index, scope).constant
        found = _entry(value, key)
        if found is not None:
            return found
        if isinstance(key, str) and value.facts.loops and not value.parts() and value.owner is None:
            # An entry of one of several batches is whole: nobody cut it.
            value = Value(replace(value.facts, loops=NOTHING), value.refs, bases=(value,))
    if isinstance(index, ast.Slice) and value.items is not None:
        evaluate(machine, index, scope)
        return Value(value.facts, items=_sliced(value.items, index), element=value.element)
    if any(isinstance(ref, CALLABLE) for ref in value.refs):
        evaluate(machine, index, scope)
        return value
    return _indexed(machine, node, value, scope)


def _entry(value: Value, key: Any) -> Value | None:
    if isinstance(key, int) and value.items is not None and -len(value.items) <= key < len(value.items):
        return value.items[key]
    if isinstance(key, str):
        if value.fields is not None:
            return value.fields.get(key) or value.element
        if value.path:
            made = root(f"{value.path}[{key!r}]")
            if LOGPROB_WORDS.search(key):
                made.facts = made.facts.marked("logp")
            return made
    return None


def _sliced(items: list[Value], index: ast.Slice) -> list[Value]:
    bounds = []
    for one in (index.lower, index.upper):
        if one is not None and not (isinstance(one, ast.Constant) and isinstance(one.value, int)):
            return items
        bounds.append(one.value if isinstance(one, ast.Constant) else None)
    return items[slice(*bounds)]


def _indexed(machine: Machine, node: ast.Subscript, value: Value, scope: Scope) -> Value:
    if value.fields and not value.facts.is_data:
        evaluate(machine, node.slice, scope)
        return chosen(list(value.fields.values()))
    if value.fields is not None and not value.facts.is_data and value.element is None:
        evaluate(machine, node.slice, scope)
        return Value(value.facts, value.refs, path=ast.unparse(node)[:60])
    if value.items is not None:
        return _cut(joined(value.items), evaluate(machine, node.slice, scope))
    if value.element is not None:
        return _cut(value.element, evaluate(machine, node.slice, scope))
    ids, loops = _index(machine, node.slice, scope)
    facts = value.facts | Facts(loops=loops)
    if not any(isinstance(part, ast.Constant) and part.value is None for part in ast.walk(node.slice)):
        # `ref[...]` is what a reference holds; `pointers[:, None]` are pointers still.
        facts = facts.unmarked("ptr")
    if ids.is_data:
        facts = machine.pick(machine.site(node, scope), facts, ids)
    return Value(facts, value.refs, bases=(value,))


def chosen(values: list[Value]) -> Value:
    """One of several values, chosen when the program runs."""
    value = joined(values)
    callable_ones = tuple(one for one in values if one.refs or one.owner is not None)
    if len(callable_ones) > 1 and value.kind != "star":
        value.choices = callable_ones
    return value


def _cut(value: Value, index: Value) -> Value:
    """An element at an index that may count the rounds of a loop."""
    loops = index.all_facts().loops
    if not loops or not value.facts.is_data:
        return value
    made = Value(value.facts | Facts(loops=loops), value.refs, value.items, value.fields, (value,), owner=value.owner)
    made.element, made.kind, made.path = value.element, value.kind, value.path
    return made


def _index(machine: Machine, node: ast.expr, scope: Scope) -> tuple[Facts, frozenset[Loop]]:
    """What an index picks by, and the loops whose pieces it cuts."""
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    ids, loops = BLANK, NOTHING
    for part in parts:
        value = evaluate(machine, part, scope)
        facts = value.all_facts()
        loops = loops | facts.loops
        if isinstance(part, ast.Slice) or value.kind == "range" or "mask" in facts.marks:
            continue
        if facts.is_data and "ptr" not in facts.marks and not is_mask(facts):
            ids = ids | facts
    return ids, loops
