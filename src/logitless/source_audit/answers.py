"""What is answered for each entry point, with the lines that show it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Evidence:
    """A line that a reader can open.

    Attributes:
        what: it shows: product, loop, kernel, launch, softmax, gradient, overwrite, stage or call.
        path: of the file, from the root of the target.
        line: counted from 1.
        text: of the line.
        note: in words, what there is to see.
    """

    what: str
    path: str
    line: int
    text: str = ""
    note: str = ""


@dataclass(frozen=True)
class EntryPoint:
    """One answer.

    Attributes:
        name: of the function or class, with what is around it.
        kind: function, class, autograd Function, custom_vjp or kernel.
        family: cross-entropy, log-probability, policy, preference or distillation.
        path: of the file, from the root of the target.
        line: of its definition.
        verdict: one of the seven; `delegates to X` names X.
        evidence: the lines that show it.
        gradient: forward, backward, or autodiff where nothing in the source computes it; empty where it cannot be seen.
        overwrites: the gradient of the logits is written over them; None where it cannot be seen.
        notes: other paths, arguments that are not used, what could not be followed.
    """

    name: str
    kind: str
    family: str
    path: str
    line: int
    verdict: str
    evidence: tuple[Evidence, ...] = ()
    gradient: str = ""
    overwrites: bool | None = None
    notes: tuple[str, ...] = ()
