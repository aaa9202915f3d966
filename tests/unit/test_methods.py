"""Every method against golden vectors from the papers, against its promises, and against known-wrong formulas."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rope_ext import ContextError, MethodError, PositionPlan, RopeGeometry
from rope_ext.geometry import base_inv_freq
from rope_ext.registry import known_methods, method, parse_method
from tests import reference, strategies

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "methods.json").read_text())
GEOMETRIES = {name: (d, b, L, s) for name, d, b, L, s in reference.GEOMETRIES}
CASES = [(spelled, name) for spelled, rows in GOLDEN.items() for name in rows]
# fp32 inputs carry 2^-24 relative error, the exponentials and quotients a few more roundings.
RTOL = 1e-6


def geometry(name):
    d, b, original, _ = GEOMETRIES[name]
    return RopeGeometry(head_dim=d, theta=b, original_context=original)


def context(name):
    _, _, original, s = GEOMETRIES[name]
    return round(original * s)


def check(plan: PositionPlan, golden):
    """Compare whole vectors: swapped halves keep every mean, sum and maximum."""
    torch.testing.assert_close(plan.inv_freq.double(), torch.tensor(golden["inv_freq"]).double(), rtol=RTOL, atol=0)
    assert math.isclose(plan.attention_scale, golden["attention_scale"], rel_tol=1e-12)


def test_goldens_are_what_the_reference_gives():
    assert json.loads(json.dumps(reference.goldens())) == GOLDEN


@pytest.mark.parametrize("name", known_methods())
def test_every_method_has_goldens(name):
    assert name in GOLDEN, f"add {name} to tests/reference.py and run scripts/regen_golden.py"


@pytest.mark.parametrize(("spelled", "name"), CASES)
def test_plan_is_golden(spelled, name):
    rope = geometry(name)
    plan = parse_method(spelled).plan(rope, context=context(name), seq_len=rope.original_context)
    assert plan.inv_freq.dtype == torch.float32
    check(plan, GOLDEN[spelled][name])


# Methods that change a model even where nothing is stretched: they stop pairs instead of slowing them.
NO_IDENTITY = {"nope", "p-rope"}


@pytest.mark.parametrize("name", sorted(set(known_methods()) - NO_IDENTITY))
@given(rope=strategies.geometries())
def test_factor_one_changes_no_bit(name, rope):
    plan = method(name).plan(rope, context=rope.original_context, seq_len=1)
    assert torch.equal(plan.inv_freq, rope.inv_freq)
    assert plan.attention_scale == 1.0


@pytest.mark.parametrize("name", sorted(set(known_methods()) - NO_IDENTITY - {"abf"}))
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
    for name in known_methods():
        chosen = method(name)
        keys = {chosen.frequency_key(rope, context=target, seq_len=n) for n in (1, seq_len)}
        assert len(keys) == 1
        plans = [chosen.plan(rope, context=target, seq_len=n).inv_freq for n in (1, seq_len)]
        assert torch.equal(*plans)


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


def _swapped(inv_freq):
    return inv_freq[len(inv_freq) // 2 :] + inv_freq[: len(inv_freq) // 2]


MUTANTS = {
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
    for geometry_name, golden in GOLDEN[spelled].items():
        d, b, L, s = GEOMETRIES[geometry_name]
        scale = wrong_scale(s) if wrong_scale else golden["attention_scale"]
        plan = PositionPlan(inv_freq=torch.tensor(wrong(d, b, L, s), dtype=torch.float32), attention_scale=scale)
        try:
            check(plan, golden)
        except AssertionError:
            return
    pytest.fail(f"no golden tells {name!r} from {spelled}")


@pytest.mark.parametrize("spelled", GOLDEN)
def test_the_reference_itself_passes_where_mutants_fail(spelled):
    for golden in GOLDEN[spelled].values():
        check(
            PositionPlan(inv_freq=torch.tensor(golden["inv_freq"]), attention_scale=golden["attention_scale"]), golden
        )


@pytest.mark.parametrize("name", known_methods())
def test_a_smaller_window_than_the_original_is_refused(name):
    rope = RopeGeometry(head_dim=16, theta=1e4, original_context=256)
    with pytest.raises(ContextError, match="128 is below the original window of 256"):
        method(name).plan(rope, context=128, seq_len=1)


@pytest.mark.parametrize("name", sorted(set(known_methods()) - {"unscaled", "linear", "nope", "p-rope"}))
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


def test_geometry_with_its_own_frequencies_is_respected():
    inv_freq = base_inv_freq(16, 1e4) / 2
    rope = RopeGeometry(head_dim=16, theta=1e4, original_context=64, inv_freq=inv_freq)
    assert torch.equal(method("unscaled").plan(rope, context=64, seq_len=1).inv_freq, inv_freq)
    assert torch.equal(method("linear").plan(rope, context=128, seq_len=1).inv_freq, inv_freq / 2)
