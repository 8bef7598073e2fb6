"""Where insides show nothing: a product or a cross-entropy that is believed by its name and its operands."""

from logitless.source_audit.machine import Machine
from logitless.source_audit.names import Function
from logitless.source_audit.operations import BACKWARD_WORDS, CROSS_ENTROPY_WORDS, LOSS_WORDS, PRODUCT_WORDS
from logitless.source_audit.values import Site, Value


def product_by_name(machine: Machine, function: Function, given: list[Value], result: Value, site: Site) -> Value:
    """Where a function's insides show no product but its name says so, its first two operands are multiplied."""
    if not PRODUCT_WORDS.search(function.name) or LOSS_WORDS.search(function.name) or function.kernel:
        return result
    operands = [value.all_facts() for value in given if value.all_facts().is_data]
    known = frozenset().union(*(facts.products for facts in operands)) if operands else frozenset()
    if len(operands) < 2 or result.all_facts().products - known or operands[0].marks & {"logp"}:
        return result
    if result.all_facts().softmaxes:
        return result
    facts = machine.product(site, operands[0], operands[1], named=True)
    out = next((one for one in given if one.mark and not one.facts.is_data or one.marks() and _is_fresh(one)), None)
    if out is not None:
        machine.write(site, out, facts)
    return Value(facts, mark=f"@{site.path}:{site.line}")


def _is_fresh(value: Value) -> bool:
    """Memory that was made and not filled."""
    return not value.facts.is_data and value.constant is None and not value.refs


def loss_by_name(machine: Machine, function: Function, given: list[Value], site: Site) -> bool:
    """A cross-entropy by its name, whose insides show no loss, of logits that were multiplied before."""
    if not CROSS_ENTROPY_WORDS.search(function.name) or function.kernel or BACKWARD_WORDS.search(function.name):
        return False
    if machine.kernels or machine.phase == "backward":
        return False
    operands = [value.all_facts() for value in given if value.all_facts().is_data]
    logits = next((one for one in operands if one.products and not one.softmaxes), None)
    ids = next((one for one in operands if not one.products and not one.softmaxes), None)
    if logits is None or ids is None:
        return False
    by = f"`{function.name}`; only its name says that it is a cross-entropy"
    machine.cross_entropy(site, logits, ids, by)
    return True
