"""Programs as XLA prints them: instructions, trip counts wherever the compiler moved them, products and traffic."""

import pytest

from logitless.plan.estimate import KernelCall, estimate
from logitless.plan.hlo import parse
from logitless.plan.loops import Place, Value, trip_count, value_of

FUSED = """\
%less (p.0: s32[], p.1: s32[]) -> pred[] {
  %p.0 = s32[]{:T(128)} parameter(0)
  %p.1 = s32[]{:T(128)} parameter(1)
  ROOT %lt = pred[]{:T(512)} compare(%p.0, %p.1), direction=LT
}

%bump (p.2: s32[]) -> s32[] {
  %p.2 = s32[]{:T(128)} parameter(0)
  %two = s32[]{:T(128)} constant(2)
  ROOT %sum = s32[]{:T(128)} add(%p.2, %two)
}

%smaller (p.3: s32[]) -> s32[] {
  %p.3 = s32[]{:T(128)} parameter(0)
  %six = s32[]{:T(128)} constant(6)
  ROOT %least = s32[]{:T(128)} minimum(%p.3, %six)
}
"""


def program(end: str, *, step: str = "add(%counter, %one)", compared: str = "compare(%counter, %last), direction=LT"):
    """A loop in a loop: the inner one counts from 1 to what `end` names in the entry, which both hand on unchanged."""
    carry = "(s32[]{:T(128)}, s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)})"
    plain = "(s32[], s32[], f32[8,4])"
    return f"""\
HloModule jit_program, is_scheduled=true

{FUSED}
%inner_condition (in.0: {plain}) -> pred[] {{
  %in.0 = {carry} parameter(0)
  %counter = s32[]{{:T(128)}} get-tuple-element(%in.0), index=0
  %last = s32[]{{:T(128)}} get-tuple-element(%in.0), index=1
  ROOT %again = pred[]{{:T(512)}} {compared}
}}

%inner_body (in.1: {plain}) -> {plain} {{
  %in.1 = {carry} parameter(0)
  %one = s32[]{{:T(128)}} constant(1)
  %counter = s32[]{{:T(128)}} get-tuple-element(%in.1), index=0
  %next = s32[]{{:T(128)}} {step}
  %last = s32[]{{:T(128)}} get-tuple-element(%in.1), index=1
  %x = f32[8,4]{{1,0:T(8,128)}} get-tuple-element(%in.1), index=2
  %y = f32[8,4]{{1,0:T(8,128)}} fusion(%x), kind=kLoop, calls=%work, backend_config={{"estimated_cycles":"10","x":"("}}
  ROOT %out.1 = {carry} tuple(%next, %last, %y)
}}

%work (w: f32[8,4]) -> f32[8,4] {{
  %w = f32[8,4]{{1,0:T(8,128)}} parameter(0)
  %square = f32[4,4]{{1,0:T(8,128)}} constant({{...}})
  ROOT %made = f32[8,4]{{1,0:T(8,128)}} convolution(%w, %square), dim_labels=bf_io->bf
}}

%outer_condition (out.0: {plain}) -> pred[] {{
  %three = s32[]{{:T(128)}} constant(3)
  %out.0 = {carry} parameter(0)
  %counter.1 = s32[]{{:T(128)}} get-tuple-element(%out.0), index=0
  ROOT %again.1 = pred[]{{:T(512)}} fusion(%counter.1, %three), kind=kLoop, calls=%less
}}

%outer_body (out.2: {plain}) -> {plain} {{
  %out.2 = {carry} parameter(0)
  %one.2 = s32[]{{:T(128)}} constant(1)
  %counter.2 = s32[]{{:T(128)}} get-tuple-element(%out.2), index=0
  %last.2 = s32[]{{:T(128)}} get-tuple-element(%out.2), index=1
  %x.2 = f32[8,4]{{1,0:T(8,128)}} get-tuple-element(%out.2), index=2
  %start = s32[]{{:T(128)}} copy(%one.2)
  %inner_start = {carry} tuple(%start, %last.2, /*index=2*/%x.2)
  %inner = {carry} while(%inner_start), condition=%inner_condition, body=%inner_body
  %y.2 = f32[8,4]{{1,0:T(8,128)}} get-tuple-element(%inner), index=2
  %last.3 = s32[]{{:T(128)}} get-tuple-element(%inner), index=1
  %next.2 = s32[]{{:T(128)}} add(%one.2, %counter.2)
  ROOT %out.3 = {carry} tuple(%next.2, %last.3, %y.2)
}}

ENTRY %main (a: s32[], b: f32[8,4]) -> f32[8,4] {{
  %a = s32[]{{:T(128)}} parameter(0)
  %b = f32[8,4]{{1,0:T(8,128)}} parameter(1)
  %zero = s32[]{{:T(128)}} constant(0)
  %five = s32[]{{:T(128)}} constant(5)
  %nine = s32[]{{:T(128)}} constant(9)
  %yes = pred[]{{:T(512)}} compare(%a, %zero), direction=GT
  %end = s32[]{{:T(128)}} {end}
  %outer_start = {carry} tuple(%zero, %end, %b)
  %outer = {carry} while(%outer_start), condition=%outer_condition, body=%outer_body
  ROOT %result = f32[8,4]{{1,0:T(8,128)}} get-tuple-element(%outer), index=2
}}
"""


def trips(text: str, **names):
    """Of the outer and the inner loop."""
    module = parse(text)
    entry = Place(module.computations[module.entry])
    outer = entry["outer"]
    body = Place(module.callee(outer, "body"), (outer, entry))
    return trip_count(module, outer, entry), trip_count(module, body["inner"], body)


@pytest.mark.parametrize(
    ("end", "inner"),
    [
        ("copy(%nine)", Value(8)),
        ("add(%five, %nine)", Value(13)),
        ("subtract(%nine, %five)", Value(3)),
        ("multiply(%five, %nine)", Value(44)),
        ("negate(%five)", Value(0)),
        ("maximum(%five, %nine)", Value(8)),
        ("minimum(%five, %nine)", Value(4)),
        ("minimum(%a, %nine)", Value(8, exact=False)),
        ("fusion(%a), kind=kLoop, calls=%smaller", Value(5, exact=False)),
        ("clamp(%zero, %a, %five)", Value(4, exact=False)),
        ("select(%yes, %five, %zero)", Value(4, exact=False)),
        ("copy(%a)", None),
        ("add(%a, %five)", None),
    ],
)
def test_a_loop_runs_as_often_as_the_end_that_the_program_hands_it(end, inner):
    assert trips(program(end)) == (Value(3), inner)


@pytest.mark.parametrize(
    ("step", "inner"),
    [
        ("add(%one, %counter)", Value(8)),
        ("fusion(%counter), kind=kLoop, calls=%bump", Value(4)),
        ("add(%counter, %last)", Value(1)),
        ("multiply(%counter, %one)", None),
    ],
)
def test_a_step_is_read_whatever_form_it_has(step, inner):
    text = program("copy(%nine)", step=step)
    if "%last" in step:
        # An element that stands still is a number like any other, once it has been read.
        text = text.replace("  %next =", "  %last = s32[]{:T(128)} get-tuple-element(%in.1), index=1\n  %next =", 1)
    assert trips(text)[1] == inner


def test_a_comparison_may_be_turned_round_and_another_one_is_not_guessed():
    assert trips(program("copy(%nine)", compared="compare(%last, %counter), direction=GT"))[1] == Value(8)
    assert trips(program("copy(%nine)", compared="compare(%counter, %last), direction=NE"))[1] is None


def test_the_count_that_the_compiler_prints_goes_first():
    text = program("copy(%a)").replace(
        "body=%inner_body", 'body=%inner_body, backend_config={"known_trip_count":{"n":"7"}}'
    )
    assert trips(text)[1] == Value(7)


def test_cycles_and_products_are_counted_as_often_as_they_run():
    sums = estimate(parse(program("copy(%nine)")))
    # 3 x 8 runs of 10 cycles, each a product [8, 4] x [4, 4].
    assert (sums.cycles, sums.flops) == (240, 24 * 2 * 8 * 4 * 4)
    assert sums.bounded == sums.unknown == []
    sums = estimate(parse(program("minimum(%a, %nine)")))
    assert sums.cycles == 240
    assert len(sums.bounded) == 1 and "at most 8 times" in sums.bounded[0] and not sums.unknown
    sums = estimate(parse(program("copy(%a)")))
    assert sums.cycles == 30
    assert not sums.bounded and len(sums.unknown) == 1 and "counted once" in sums.unknown[0]


BODY = """\
HloModule jit_program

%small (s: f32[4]) -> f32[4] {{
  %s = f32[4]{{0}} parameter(0)
  ROOT %s2 = f32[4]{{0}} add(%s, %s), backend_config={{"estimated_cycles":"3"}}
}}

%large (l: f32[4]) -> f32[4] {{
  %l = f32[4]{{0}} parameter(0)
  ROOT %l2 = f32[4]{{0}} multiply(%l, %l), backend_config={{"estimated_cycles":"50"}}
}}

ENTRY %main (i: s32[], x: f32[4]) -> f32[4] {{
  %i = s32[]{{}} parameter(0)
  %x = f32[4]{{0}} parameter(1)
  %y = bf16[16,128]{{1,0}} constant({{...}})
  %ten = s32[]{{}} constant(10)
  %n = s32[]{{}} minimum(%i, %ten)
{lines}
  ROOT %r = f32[4]{{0}} copy(%x)
}}
"""


def sums_of(*lines: str):
    return estimate(parse(BODY.format(lines="\n".join(f"  {line}" for line in lines))))


def test_the_longest_branch_of_a_conditional_counts_and_is_reported():
    for branches in ("branch_computations={%small, %large}", "true_computation=%large, false_computation=%small"):
        sums = sums_of(f"%c = f32[4]{{0}} conditional(%i, %x, %x), {branches}")
        assert sums.cycles == 50 and "longest branch" in sums.unknown[0]


def test_a_branch_with_a_kernel_is_the_longest_for_its_time_stands_elsewhere():
    kernel = """%small (s: f32[4]) -> f32[4] {
  %s = f32[4]{0} parameter(0)
  ROOT %k.1 = f32[4]{0} custom-call(%s), custom_call_target="tpu_custom_call"
}"""
    line = "%c = f32[4]{0} conditional(%i, %x, %x), branch_computations={%small, %large}"
    text = BODY.format(lines=f"  {line}")
    start, end = text.index("%small"), text.index("%large (")
    sums = estimate(parse(text[:start] + kernel + "\n\n" + text[end:]))
    assert set(sums.kernels) == {"k.1"}


def test_a_branch_of_a_conditional_is_not_handed_its_predicate():
    inner = program("copy(%a)")
    # The loop's end is a parameter of the branch; the first operand of the conditional is another number.
    assert trips(inner)[1] is None
    text = BODY.format(lines="  %c = s32[] conditional(%ten, %i, %i), branch_computations={%pass, %pass}").replace(
        "ENTRY", "%pass (q: s32[]) -> s32[] {\n  %q = s32[]{} parameter(0)\n  ROOT %q2 = s32[]{} copy(%q)\n}\n\nENTRY"
    )
    module = parse(text)
    entry = Place(module.computations[module.entry])
    branch = Place(module.computations["pass"], (entry["c"], entry))
    assert value_of(module, branch, "q2") is None


def test_collectives_count_what_a_device_receives():
    sums = sums_of(
        "%a = bf16[16,128]{1,0} all-reduce(%y), to_apply=%small, replica_groups={{0,2},{1,3}}",
        "%s = (bf16[16,128]{1,0}, bf16[64,128]{1,0}) all-gather-start(%y), dimensions={0}, replica_groups=[2,4]<=[8]",
        "%d = bf16[64,128]{1,0} all-gather-done(%s)",
        "%p = u8[32]{0} collective-permute(%y)",
        "%t = (f32[1024]{0}, f32[256]{0}, f32[]) all-reduce-start(%big, %big, %x), to_apply=%small",
        "%m = ((f32[8]{0}, f32[4]{0}), (f32[32]{0}, f32[16]{0})) all-gather-start(%y, %y), dimensions={0}",
        "%rs = f32[64]{0} reduce-scatter(%wide), replica_groups=mesh['a'=2,'b'=4,'c'=2] {'b','c'}, dimensions={0}",
        "%wide = f32[512]{0} copy(%y)",
        # The sum is made in float32 and leaves in bfloat16.
        "%narrow = bf16[512]{0} all-reduce(%wide), replica_groups={{0,1,2,3}}, to_apply=%small",
    )
    of_known_groups = 2 * 16 * 128 * 2 / 2 + 64 * 128 * 2 * 3 / 4 + 512 * 4 * 7 / 8 + 2 * 512 * 4 * 3 / 4
    of_all = 2 * (1024 + 256 + 1) * 4 + (32 + 16) * 4
    assert sums.collective_bytes == of_known_groups + 32 + of_all


def test_a_sum_that_is_scattered_brings_a_device_its_own_part():
    body = "%all-reduce-scatter.1 (p: f32[512]) -> f32[64] {{\n  %p = f32[512]{{0}} parameter(0)\n"
    body += "  %s = f32[512]{{0}} all-reduce(%p), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%small\n"
    body += "  ROOT %c = f32[64]{{0}} dynamic-slice(%s, %i)\n}}\n\nENTRY"
    fusion = "  %f = f32[64]{0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1"
    sums = estimate(parse(BODY.replace("ENTRY", body).format(lines=fusion)))
    assert sums.collective_bytes == 512 * 4 * 7 / 8


def test_kernels_are_named_with_the_steps_of_their_dynamic_axes():
    call = 'custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/k/pallas_call"}'
    sums = sums_of(
        f"%k.1 = f32[4]{{0}} custom-call(%n, %i, %x, %n), {call}",
        f"%k.2 = f32[4]{{0}} custom-call(%x), {call}",
        '%other = f32[4]{0} custom-call(%x), custom_call_target="Sharding"',
    )
    assert sums.kernels == {"k.1": KernelCall(1.0, (10, None)), "k.2": KernelCall(1.0, ())}


def test_products_of_every_form():
    sums = sums_of("%d = f32[16,16]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={1}")
    assert sums.flops == 2 * 16 * 16 * 128
    sums = sums_of("%d = f32[128,128]{1,0} convolution(%y, %y), dim_labels=fb_io->bf")
    assert sums.flops == 2 * 128 * 128 * 16


SPATIAL = (
    # lhs, rhs, result, window, labels, multiplications of one output and input channel: counted by hand.
    ("[4,8,16]", "[4,16,32]", "[4,8,32]", "size=4 stride=3 lhs_dilate=4", "0bf_0io->0bf", 4 * 8 * 32 * 16),
    ("[2,10,3]", "[3,3,5]", "[2,8,5]", "size=3", "b0f_0io->b0f", 2 * 8 * 3 * 5 * 3),
    ("[2,10,3]", "[3,3,5]", "[2,10,5]", "size=3 pad=1_1", "b0f_0io->b0f", 2 * (8 * 3 + 2 * 2) * 5 * 3),
    ("[2,10,3]", "[3,3,5]", "[2,4,5]", "size=3 stride=2", "b0f_0io->b0f", 2 * 4 * 3 * 5 * 3),
    ("[2,10,3]", "[3,3,5]", "[2,6,5]", "size=3 rhs_dilate=2", "b0f_0io->b0f", 2 * 6 * 3 * 5 * 3),
    # A depthwise one: each output reads one input channel.
    ("[2,10,6]", "[3,1,6]", "[2,8,6]", "size=3", "b0f_0io->b0f", 2 * 8 * 3 * 6),
    ("[1,5,7,3]", "[2,3,3,4]", "[1,4,5,4]", "size=2x3", "b01f_01io->b01f", 4 * 5 * 2 * 3 * 4 * 3),
)


@pytest.mark.parametrize(("lhs", "rhs", "result", "window", "labels", "multiplications"), SPATIAL)
def test_a_window_counts_the_taps_that_meet_data(lhs, rhs, result, window, labels, multiplications):
    sums = sums_of(
        f"%l = f32{lhs}{{0}} constant({{...}})",
        f"%k = f32{rhs}{{0}} constant({{...}})",
        f"%d = f32{result}{{0}} convolution(%l, %k), window={{{window}}}, dim_labels={labels}",
    )
    assert sums.flops == 2 * multiplications


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse("HloModule nothing")
