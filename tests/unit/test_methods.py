"""Every method against golden vectors from the papers, against its promises, and against known-wrong formulas."""

import json
import math
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rope_ext import ContextError, MethodError, PositionPlan, RopeGeometry
from rope_ext.geometry import base_inv_freq
from rope_ext.plan import label, spell
from rope_ext.registry import known_methods, method, parse_method
from tests import reference, strategies

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "methods.json").read_text())
GEOMETRIES = {name: (d, b, L, s) for name, d, b, L, s in reference.GEOMETRIES}
CASES = [(spelled, place) for spelled, rows in GOLDEN.items() for place in rows]
# Methods that follow the length, and those that change a model even where nothing is stretched: some stop pairs,
# resonance rounds. longrope is nothing without the lists that a search found.
DYNAMIC = {"dynamic-ntk", "dynamic-yarn"}
NO_IDENTITY = {"alibi", "nope", "p-rope", "resonance", "longrope"}
INTERPOLATING = sorted(set(known_methods()) - NO_IDENTITY - DYNAMIC - {"abf"})


def short_id(value):
    return value if len(value) < 60 else f"{value[:20]}..{zlib.crc32(value.encode()):08x}"


# fp32 inputs carry 2^-24 relative error, the exponentials and quotients a few more roundings.
RTOL = 1e-6


def place(name):
    """Return geometry, window and current length of a golden's key, "geometry" or "geometry@tokens"."""
    name, _, tokens = name.partition("@")
    d, b, original, s = GEOMETRIES[name]
    window = round(original * s)
    return RopeGeometry(head_dim=d, theta=b, original_context=original), window, int(tokens or window)


def check(plan: PositionPlan, golden):
    """Compare whole vectors: swapped halves keep every mean, sum and maximum."""
    torch.testing.assert_close(plan.inv_freq.double(), torch.tensor(golden["inv_freq"]).double(), rtol=RTOL, atol=0)
    assert math.isclose(plan.attention_scale, golden["attention_scale"], rel_tol=1e-12)


def test_goldens_are_what_the_reference_gives():
    assert json.loads(json.dumps(reference.goldens())) == GOLDEN


@pytest.mark.parametrize("name", known_methods())
def test_every_method_has_goldens(name):
    assert name in {spelled.split(":")[0] for spelled in GOLDEN}, (
        f"add {name} to tests/reference.py and run scripts/regen_golden.py"
    )


@pytest.mark.parametrize(("spelled", "name"), CASES, ids=short_id)
def test_plan_is_golden(spelled, name):
    rope, window, tokens = place(name)
    plan = parse_method(spelled).plan(rope, context=window, seq_len=tokens)
    assert plan.inv_freq.dtype == torch.float32
    check(plan, GOLDEN[spelled][name])


@pytest.mark.parametrize("name", sorted(set(known_methods()) - NO_IDENTITY))
@given(rope=strategies.geometries())
def test_factor_one_changes_no_bit(name, rope):
    plan = method(name).plan(rope, context=rope.original_context, seq_len=1)
    assert torch.equal(plan.inv_freq, rope.inv_freq)
    assert plan.attention_scale == 1.0


@pytest.mark.parametrize("name", INTERPOLATING)
@given(rope=strategies.geometries(), factor=strategies.factors)
def test_interpolation_stays_between_kept_and_divided(name, rope, factor):
    target = round(rope.original_context * factor)
    factor = target / rope.original_context
    new = method(name).plan(rope, context=target, seq_len=1).inv_freq.double()
    old = rope.inv_freq.double()
    slack = 1 + RTOL
    assert bool((new <= old * slack).all())
    assert bool((new * slack >= old / factor).all())
    assert bool((new[1:] < new[:-1]).all())
    ratio = new / old
    assert bool((ratio[1:] <= ratio[:-1] * slack).all())


@given(rope=strategies.geometries(), factor=strategies.factors)
def test_abf_moves_the_pair_of_one_turn_to_one_turn_of_the_new_window(rope, factor):
    """The exemption from the bounds above: abf slows the last pairs by more than the factor, anchored elsewhere."""
    target = round(rope.original_context * factor)
    new = method("abf").plan(rope, context=target, seq_len=1).inv_freq.double()
    theta = float(new[1]) ** (-rope.head_dim / 2)
    pair = math.log(rope.original_context / (2 * math.pi)) / math.log(rope.theta)
    assert math.isclose(theta ** (-pair) * target, 2 * math.pi, rel_tol=1e-4)


@given(rope=strategies.geometries(), factor=strategies.factors)
def test_ntk_keeps_the_first_pair_and_divides_the_last(rope, factor):
    target = round(rope.original_context * factor)
    new = method("ntk").plan(rope, context=target, seq_len=1).inv_freq
    assert new[0] == rope.inv_freq[0]
    expected = rope.inv_freq[-1].double() / (target / rope.original_context)
    torch.testing.assert_close(new[-1].double(), expected, rtol=1e-5, atol=0)


@given(rope=strategies.geometries(), factor=strategies.factors, seq_len=st.integers(1, 2**20))
def test_static_methods_ignore_the_current_length(rope, factor, seq_len):
    target = round(rope.original_context * factor)
    for name in set(known_methods()) - DYNAMIC - {"longrope"}:
        chosen = method(name)
        keys = {chosen.frequency_key(rope, context=target, seq_len=n) for n in (1, seq_len)}
        assert len(keys) == 1
        plans = [chosen.plan(rope, context=target, seq_len=n).inv_freq for n in (1, seq_len)]
        assert torch.equal(*plans)


@pytest.mark.parametrize("name", sorted(DYNAMIC))
@given(rope=strategies.geometries(), factor=strategies.factors, share=st.floats(0, 1))
def test_dynamic_methods_leave_the_original_window_alone(name, rope, factor, share):
    target = round(rope.original_context * factor)
    tokens = max(1, round(share * rope.original_context))
    for length in (1, tokens, rope.original_context):
        assert method(name).frequency_key(rope, context=target, seq_len=length) == "original"
        plan = method(name).plan(rope, context=target, seq_len=length)
        assert torch.equal(plan.inv_freq, rope.inv_freq)
        assert plan.attention_scale == 1.0


@pytest.mark.parametrize("name", sorted(DYNAMIC))
@given(rope=strategies.geometries(), factor=strategies.factors, ahead=st.integers(1, 2**20))
def test_dynamic_methods_grow_with_every_token_beyond_it(name, rope, factor, ahead):
    target = round(rope.original_context * factor)
    chosen, length = method(name), rope.original_context + ahead
    assert chosen.frequency_key(rope, context=target, seq_len=length) == length
    plans = [chosen.plan(rope, context=target, seq_len=n).inv_freq.double() for n in (length, 2 * length)]
    assert bool((plans[1] <= plans[0] * (1 + RTOL)).all())
    if name == "dynamic-ntk":  # yarn may keep every pair of a short head
        assert plans[1][-1] < plans[0][-1]


def test_dynamic_ntk_bases_of_llama2():
    """Llama-2's head, window and base at alpha 2: the base at 1.5, 2 and 4 windows."""
    rope = RopeGeometry(head_dim=128, theta=1e4, original_context=4096)
    for tokens, theta in ((6144, 20221.2617), (8192, 30527.7367), (16384, 72195.8601)):
        plan = method("dynamic-ntk").plan(rope, context=8192, seq_len=tokens)
        torch.testing.assert_close(
            plan.inv_freq.double(), torch.tensor(reference.base(128, theta)).double(), rtol=RTOL, atol=0
        )


@given(rope=strategies.geometries(), factor=strategies.factors)
def test_resonance_wavelengths_are_whole_tokens(rope, factor):
    target = round(rope.original_context * factor)
    inner = method("yarn").plan(rope, context=target, seq_len=1)
    plan = method("resonance", over=method("yarn")).plan(rope, context=target, seq_len=1)
    wavelengths = 2 * math.pi / plan.inv_freq.double()
    # fp32 holds a wavelength to 2^-24 of itself; beyond 2^20 tokens that alone is no whole token any more
    near = wavelengths < 2**20
    torch.testing.assert_close(wavelengths[near], wavelengths[near].round(), rtol=RTOL, atol=0)
    assert bool(((wavelengths - 2 * math.pi / inner.inv_freq.double()).abs()[near] <= 0.5 + 0.2).all())
    assert plan.attention_scale == inner.attention_scale


@given(rope=strategies.geometries(), factor=strategies.factors)
def test_longrope_switches_after_the_original_window(rope, factor):
    target = round(rope.original_context * factor)
    n = rope.num_pairs
    chosen = method("longrope", long_factor=(2.0,) * n)
    for tokens, key, division in ((1, "short", 1), (rope.original_context, "short", 1), (2**21, "long", 2)):
        assert chosen.frequency_key(rope, context=target, seq_len=tokens) == key
        plan = chosen.plan(rope, context=target, seq_len=tokens)
        assert torch.equal(plan.inv_freq, rope.inv_freq / division)
    just_beyond = chosen.plan(rope, context=target, seq_len=rope.original_context + 1)
    assert torch.equal(just_beyond.inv_freq, rope.inv_freq / 2)


@given(rope=strategies.geometries())
def test_yarn_scale_is_one_at_factor_one_and_the_papers_fit_above(rope):
    for factor, scale in ((2, 1.0693147), (4, 1.1386294), (8, 1.2079442), (16, 1.2772589), (32, 1.3465736)):
        plan = method("yarn").plan(rope, context=factor * rope.original_context, seq_len=1)
        assert math.isclose(plan.attention_scale, scale, rel_tol=1e-7)


@given(rope=strategies.geometries(), factor=strategies.factors)
def test_llama3_bands(rope, factor):
    target = round(rope.original_context * factor)
    factor = target / rope.original_context
    ratio = method("llama3").plan(rope, context=target, seq_len=1).inv_freq.double() / rope.inv_freq.double()
    assert bool((ratio[rope.rotations > 4] == 1).all())
    torch.testing.assert_close(
        ratio[rope.rotations < 1], torch.full_like(ratio[rope.rotations < 1], 1 / factor), rtol=RTOL, atol=0
    )


@given(rope=strategies.geometries(), factor=strategies.factors)
def test_linear_is_the_same_as_dividing_positions(rope, factor):
    assume(factor > 1)
    target = round(rope.original_context * factor)
    new = method("linear").plan(rope, context=target, seq_len=1).inv_freq.double()
    scaled_position = 1000 / (target / rope.original_context)
    torch.testing.assert_close(1000 * new, scaled_position * rope.inv_freq.double(), rtol=RTOL, atol=0)


# Wrong formulas that were published, shipped, or are one slip away. (spelling of the method, wrong plan)
def _inverted_yarn(d, b, L, s):
    return [f / s + f - y for f, y in zip(reference.base(d, b), reference.yarn(d, b, L, s), strict=True)]


def _inverted_llama3(d, b, L, s):
    return [f / s + f - y for f, y in zip(reference.base(d, b), reference.llama3(d, b, L, s), strict=True)]


def _harmonic_yarn(d, b, L, s):
    return [1 / (1 / f + g * (s - 1) / f) for f, g in zip(reference.base(d, b), _ramp(d, b, L), strict=True)]


def _ramp(d, b, L, rounded=lambda low, high: (math.floor(low), math.ceil(high))):
    low, high = rounded(reference.yarn_pair(d, b, L, 32.0), reference.yarn_pair(d, b, L, 1.0))
    low, high = max(low, 0), min(high, d - 1)
    return [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(d // 2)]


def _yarn_with(ramp):
    return lambda d, b, L, s: [
        f * (1 - g) + f / s * g for f, g in zip(reference.base(d, b), ramp(d, b, L), strict=True)
    ]


def _paper_ramp(d, b, L):
    turns = [L * f / (2 * math.pi) for f in reference.base(d, b)]
    return [1 - min(max((r - 1) / 31, 0.0), 1.0) for r in turns]


def _llama3_by_wavelength(d, b, L, s):
    out = []
    for f in reference.base(d, b):
        w = 2 * math.pi / f
        g = min(max((w - L / 4) / (L - L / 4), 0.0), 1.0)
        out.append((1 - g) * f + g * f / s)
    return out


def _long_at_every_length(d, b, _L, s, _l):
    return reference.longrope(d, b, reference.example_factors(d, s)[1])


def _short_at_every_length(d, b, _L, s, _l):
    return reference.longrope(d, b, reference.example_factors(d, s)[0])


def _rounded(rounding):
    return lambda d, b, L, s: [2 * math.pi / rounding(2 * math.pi / f) for f in reference.base(d, b)]


def _swapped(inv_freq):
    return inv_freq[len(inv_freq) // 2 :] + inv_freq[: len(inv_freq) // 2]


LONGROPE = reference.spell_factors(16, 4.0)

# Where goldens have a length l of their own, the wrong formula takes it as a fifth argument.
MUTANTS = {
    "alpha forgotten": ("dynamic-ntk", lambda d, b, L, s, l: reference.dynamic_ntk(d, b, L, l, 1.0), None),
    "alpha where 1 was asked": (
        "dynamic-ntk:alpha=1",
        lambda d, b, L, s, l: reference.dynamic_ntk(d, b, L, l, s),
        None,
    ),
    "static at the window": ("dynamic-ntk:alpha=1", lambda d, b, L, s, l: reference.ntk(d, b, s), None),
    "window of the target, dynamic": (
        "dynamic-ntk",
        lambda d, b, L, s, l: reference.dynamic_ntk(d, b, s * L, l, s),
        None,
    ),
    "alpha - 1 not taken off": (
        "dynamic-ntk",
        lambda d, b, L, s, l: reference.base(d, b * max(1.0, s * l / L) ** (d / (d - 2))),
        None,
    ),
    "dynamic exponent 1": (
        "dynamic-ntk",
        lambda d, b, L, s, l: reference.base(d, b * max(1.0, s * l / L - (s - 1))),
        None,
    ),
    "one token late": (
        "dynamic-ntk",
        lambda d, b, L, s, l: reference.dynamic_ntk(d, b, L, max(L, l - 1), s),
        None,
    ),
    "positions divided instead": (
        "dynamic-ntk:alpha=1",
        lambda d, b, L, s, l: reference.linear(d, b, max(1.0, l / L)),
        None,
    ),
    "static yarn": ("dynamic-yarn", lambda d, b, L, s, l: reference.yarn(d, b, L, s), None),
    "factor of the window in the temperature": (
        "dynamic-yarn",
        lambda d, b, L, s, l: reference.dynamic_yarn(d, b, L, l),
        reference.yarn_scale,
    ),
    "only short factors": (LONGROPE, _short_at_every_length, None),
    "only long factors": (LONGROPE, _long_at_every_length, None),
    "long at the original length": (
        LONGROPE,
        lambda d, b, L, s, l: reference.longrope(d, b, reference.example_factors(d, s)[l >= L]),
        None,
    ),
    "factors multiplied": (
        LONGROPE,
        lambda d, b, L, s, l: [
            f * k for f, k in zip(reference.base(d, b), reference.example_factors(d, s)[l > L], strict=True)
        ],
        None,
    ),
    "longrope scale without the root": (
        LONGROPE,
        lambda d, b, L, s, l: reference.longrope(d, b, reference.example_factors(d, s)[l > L]),
        lambda s: reference.longrope_scale(64, s) ** 2,
    ),
    "yarn's scale under longrope": (
        LONGROPE,
        lambda d, b, L, s, l: reference.longrope(d, b, reference.example_factors(d, s)[l > L]),
        reference.yarn_scale,
    ),
    "wavelengths rounded down": ("resonance", _rounded(math.floor), None),
    "wavelengths rounded up": ("resonance", _rounded(math.ceil), None),
    "wavelengths not rounded": ("resonance", lambda d, b, L, s: reference.base(d, b), None),
    "rounded before, not after, the method": (
        "resonance:over=yarn",
        lambda d, b, L, s: [
            r * y / f
            for r, y, f in zip(
                reference.resonance(reference.base(d, b)), reference.yarn(d, b, L, s), reference.base(d, b), strict=True
            )
        ],
        None,
    ),
    "wrapped method's scale lost": (
        "resonance:over=yarn",
        lambda d, b, L, s: reference.resonance(reference.yarn(d, b, L, s)),
        lambda s: 1.0,
    ),
    "factor applied twice": ("linear", lambda d, b, L, s: reference.linear(d, b, s * s), None),
    "factor multiplied, not divided": ("linear", lambda d, b, L, s: reference.linear(d, b, 1 / s), None),
    "halves swapped": ("linear", lambda d, b, L, s: _swapped(reference.linear(d, b, s)), None),
    "exponent d/(d-1)": ("ntk", lambda d, b, L, s: reference.base(d, b * s ** (d / (d - 1))), None),
    "exponent 1": ("ntk", lambda d, b, L, s: reference.base(d, b * s), None),
    "factor twice in the base": ("ntk", lambda d, b, L, s: reference.ntk(d, b, s * s), None),
    "ntk halves swapped": ("ntk", lambda d, b, L, s: _swapped(reference.ntk(d, b, s)), None),
    "pairs counted from 1": (
        "ntk",
        lambda d, b, L, s: [f * reference.ntk_theta(d, b, s) ** (-2 / d) for f in reference.ntk(d, b, s)],
        None,
    ),
    "base divided, not replaced": (
        "abf:theta=1000000",
        lambda d, b, L, s: [f * b / 1e6 for f in reference.base(d, b)],
        None,
    ),
    "blend inverted": ("yarn", _inverted_yarn, None),
    "truncated inwards": (
        "yarn",
        _yarn_with(lambda d, b, L: _ramp(d, b, L, lambda lo, hi: (math.ceil(lo), math.floor(hi)))),
        None,
    ),
    "not truncated": ("yarn", _yarn_with(lambda d, b, L: _ramp(d, b, L, lambda lo, hi: (lo, hi))), None),
    "truncated though told not to": ("yarn:truncate=false", reference.yarn, None),
    "ramp in turns, as the paper": ("yarn", _yarn_with(_paper_ramp), None),
    "blend of wavelengths": ("yarn", _harmonic_yarn, None),
    "window of the target": ("yarn", lambda d, b, L, s: reference.yarn(d, b, L * s, s), None),
    "betas swapped": ("yarn", lambda d, b, L, s: reference.yarn(d, b, L, s, 1.0, 32.0), None),
    "yarn halves swapped": ("yarn", lambda d, b, L, s: _swapped(reference.yarn(d, b, L, s)), None),
    "code ramp where the paper's was asked": ("yarn:ramp=rotations", reference.yarn, None),
    "gamma inverted": (
        "yarn:ramp=rotations",
        lambda d, b, L, s: [
            f / s + f - y for f, y in zip(reference.base(d, b), reference.yarn_paper(d, b, L, s), strict=True)
        ],
        None,
    ),
    "temperature where none belongs": ("ntk-by-parts", reference.yarn, reference.yarn_scale),
    "by-parts truncated though told not to": (
        "ntk-by-parts:beta_fast=16:beta_slow=2:truncate=false",
        lambda d, b, L, s: reference.yarn(d, b, L, s, 16.0, 2.0),
        None,
    ),
    "slow pairs kept, fast ones stopped": ("p-rope", lambda d, b, L, s: reference.p_rope(d, b, 0.75)[::-1], None),
    "one pair too many": (
        "p-rope:fraction=0.3",
        lambda d, b, L, s: reference.p_rope(d, b, 0.3 + 2 / d),
        None,
    ),
    "partial dimensions, not pairs": (
        "p-rope",
        lambda d, b, L, s: [b ** (-2 * i / (0.75 * d)) if i < 0.75 * d / 2 else 0.0 for i in range(d // 2)],
        None,
    ),
    "scale squared": ("yarn", reference.yarn, lambda s: reference.yarn_scale(s) ** 2),
    "scale squared twice": ("yarn", reference.yarn, lambda s: reference.yarn_scale(s) ** 4),
    "scale inverted": ("yarn", reference.yarn, lambda s: 1 / reference.yarn_scale(s)),
    "scale forgotten": ("yarn", reference.yarn, lambda s: 1.0),
    "scale with log10": ("yarn", reference.yarn, lambda s: 0.1 * math.log10(s) + 1),
    "llama3 blend inverted": ("llama3", _inverted_llama3, None),
    "llama3 blend in wavelength": ("llama3", _llama3_by_wavelength, None),
    "llama3 window of the target": ("llama3", lambda d, b, L, s: reference.llama3(d, b, L * s, s), None),
    "llama3 bounds swapped": ("llama3", lambda d, b, L, s: reference.llama3(d, b, L, s, 4.0, 16.0), None),
    "llama3 without 2 pi": ("llama3", lambda d, b, L, s: reference.llama3(d, b, L * 2 * math.pi, s), None),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_goldens_reject_the_mutant(name):
    spelled, wrong, wrong_scale = MUTANTS[name]
    for where, golden in GOLDEN[spelled].items():
        rope, window, tokens = place(where)
        numbers = (rope.head_dim, rope.theta, rope.original_context, window / rope.original_context)
        scale = wrong_scale(numbers[-1]) if wrong_scale else golden["attention_scale"]
        inv_freq = wrong(*numbers, tokens) if "@" in where else wrong(*numbers)
        plan = PositionPlan(inv_freq=torch.tensor(inv_freq, dtype=torch.float32), attention_scale=scale)
        try:
            check(plan, golden)
        except AssertionError:
            return
    pytest.fail(f"no golden tells {name!r} from {spelled}")


@pytest.mark.parametrize("spelled", GOLDEN, ids=short_id)
def test_the_reference_itself_passes_where_mutants_fail(spelled):
    for golden in GOLDEN[spelled].values():
        check(
            PositionPlan(inv_freq=torch.tensor(golden["inv_freq"]), attention_scale=golden["attention_scale"]), golden
        )


@pytest.mark.parametrize("name", known_methods())
def test_a_smaller_window_than_the_original_is_refused(name):
    rope = RopeGeometry(head_dim=16, theta=1e4, original_context=256)
    chosen = method(name, **{"long_factor": (1.0,) * 8} if name == "longrope" else {})
    with pytest.raises(ContextError, match="128 is below the original window of 256"):
        chosen.plan(rope, context=128, seq_len=1)


@pytest.mark.parametrize(
    "name", sorted(set(known_methods()) - {"alibi", "unscaled", "linear", "nope", "p-rope", "resonance"})
)
def test_methods_that_need_a_plain_base_refuse_a_scaled_one(name):
    rope = RopeGeometry(head_dim=16, theta=1e4, original_context=256, inv_freq=base_inv_freq(16, 1e4) / 2)
    with pytest.raises(MethodError, match="already scaled"):
        method(name).plan(rope, context=512, seq_len=1)


@pytest.mark.parametrize(
    ("spelled", "words"),
    [
        ("yarn:beta_fast=1:beta_slow=32", "beta_fast > beta_slow"),
        ("yarn:beta_fast=32:beta_slow=32", "beta_fast > beta_slow"),
        ("yarn:beta_slow=0", "beta_fast > beta_slow > 0"),
        ("yarn:attention_scale=0", "attention_scale"),
        ("yarn:attention_scale=nan", "attention_scale"),
        ("yarn:ramp=rotations:truncate=false", "no effect on ramp=rotations"),
        ("yarn:ramp=paper", "ramp = 'paper' is refused"),
        ("ntk-by-parts:beta_fast=1", "ntk-by-parts: beta_fast 1 and beta_slow 1"),
        ("p-rope:fraction=0", r"outside \(0, 1\]; use nope"),
        ("p-rope:fraction=1.5", r"outside \(0, 1\]"),
        ("dynamic-ntk:alpha=0", "alpha 0"),
        ("dynamic-ntk:alpha=inf", "alpha inf"),
        ("dynamic-yarn:beta_fast=1", "dynamic-yarn: beta_fast 1 and beta_slow 1"),
        ("dynamic-yarn:attention_scale=-1", "dynamic-yarn: attention_scale -1"),
        ("longrope:attention_scale=0", "longrope: attention_scale 0"),
        ("longrope:long_factor=1;0;2", "long_factor of pair 1 is 0.0; it must be a positive number"),
        ("longrope:short_factor=1;nan", "short_factor of pair 1 is nan"),
        ("resonance:over=resonance:over=yarn", "over another resonance"),
        ("resonance:over=yran", "did you mean 'yarn'"),
        ("resonance:over=yarn:beta=1", "did you mean 'beta_fast'|'beta' is not a hyper-parameter"),
        ("llama3:low_freq_factor=4:high_freq_factor=4", "high_freq_factor > low_freq_factor"),
        ("abf:theta=1", "theta"),
        ("abf:theta=inf", "theta"),
    ],
)
def test_bad_hyperparameters_are_refused(spelled, words):
    with pytest.raises(MethodError, match=words):
        parse_method(spelled)


def test_a_base_below_the_checkpoints_is_refused():
    rope = RopeGeometry(head_dim=64, theta=500_000.0, original_context=8192)
    with pytest.raises(MethodError, match="below the checkpoint's own 500000"):
        parse_method("abf:theta=10000").plan(rope, context=16384, seq_len=1)


def test_ntk_is_undefined_for_one_pair():
    rope = RopeGeometry(head_dim=2, theta=1e4, original_context=64)
    with pytest.raises(MethodError, match="head_dim 2"):
        method("ntk").plan(rope, context=128, seq_len=1)


def test_yarn_refuses_a_ramp_outside_the_pairs():
    """The published code would silently leave everything untouched here (all pairs turn less than once)."""
    rope = RopeGeometry(head_dim=16, theta=1e4, original_context=1)
    with pytest.raises(MethodError, match="no pair turns between"):
        method("yarn").plan(rope, context=16, seq_len=1)


def test_abf_auto_refuses_a_window_in_which_nothing_turns():
    rope = RopeGeometry(head_dim=16, theta=1e4, original_context=4)
    with pytest.raises(MethodError, match="no pair turns once in 4 tokens"):
        method("abf").plan(rope, context=16, seq_len=1)


def test_p_rope_needs_one_pair():
    rope = RopeGeometry(head_dim=16, theta=1e4, original_context=64)
    with pytest.raises(MethodError, match="less than one"):
        method("p-rope", fraction=0.1).plan(rope, context=64, seq_len=1)


KINDS = r"""
import json, re
import numpy as np, torch
from rope_ext import MethodError
from rope_ext.plan import hyperparameters, spell
from rope_ext.registry import known_methods, method

known = known_methods()
for name, values, words in (
    ("yarn", {"beta_fast": "16"}, "yarn: beta_fast is '16'; it must be of the kind of 32.0"),
    ("yarn", {"truncate": 1}, "yarn: truncate is 1; it must be of the kind of True"),
    ("yarn", {"attention_scale": None}, "yarn: attention_scale is None; it must be of the kind of 'auto'"),
    ("yarn", {"beta_fast": True}, "beta_fast is True"),
    ("longrope", {"long_factor": "x.json"}, "long_factor is 'x.json'"),
    ("longrope", {"long_factor": 3.0}, "long_factor is 3.0"),
    ("resonance", {"over": "yarn"}, r"over is 'yarn'; it must be a method, as Yarn\(\), or None"),
    ("resonance", {"over": known["yarn"]}, r"it must be a method, as Yarn\(\)"),
    ("p-rope", {"fraction": 1j}, "fraction is 1j"),
    ("abf", {"theta": [1e6]}, "theta is"),
):
    try:
        known[name](**values)
    except MethodError as error:
        assert re.search(words, str(error)), error
    else:
        raise AssertionError((name, values))
# Numbers of numpy and torch come out plain, so that spelling, fingerprint and records know one form.
for value in (np.float64(16), np.float32(16), np.int64(16), 16):
    chosen = known["yarn"](beta_fast=value)
    assert chosen == method("yarn", beta_fast=16.0)
    assert type(chosen.beta_fast) is float
    assert spell(chosen) == "yarn:beta_fast=16"
wanted = method("longrope", long_factor=(1.0, 2.0))
for values in ([1, 2], np.array([1.0, 2.0]), torch.tensor([1.0, 2.0])):
    assert known["longrope"](long_factor=values) == wanted
assert json.dumps(dict(hyperparameters(wanted)))
"""


def test_values_of_other_kinds_are_made_plain_or_refused():
    """In a process of its own: under pytest the annotations are checked before a method sees what came."""
    subprocess.run([sys.executable, "-c", KINDS], check=True, cwd=Path(__file__).parent.parent.parent)


def test_a_base_beyond_floats_is_refused():
    rope = RopeGeometry(head_dim=16, theta=1e4, original_context=64)
    with pytest.raises(MethodError, match="alpha 1e\\+300 gives no base"):
        method("dynamic-ntk", alpha=1e300).plan(rope, context=256, seq_len=65)


def test_resonance_needs_a_static_method():
    rope = RopeGeometry(head_dim=16, theta=1e4, original_context=64)
    for spelled in ("dynamic-ntk", "dynamic-yarn", reference.spell_factors(16, 4.0)):
        with pytest.raises(MethodError, match="follows the current length; wrap a static method"):
            parse_method(f"resonance:over={spelled}").plan(rope, context=256, seq_len=1)


def test_resonance_over_a_scaled_base_refuses_where_the_wrapped_method_does():
    rope = RopeGeometry(head_dim=16, theta=1e4, original_context=64, inv_freq=base_inv_freq(16, 1e4) / 2)
    expected = reference.resonance([f / 4 for f in reference.base(16, 1e4)])
    plan = parse_method("resonance:over=linear").plan(rope, context=128, seq_len=1)
    torch.testing.assert_close(plan.inv_freq.double(), torch.tensor(expected).double(), rtol=RTOL, atol=0)
    with pytest.raises(MethodError, match="yarn: not defined over frequencies that are already scaled"):
        parse_method("resonance:over=yarn").plan(rope, context=128, seq_len=1)


def test_longrope_needs_factors_that_fit():
    rope = RopeGeometry(head_dim=16, theta=1e4, original_context=64)
    with pytest.raises(MethodError, match="no factors; give long_factor=FILE"):
        method("longrope").plan(rope, context=256, seq_len=1)
    with pytest.raises(MethodError, match="short_factor has 2 numbers; head_dim 16 needs 8"):
        method("longrope", short_factor=(1, 1), long_factor=(1,) * 8).plan(rope, context=256, seq_len=1)


FACTOR_FILES = {
    "list.json": "[1, 1.5, 2]",
    "object.json": '{"short_factor": [1, 1, 1], "long_factor": [1, 1.5, 2]}',
    "config.json": '{"model_type": "phi3", "rope_scaling": {"type": "longrope", "long_factor": [1, 1.5, 2]}}',
    "new.json": '{"rope_parameters": {"rope_type": "longrope", "long_factor": [1, 1.5, 2]}, "hidden_size": 3}',
    "columns.csv": "short_factor, long_factor\n1, 1\n1, 1.5\n1, 2\n",
    "column.csv": "1\n1.5\n2\n",
    "row.csv": "1,1.5,2\n",
    "excel.csv": "\ufeff1,1.5,2\n",
    "CAPITALS.JSON": "[1, 1.5, 2]",
}


@pytest.mark.parametrize("name", FACTOR_FILES)
def test_factor_files(tmp_path, name):
    (tmp_path / name).write_text(FACTOR_FILES[name])
    chosen = parse_method(f"longrope:long_factor={tmp_path / name}")
    assert chosen.long_factor == (1.0, 1.5, 2.0)
    assert parse_method(spell(chosen)) == chosen
    assert re.fullmatch(r"longrope:long_factor=#[0-9a-f]{8}", label(chosen))
    assert label(chosen) != label(method("longrope", long_factor=(1, 1.5, 3)))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gone.json", None, "cannot be read: No such file"),
        ("bad.json", "[1, 2", "is not JSON"),
        ("other.json", '{"factors": [1]}', "has no such key; it has: factors"),
        ("scalar.json", '{"long_factor": 2}', "holds no list"),
        ("words.json", '["a", 1]', "not a number"),
        ("true.json", "[true, 1]", "not a number"),
        ("empty.json", "[]", "holds no numbers"),
        ("empty.csv", "", "holds no numbers"),
        ("header.csv", "a,b\n1,2\n", "has no column of that name; it starts with: a,b"),
        ("ragged.csv", "x,long_factor\n1,2\n3\n", "rows that are too short for its column 2"),
        ("words.csv", "1\ntwo\n", "not a number"),
        ("binary.csv", b"\xff\xfe", "not UTF-8"),
        ("deep.json", "[" * 200_000, "is not JSON"),
        ("huge.json", "[" + "9" * 400 + "]", "not a number"),
        ("wide.csv", "1" * 140_000, "is not CSV: field larger"),
        ("newline.json", '{"a\\nb": 1}', "it has: a b"),
        ("negative.csv", "1\n-2\n", "long_factor of pair 1 is -2.0"),
    ],
)
def test_factor_files_that_are_none(tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(MethodError, match=words) as caught:
        parse_method(f"longrope:long_factor={tmp_path / name}")
    assert "\n" not in str(caught.value)


def test_geometry_with_its_own_frequencies_is_respected():
    inv_freq = base_inv_freq(16, 1e4) / 2
    rope = RopeGeometry(head_dim=16, theta=1e4, original_context=64, inv_freq=inv_freq)
    assert torch.equal(method("unscaled").plan(rope, context=64, seq_len=1).inv_freq, inv_freq)
    assert torch.equal(method("linear").plan(rope, context=128, seq_len=1).inv_freq, inv_freq / 2)
