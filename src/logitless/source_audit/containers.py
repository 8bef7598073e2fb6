"""Lists, mappings and iterators of Python."""

from logitless.source_audit.callables import Call
from logitless.source_audit.expressions import element_of, together
from logitless.source_audit.machine import Machine, view
from logitless.source_audit.values import Facts, Value


def of_same(machine: Machine, call: Call) -> Value:
    return call.args[0] if call.args else Value(items=[])


def of_zip(machine: Machine, call: Call) -> Value:
    if any(one.kind == "star" for one in call.args):
        return Value(together(call.args))
    return Value(items=list(call.args), kind="zip")


def of_enumerate(machine: Machine, call: Call) -> Value:
    return Value(items=call.args[:1], kind="enumerate")


def of_range(machine: Machine, call: Call) -> Value:
    return Value(Facts(loops=together(call.args).loops), kind="range")


def of_next(machine: Machine, call: Call) -> Value:
    return element_of(call.args[0], None) if call.args else Value()


def of_copy(machine: Machine, call: Call) -> Value:
    if not call.args:
        return Value()
    return Value(call.args[0].all_facts(), call.args[0].refs, call.args[0].items, call.args[0].fields)


def of_values(machine: Machine, call: Call) -> Value:
    target = call.args[0] if call.args else Value()
    if call.name == "items" and target.fields is not None:
        return Value(items=[Value(items=[Value(constant=key), one]) for key, one in target.fields.items()])
    if call.name == "keys":
        return Value()
    if target.fields is not None:
        return Value(items=list(target.fields.values()))
    return view(target)


def of_mapping(machine: Machine, call: Call) -> Value:
    if call.args and call.args[0].fields is not None:
        return Value(fields={**call.args[0].fields, **call.kwargs})
    return Value(together(call.args), fields=dict(call.kwargs))
