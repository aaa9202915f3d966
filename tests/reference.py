"""The methods once more, in plain float64 Python, written from the papers; it imports nothing of the project.

Each function returns the list of angular frequencies (rad/token, fastest pair first). `d` is the head dimension, `b`
the base, `L` the original window, `s` the factor: the papers' letters.
"""

import math

import numpy as np


def base(d, b):
    """RoFormer, section 3.2.2: theta_i = b^(-2(i-1)/d), i = 1 .. d/2."""
    return [b ** (-2 * i / d) for i in range(d // 2)]


def linear(d, b, s):
    """Position Interpolation, equation 4: f(x, m L / L'), so every angle shrinks by s."""
    return [f / s for f in base(d, b)]


def ntk_theta(d, b, s):
    """YaRN paper, equation 16 (the definition of b'): chosen so that the last pair is interpolated by exactly s."""
    return b * s ** (d / (d - 2))


def ntk(d, b, s):
    return base(d, ntk_theta(d, b, s))


def abf(d, theta):
    return base(d, theta)


def abf_auto_theta(b, L, s):
    """Liu et al. 2023: the critical dimension log_b(L / 2 pi) is held while the window grows to s L."""
    critical = math.log(L / (2 * math.pi), b)
    return (s * L / (2 * math.pi)) ** (1 / critical)


def yarn_pair(d, b, L, turns):
    """Authors' code, find_correction_dim: the pair index whose wavelength fits `turns` times into L."""
    return d * math.log(L / (turns * 2 * math.pi)) / (2 * math.log(b))


def yarn(d, b, L, s, beta_fast=32.0, beta_slow=1.0, truncate=True):
    """Authors' code, YaRN without dynamic scaling: a ramp in the pair index from kept to divided."""
    low, high = yarn_pair(d, b, L, beta_fast), yarn_pair(d, b, L, beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += 0.001
    out = []
    for i, f in enumerate(base(d, b)):
        divided = min(max((i - low) / (high - low), 0.0), 1.0)
        out.append(f / s * divided + f * (1.0 - divided))
    return out


def yarn_paper(d, b, L, s, alpha=1.0, beta=32.0):
    """YaRN paper, equations 17 and 18: gamma(r) from 0 at alpha turns to 1 at beta, h = (1 - gamma) f / s + gamma f."""
    out = []
    for f in base(d, b):
        turns = L * f / (2 * math.pi)
        gamma = min(max((turns - alpha) / (beta - alpha), 0.0), 1.0)
        out.append((1 - gamma) * f / s + gamma * f)
    return out


def p_rope(d, b, p):
    """Round and Round We Go, section 6: the highest p of the frequencies kept, the others 0."""
    kept = math.floor(p * d / 2)
    return [f if i < kept else 0.0 for i, f in enumerate(base(d, b))]


def yarn_scale(s):
    """YaRN paper, equation 22: sqrt(1/t) = 0.1 ln s + 1, on queries and keys each."""
    return 0.1 * math.log(s) + 1.0 if s > 1 else 1.0


def llama3(d, b, L, s, low=1.0, high=4.0):
    """Meta's apply_scaling: by wavelength against L/high and L/low, a blend in L/wavelength between."""
    out = []
    for f in base(d, b):
        wavelength = 2 * math.pi / f
        if wavelength < L / high:
            out.append(f)
        elif wavelength > L / low:
            out.append(f / s)
        else:
            smooth = (L / wavelength - low) / (high - low)
            out.append((1 - smooth) * f / s + smooth * f)
    return out


def dynamic_ntk(d, b, L, l, alpha):
    """emozilla 2023: the base b (alpha l/L - (alpha - 1))^(d/(d-2)) at l > L tokens, b itself up to L."""
    return base(d, b * max(1.0, alpha * l / L - (alpha - 1)) ** (d / (d - 2)))


def dynamic_yarn(d, b, L, l, **ramp):
    """YaRN paper, section 3.3: s = max(1, l / L) at l tokens."""
    return yarn(d, b, L, max(1.0, l / L), **ramp)


def longrope(d, b, factors):
    """LongRoPE, equation 2: theta_i / lambda_i, one factor a pair."""
    return [f / factor for f, factor in zip(base(d, b), factors, strict=True)]


def longrope_scale(L, s):
    """Phi-3's code: sqrt(1 + ln s / ln L) on cos and sin, 1 where nothing is stretched."""
    return math.sqrt(1 + math.log(s) / math.log(L)) if s > 1 else 1.0


def resonance(frequencies):
    """Resonance RoPE, section 3.2: the wavelength 2 pi / theta rounded to the nearest integer."""
    return [2 * math.pi / round(2 * math.pi / f) if f else 0.0 for f in frequencies]


def example_factors(d, s):
    """Return (short, long) lists such as a search might find, for tests: one a pair, short ones near 1."""
    n = d // 2
    short = [1 + i / (8 * n) for i in range(n)]
    return short, [round(s ** (i / (n - 1)), 4) for i in range(n)]


def spell_factors(d, s):
    short, long = (";".join(map(repr, factors)) for factors in example_factors(d, s))
    return f"longrope:short_factor={short}:long_factor={long}"


# (name of the geometry, d, b, L, s): a window too short for whole ramps, Llama-1/2/3, and a small head.
GEOMETRIES = (
    ("tiny", 16, 10_000.0, 64, 4.0),
    ("bundled", 32, 10_000.0, 256, 8.0),
    ("llama2", 128, 10_000.0, 4096, 16.0),
    ("llama3", 128, 500_000.0, 8192, 4.0),
    ("llama32", 64, 500_000.0, 8192, 32.0),
)


def alibi_slopes(n):
    """ALiBi authors' code, get_slopes: for a power of two a geometric sequence that starts at its own ratio.

    Of other numbers the slopes of the power below, and then every second one of twice that power.
    """
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]
    below = 2 ** math.floor(math.log2(n))
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: n - below]


def alibi_attention(q, k, v, slopes, positions, first):
    """ALiBi paper, section 3: softmax(q_i K^T + m [-(i-1), ..., -1, 0]) for one head, float64.

    `q` holds the queries from number `first` on, (queries, d); `k` and `v` all keys, (keys, d); a key that a query
    may not see has the position None.
    """
    q, k, v = (np.asarray(each, dtype=np.float64) for each in (q, k, v))
    out = np.zeros((len(q), v.shape[1]))
    for row, query in enumerate(q):
        i = first + row
        seen = [j for j in range(i + 1) if positions[j] is not None]
        if not seen or positions[i] is None:
            continue
        logits = k[seen] @ query / math.sqrt(len(query))
        logits -= slopes * np.array([positions[i] - positions[j] for j in seen], dtype=np.float64)
        weights = np.exp(logits - logits.max())
        out[row] = weights @ v[seen] / weights.sum()
    return out


def goldens():
    """Return {method: {"geometry" or "geometry@tokens": {"inv_freq": [...], "attention_scale": x}}}.

    Without "@tokens" the sequence fills the window. Methods come with their defaults and in variants.
    """
    table = {}
    for name, d, b, L, s in GEOMETRIES:
        rows = {
            "unscaled": (base(d, b), 1.0),
            "linear": (linear(d, b, s), 1.0),
            "abf": (abf(d, abf_auto_theta(b, L, s)), 1.0),
            "abf:theta=1000000": (abf(d, 1e6), 1.0),
            "ntk": (ntk(d, b, s), 1.0),
            "yarn": (yarn(d, b, L, s), yarn_scale(s)),
            "yarn:truncate=false": (yarn(d, b, L, s, truncate=False), yarn_scale(s)),
            "yarn:beta_fast=16:beta_slow=2:attention_scale=1": (yarn(d, b, L, s, 16.0, 2.0), 1.0),
            "yarn:ramp=rotations": (yarn_paper(d, b, L, s), yarn_scale(s)),
            "ntk-by-parts": (yarn(d, b, L, s), 1.0),
            "ntk-by-parts:beta_fast=16:beta_slow=2:truncate=false": (yarn(d, b, L, s, 16.0, 2.0, truncate=False), 1.0),
            "p-rope": (p_rope(d, b, 0.75), 1.0),
            "p-rope:fraction=0.3": (p_rope(d, b, 0.3), 1.0),
            "nope": ([0.0] * (d // 2), 1.0),
            "alibi": ([0.0] * (d // 2), 1.0),
            "llama3": (llama3(d, b, L, s), 1.0),
            "llama3:low_freq_factor=2:high_freq_factor=8": (llama3(d, b, L, s, 2.0, 8.0), 1.0),
            "resonance": (resonance(base(d, b)), 1.0),
            "resonance:over=yarn": (resonance(yarn(d, b, L, s)), yarn_scale(s)),
            "resonance:over=ntk-by-parts:beta_fast=16": (resonance(yarn(d, b, L, s, 16.0)), 1.0),
            "resonance:over=p-rope": (resonance(p_rope(d, b, 0.75)), 1.0),
        }
        for method, (inv_freq, scale) in rows.items():
            table.setdefault(method, {})[name] = {"inv_freq": inv_freq, "attention_scale": scale}
        short, long = example_factors(d, s)
        for l in (L - 1, L, L + 1, round(1.5 * L), round(s * L), round(s * L) + 7):
            growth = max(1.0, l / L)
            rows = {
                "dynamic-ntk": (dynamic_ntk(d, b, L, l, s), 1.0),
                "dynamic-ntk:alpha=1": (dynamic_ntk(d, b, L, l, 1.0), 1.0),
                "dynamic-yarn": (dynamic_yarn(d, b, L, l), yarn_scale(growth)),
                "dynamic-yarn:beta_fast=16:truncate=false:attention_scale=1": (
                    dynamic_yarn(d, b, L, l, beta_fast=16.0, truncate=False),
                    1.0,
                ),
                spell_factors(d, s): (longrope(d, b, short if l <= L else long), longrope_scale(L, s)),
                spell_factors(d, s) + ":attention_scale=1.1": (longrope(d, b, short if l <= L else long), 1.1),
            }
            for method, (inv_freq, scale) in rows.items():
                table.setdefault(method, {})[f"{name}@{l}"] = {"inv_freq": inv_freq, "attention_scale": scale}
    return table
