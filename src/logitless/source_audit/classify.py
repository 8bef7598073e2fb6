"""From what a reading saw to a verdict, with the lines that show it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from logitless.source_audit.answers import EntryPoint, Evidence
from logitless.source_audit.entries import Reading, words_in
from logitless.source_audit.operations import (
    BACKWARD_WORDS,
    BESIDE_WORDS,
    LOGITS_WORDS,
    LOGPROB_WORDS,
    LOSS_WORDS,
    OBJECTIVE_WORDS,
)
from logitless.source_audit.tree import is_test
from logitless.source_audit.values import LossEvent, Note, Product, Site

LOGITS = "logits-level"
CHUNKED = "head fused, chunked"
KERNEL = "head fused, one kernel"
HOLDS = "takes hidden states, holds all logits"
STAGES = "two stages"
DELEGATES = "delegates to"
UNKNOWN = "unknown"
FUSED = (KERNEL, CHUNKED)
PAIR_WORDS = re.compile(r"(?:dpo|orpo|kto|simpo|cpo|ipo|preference|chosen|rejected)", re.IGNORECASE)
ALGORITHM_WORDS = re.compile(
    r"(?:grpo|ppo|dpo|orpo|kto|simpo|cpo|ipo|gspo|dapo|cispo|policy|surrogate|reinforce|preference)", re.IGNORECASE
)
DISTILLATION_WORDS = re.compile(r"(?:jsd|distill|kl_?div|teacher|cosine|tvd)", re.IGNORECASE)
WEIGHT_WORDS = re.compile(
    r"^(?:m?w|\w*_)?(?:w|weights?|lm_head|head|lin_weight|embedding|classifier|unembed\w*)$", re.IGNORECASE
)
BESIDE_LOGITS = re.compile(r"(?:bias|softcap|scale|temperature|stride|eps|smoothing|ignore|num_|size)", re.IGNORECASE)
ORDER = (KERNEL, CHUNKED, HOLDS, LOGITS)
"""Of several paths through one entry point the first of these names it; the others are noted."""


@dataclass
class _Case:
    """A reading on its way to a verdict."""

    reading: Reading
    logits: list[LossEvent]
    logprobs: list[LossEvent]
    verdict: str = ""
    chosen: list[LossEvent] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def classify(readings: Iterable[Reading]) -> list[EntryPoint]:
    """The answers for all readings of a target, by file and line."""
    cases = [_case(reading) for reading in readings]
    reached = {node for case in cases for node in case.reading.called if node != id(case.reading.node)}
    for case in cases:
        _by_logits(case)
    for case in cases:
        _by_caller(case, cases)
    for case in cases:
        _by_unseen(case)
    for case in cases:
        _by_stages(case, cases)
    for case in cases:
        _without_events(case)
    backward = _backward_kernels(cases)
    cases = [case for case in cases if not (case.reading.kind == "kernel" and case.reading.name in backward)]
    rows = [_row(case) for case in cases if case.verdict and not _is_inside(case, reached)]
    return sorted(dict.fromkeys(rows), key=lambda row: (row.path, row.line, row.name))


def _backward_kernels(cases: list[_Case]) -> set[str]:
    """Kernels that are launched in a backward pass only: parts of a gradient."""
    phases: dict[str, set[str]] = {}
    for case in cases:
        for note in case.reading.notes:
            if note.kind == "launch" and case.reading.kind != "kernel":
                phases.setdefault(note.text, set()).add(note.phase if _is_autograd(case) else "")
    return {name for name, seen in phases.items() if "backward" in seen and "forward" not in seen}


def _is_autograd(case: _Case) -> bool:
    return case.reading.kind in ("autograd Function", "custom_vjp")


def _case(reading: Reading) -> _Case:
    forward = [event for event in reading.events if event.phase == "forward"]
    logits = [event for event in forward if event.softmax is not None and not _is_self_product(event)]
    return _Case(reading, logits, [event for event in forward if event.softmax is None])


def _is_self_product(event: LossEvent) -> bool:
    """A product of something with itself, as a similarity is, has no head in it."""
    return bool(event.products) and all(len(one.left | one.right) < 2 for one in event.products)


def _is_inside(case: _Case, reached: set[int]) -> bool:
    """Parts of an autograd class that were read with it, and losses of log-probs by their name only."""
    reading = case.reading
    if reading.owner and id(reading.node) in reached or is_test(reading.site.path):
        return True
    if BACKWARD_WORDS.search(reading.name.rsplit(".", 1)[-1]):
        return True
    return reading.kind == "kernel" and not case.logits


def path_of(event: LossEvent) -> str:
    """Which way the logits of one event came about."""
    assert event.softmax is not None
    operands = frozenset().union(*(one.left | one.right for one in event.products)) if event.products else frozenset()
    handed = [source for source in event.sources - operands if LOGITS_WORDS.search(source.rsplit(".", 1)[-1])]
    if not event.products or handed:
        return LOGITS
    paths = {_path_of_product(one, event) for one in event.products}
    return next(path for path in (HOLDS, KERNEL, CHUNKED) if path in paths)


def _path_of_product(product: Product, event: LossEvent) -> str:
    assert event.softmax is not None
    if product.kernel is not None and event.softmax.kernel == product.kernel:
        return KERNEL
    around = {loop for loop in product.pieces if loop in event.softmax.loops}
    if event.pieces is not None and event.ids:
        # Logits whose ids are not cut with them are those of another head, or of another try: each is whole.
        around = {loop for loop in around if loop in event.pieces or loop.kind == "checkpoint"}
    return CHUNKED if around else HOLDS


def _by_logits(case: _Case) -> None:
    paths = {path: [event for event in case.logits if path_of(event) == path] for path in ORDER}
    case.verdict = next((path for path in ORDER if paths[path]), "")
    case.chosen = paths.get(case.verdict, [])
    for path in ORDER:
        other = paths[path]
        if case.verdict == KERNEL and all(_takes_from(event, case.chosen) for event in other):
            continue
        if other and path != case.verdict:
            case.notes.append(f"another path: {path} ({_where(paths[path][0])})")


def _where(event: LossEvent) -> str:
    products = sorted(event.products, key=lambda one: one.site)
    return str(products[0].site if products else event.softmax.site if event.softmax else event.site)


def _by_caller(case: _Case, cases: list[_Case]) -> None:
    """A function that is only ever given chunks holds no more than one chunk's logits."""
    if case.verdict != HOLDS or case.reading.kind not in ("function", "custom_vjp"):
        return
    sites = {product.site for event in case.chosen for product in event.products}
    found = []
    for other in cases:
        if other is case or id(case.reading.node) not in other.reading.called:
            continue
        found += [event for event in other.logits if {product.site for product in event.products} & sites]
    if found and all(path_of(event) == CHUNKED and not _is_one_checkpoint(event) for event in found):
        case.verdict, case.chosen = CHUNKED, found[:2]
        case.notes.append("is given one chunk at a time: the loop is in its caller")


def _by_unseen(case: _Case) -> None:
    """What is chosen at run time, what goes elsewhere, and kernels in languages of their own."""
    notes = [note for note in case.reading.notes if note.phase == "forward"]
    if case.verdict and case.verdict != LOGITS:
        handed = [note for note in notes if _is_handed_the_operands(note, case)]
        for note in handed:
            if note.kind == "outside":
                case.notes.append(f"another path: {DELEGATES} {note.text} ({note.site})")
        others = [note for note in handed if note.kind in ("chosen", "dynamic")]
        case.notes += list(dict.fromkeys(f"{note.text} ({note.site})" for note in others))[:2]
        if others and case.verdict == HOLDS:
            case.notes.append(f"the branch that can be followed: {HOLDS} ({_where(case.chosen[0])})")
            case.verdict = UNKNOWN
    own = [note for note in notes if note.kind == "own"]
    if own and case.verdict == LOGITS and _may_hide_a_head(case):
        case.notes.append(f"{own[0].text} ({own[0].site})")
        case.verdict, case.chosen = UNKNOWN, []
    if case.verdict == CHUNKED and all(_is_one_checkpoint(event) for event in case.chosen):
        case.notes.append("one checkpoint and no loop: inside it the logits of all tokens are alive at once")


def _is_handed_the_operands(note: Note, case: _Case) -> bool:
    """It takes both operands of the product that was seen, before that product."""
    if note.kind not in ("chosen", "dynamic", "outside") or note.products:
        return False
    products = [product for event in case.chosen for product in event.products]
    return len(note.sources) > 1 and any(note.sources & one.left and note.sources & one.right for one in products)


def _may_hide_a_head(case: _Case) -> bool:
    """An entry point that takes a weight, and whose logits come of that or of nothing that holds logits."""
    weights = {name for name in case.reading.parameters if WEIGHT_WORDS.search(name)}
    sources = {name.split(".")[0].split("[")[0] for event in case.logits for name in event.sources}
    own = sources & set(case.reading.parameters)
    return bool(weights) and (bool(weights & sources) or all(BESIDE_LOGITS.search(name) for name in own))


def _is_one_checkpoint(event: LossEvent) -> bool:
    loops = {loop.kind for product in event.products for loop in product.pieces}
    return loops == {"checkpoint"}


def _by_stages(case: _Case, cases: list[_Case]) -> None:
    if case.verdict in FUSED and not case.logprobs and _handles_logprobs(case):
        _by_callee(case, cases)
    elif case.verdict in FUSED and case.logprobs:
        used = [event for event in case.logprobs if _takes_from(event, case.chosen)]
        outside = [event for event in used if not _shares_loop(event, case.chosen)]
        if used and len(outside) == len(used) and _handles_logprobs(case):
            case.notes.insert(0, f"the head is in a log-prob stage: {case.verdict}")
            case.evidence.append(_evidence("stage", used[0].site, "the loss takes log-probs"))
            case.verdict = STAGES
    elif not case.verdict and case.logprobs and _handles_logprobs(case):
        _on_logprobs_only(case, cases)


def _by_callee(case: _Case, cases: list[_Case]) -> None:
    """It calls a loss that takes log-probs only, and a fused log-prob stage."""
    if case.reading.kind != "function":
        return
    words = frozenset() if case.reading.complete else words_in(case.reading.node)
    for other in cases:
        node = other.reading.node
        if other is case or other.logits or not other.logprobs:
            continue
        if id(node) not in case.reading.called and other.reading.name not in words:
            continue
        if _handles_logprobs(other):
            case.notes.insert(0, f"the head is in a log-prob stage ({case.verdict}); then {other.reading.name}")
            case.evidence.append(_evidence("stage", other.reading.site, "the loss that takes log-probs"))
            case.verdict = STAGES
            return


def _handles_logprobs(case: _Case) -> bool:
    """It is a loss of log-probs by its name too: metrics, masks and advantages are made of them as well."""
    whole = case.reading.name
    name = whole if case.reading.kind in ("class", "autograd Function") else whole.rsplit(".", 1)[-1]
    return bool(OBJECTIVE_WORDS.search(name)) and not BESIDE_WORDS.search(name)


def _takes_from(event: LossEvent, chosen: list[LossEvent]) -> bool:
    sites = {product.site for one in chosen for product in one.products}
    return any(product.site in sites for product in event.products)


def _shares_loop(event: LossEvent, chosen: list[LossEvent]) -> bool:
    pieces = {loop for one in chosen for product in one.products for loop in product.pieces}
    return bool(pieces & set(event.loops)) or any(one.kernel and one.kernel == event.kernel for one in chosen)


def _on_logprobs_only(case: _Case, cases: list[_Case]) -> None:
    stage, joined = _stage_of(case, cases)
    if stage is None:
        case.verdict = UNKNOWN
        case.notes.append("takes log-probabilities only; no log-prob stage that feeds it was found in this tree")
        return
    path = stage.verdict if stage.verdict != STAGES else path_of(stage.chosen[0])
    if path not in FUSED:
        case.verdict = LOGITS if path == LOGITS else HOLDS
        case.notes.append(f"takes log-probabilities; its log-prob stage {stage.reading.name} is {path}")
    else:
        case.verdict = STAGES
        case.notes.append(f"takes log-probabilities; the head is in {stage.reading.name} ({path})")
        if not joined:
            case.notes.append("no call that joins the two was found")
    case.evidence.append(_evidence("stage", stage.reading.site, f"log-prob stage {stage.reading.name}"))
    case.chosen = stage.chosen


def _stage_of(case: _Case, cases: list[_Case]) -> tuple[_Case | None, bool]:
    """The log-prob stage of a loss: by a caller that joins them, else the only one in its file, else in the tree."""
    own = case.reading.node
    for other in cases:
        if other is not case and own is not None and id(own) in other.reading.called and other.chosen:
            if any(event.products and _takes_from(event, other.chosen) for event in other.logprobs):
                return other, True
    stages = [one for one in cases if one.chosen and one.verdict in FUSED and _gives_logprobs(one)]
    near = [one for one in stages if one.reading.site.path == case.reading.site.path]
    if near:
        return near[0], False
    unfused = [one for one in cases if one.chosen and one.verdict not in FUSED and _gives_logprobs(one)]
    return (stages[0], False) if stages and not unfused else (None, False)


def _gives_logprobs(case: _Case) -> bool:
    kinds = {event.kind for event in case.logits}
    return kinds == {"log-probability"} and not case.logprobs and case.reading.kind != "kernel"


def _without_events(case: _Case) -> None:
    if case.verdict:
        return
    reading = case.reading
    outside = [note for note in reading.notes if note.kind == "outside" and note.phase == "forward"]
    if outside:
        _delegated(case, outside)
        return
    name = reading.name.rsplit(".", 1)[-1]
    dynamic = [note for note in reading.notes if note.kind in ("dynamic", "chosen")]
    dynamic += [note for note in reading.notes if note.kind == "own" and _crosses(note)]
    if not LOSS_WORDS.search(name) or len(reading.parameters) < 2:
        return
    if dynamic:
        case.verdict = UNKNOWN
        case.notes += list(dict.fromkeys(f"{note.text} ({note.site})" for note in dynamic))[:2]
    elif not reading.complete:
        case.verdict = UNKNOWN
        case.notes.append("too large to be read to its end")


def _crosses(note: Note) -> bool:
    """A kernel that is given several arrays."""
    return len({name.split(".")[0].split("[")[0] for name in note.sources}) > 1


def _delegated(case: _Case, outside: list[Note]) -> None:
    best = max(outside, key=lambda note: (len(note.sources), len(note.products)))
    case.verdict = f"{DELEGATES} {best.text}"
    case.evidence.append(_evidence("call", best.site, "the call that hands the operands over"))
    for product in sorted(best.products, key=lambda one: one.site)[:1]:
        case.evidence.append(_evidence("product", product.site, _operands(product)))
        case.notes.append("hands over logits that it computes itself")


def _evidence(what: str, site: Site, note: str = "") -> Evidence:
    return Evidence(what, site.path, site.line, "", note)


def _operands(product: Product) -> str:
    left, right = _short(product.left), _short(product.right)
    by_name = "; only its name says that it is a product" if product.named else ""
    return f"{left} x {right}{by_name}"


def _short(names: frozenset[str]) -> str:
    ordered = sorted(names, key=lambda name: (name.count(".") + name.count("["), len(name), name))
    return ", ".join(ordered[:2]) + (", ..." if len(ordered) > 2 else "")


def _row(case: _Case) -> EntryPoint:
    reading = case.reading
    evidence = list(case.evidence)
    evidence += _evidence_of_events(case)
    gradient, lines = _gradient(case)
    overwrites, written = _overwrites(case)
    evidence += [*lines, *written]
    return EntryPoint(
        reading.name,
        reading.kind,
        _family(case),
        reading.site.path,
        reading.site.line,
        case.verdict,
        tuple(dict.fromkeys(evidence)),
        gradient,
        overwrites,
        tuple(dict.fromkeys([*case.notes, *_unused(case)])),
    )


def _evidence_of_events(case: _Case) -> list[Evidence]:
    products = sorted({one for event in case.chosen for one in event.products}, key=lambda one: one.site)
    found: list[Evidence] = []
    if case.verdict != LOGITS:
        for product in products[:4]:
            found.append(_evidence("product", product.site, _operands(product)))
            found += _around(product)
        if products and case.verdict == HOLDS:
            found.append(_evidence("loop", products[0].site, "no loop, scan or checkpoint around the product"))
    for event in case.chosen[:1]:
        if event.softmax is not None:
            found.append(_evidence("softmax", event.softmax.site, event.by or event.softmax.kind))
    found += [_evidence("launch", note.site, f"kernel {note.text}") for note in _launches(case)]
    return found


def _around(product: Product) -> list[Evidence]:
    found = [_evidence("loop", loop.site, loop.kind) for loop in product.pieces]
    if product.kernel is not None:
        found.append(_evidence("kernel", product.kernel, "the kernel that holds the product"))
        if product.launch is not None and product.launch != product.kernel:
            found.append(_evidence("launch", product.launch, "launches it"))
    return found


def _launches(case: _Case) -> list[Note]:
    notes = [note for note in case.reading.notes if note.kind == "launch" and note.phase == "forward"]
    return [note for note in notes if note.site != case.reading.site][:2]


def _concerns(note: Note, case: _Case) -> bool:
    sites = {product.site for event in case.chosen for product in event.products}
    if note.products:
        return any(product.site in sites for product in note.products)
    sources = frozenset().union(*(event.sources for event in case.chosen)) if case.chosen else frozenset()
    return bool(note.sources & sources) and not sites


def _gradient(case: _Case) -> tuple[str, list[Evidence]]:
    notes = [note for note in case.reading.notes if note.kind == "gradient"]
    forward = [note for note in notes if note.phase == "forward" and (_concerns(note, case) or case.verdict == STAGES)]
    overwrite = [
        note
        for note in case.reading.notes
        if note.kind == "overwrite" and note.phase == "forward" and _concerns(note, case)
    ]
    if forward:
        return "forward", [_evidence("gradient", forward[0].site, forward[0].text)]
    if overwrite:
        return "forward", [_evidence("gradient", overwrite[0].site, "written in the forward pass")]
    backward = [note for note in notes if note.phase == "backward"]
    if backward:
        return "backward", [_evidence("gradient", backward[0].site, backward[0].text)]
    launches = [note for note in case.reading.notes if note.kind == "launch" and note.phase == "backward"]
    if launches:
        return "backward", [_evidence("gradient", launches[0].site, f"kernel {launches[0].text}")]
    if case.reading.kind in ("autograd Function", "custom_vjp"):
        return "backward", []
    if case.reading.kind == "kernel" or case.verdict.startswith((DELEGATES, UNKNOWN)):
        return "", []
    return "autodiff", []


def _overwrites(case: _Case) -> tuple[bool | None, list[Evidence]]:
    notes = [note for note in case.reading.notes if note.kind == "overwrite" and _concerns(note, case)]
    if notes:
        first = min(notes, key=lambda note: (note.phase != "forward", note.site))
        return True, [_evidence("overwrite", first.site, f"d_logits over the logits, in the {first.phase} pass")]
    return (False, []) if case.chosen and case.reading.kind == "autograd Function" else (None, [])


def _family(case: _Case) -> str:
    kinds = {event.kind for event in (*case.logits, *case.logprobs)}
    name = case.reading.name.lower()
    on_logprobs = any(LOGPROB_WORDS.search(one) or "advantage" in one for one in case.reading.parameters)
    if kinds & {"preference", "policy"} and (on_logprobs or ALGORITHM_WORDS.search(name)):
        pairs = PAIR_WORDS.search(name) or any(PAIR_WORDS.search(one) for one in case.reading.parameters)
        return "preference" if pairs else "policy"
    if DISTILLATION_WORDS.search(name) or "distillation" in kinds and "cross-entropy" not in kinds:
        return "distillation"
    if kinds & {"cross-entropy"} or any(word in name for word in ("cross", "ce_", "_ce", "nll", "loss", "ce(")):
        return "cross-entropy"
    return "log-probability" if kinds or LOGPROB_WORDS.search(name) else "cross-entropy"


def _unused(case: _Case) -> list[str]:
    """Arguments named like a head that take no part in a product on the way."""
    names = ("lm_head", "lm_head_weight", "head_weight", "lin_weight", "lm_weight", "vocab_weight", "head")
    operands: set[str] = set()
    for event in case.reading.events:
        for product in event.products:
            operands |= {name.split(".")[0].split("[")[0] for name in product.left | product.right}
    given = [name for name in case.reading.parameters if name in names and name not in operands]
    if not given or case.verdict.startswith(DELEGATES):
        return []
    return [f"argument `{name}` is in no product on the way to the loss" for name in given]
