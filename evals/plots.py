"""Rows to charts. One Altair definition per chart; the PNG is rendered without a browser."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import altair as alt

from evals.rows import Cell

# What layering and setting properties may return; all of it can be saved.
Chart = alt.LayerChart | alt.FacetChart
WIDTH, HEIGHT, PIXELS = 560, 340, 2
# Okabe & Ito's palette: told apart with any kind of colour vision, and in print.
PALETTE = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#F0E442")


def save(chart: Chart, path: Path) -> None:
    """Write the chart as PNG at twice its nominal size."""
    chart.save(str(path), format="png", scale_factor=PIXELS)


def _data(rows: Sequence[Mapping[str, object]]) -> alt.Data:
    return alt.Data(values=[dict(row) for row in rows])


def _title(text: str, subtitle: Sequence[str]) -> alt.TitleParams:
    return alt.TitleParams(text=text, subtitle=list(subtitle), anchor="start", subtitleColor="#555")


def _by_method(order: Sequence[str]) -> tuple[alt.Color, alt.Shape]:
    """Return colour and shape by method over one domain, so that they share one legend."""
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(order))]
    return (
        alt.Color("method:N", title=None, sort=list(order), scale=alt.Scale(domain=list(order), range=colours)).legend(
            symbolOpacity=1, labelLimit=420
        ),
        alt.Shape("method:N", title=None, sort=list(order), scale=alt.Scale(domain=list(order))).legend(labelLimit=420),
    )


def perplexity_chart(
    cells: Sequence[Cell], labels: Mapping[str, str], *, original_context: int, model: str, protocol: str
) -> Chart:
    """Return perplexity over length, log-log, one line with 95 % bars per method, a rule at the trained window.

    Args:
        cells: of task "perplexity" under one protocol; failed ones are left out.
        protocol: in words, for the subtitle.
        labels: fingerprint -> how the method is called in the legend, in the legend's order.
    """
    rows = [
        {
            "method": labels[c.fingerprint],
            "length": c.length,
            "value": c.value,
            "low": c.value if c.ci_low is None else c.ci_low,
            "high": c.value if c.ci_high is None else c.ci_high,
        }
        for c in cells
        if c.task == "perplexity" and c.status == "ok"
    ]
    lengths = sorted({c.length for c in cells if c.task == "perplexity"})
    n = max((c.n for c in cells if c.task == "perplexity"), default=0)
    x = alt.X("length:Q", title="tokens of context", scale=alt.Scale(type="log", base=2, nice=False, padding=14))
    x = x.axis(values=lengths, format="d", grid=False)
    order = list(labels.values())
    colour, shape = _by_method(order)
    # Ticks at 1, 2 and 5 times powers of ten inside the data's range: a log axis of its own labels too few or too many.
    peak = max((float(r["high"]) for r in rows), default=10.0)  # pyright: ignore[reportArgumentType]
    floor = min((float(r["low"]) for r in rows), default=1.0)  # pyright: ignore[reportArgumentType]
    decades = range(math.floor(math.log10(floor)), math.ceil(math.log10(peak)) + 1)
    low, high = floor / 1.25, peak * 1.25
    ticks = [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
    y = alt.Y("value:Q", title="perplexity", scale=alt.Scale(type="log", nice=False, domain=[low, high])).axis(
        values=ticks, format="~g"
    )
    base = alt.Chart(_data(rows))
    spread = base.mark_rule(opacity=0.45).encode(x=x, y=alt.Y("low:Q", title="perplexity"), y2="high:Q", color=colour)
    line = base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour)
    point = base.mark_point(filled=True, size=46).encode(x=x, y=y, color=colour, shape=shape)
    window = alt.Chart(_data([{"length": original_context, "text": f"trained window {original_context}"}]))
    rule = window.mark_rule(strokeDash=[5, 4], color="#777").encode(x="length:Q")
    note = window.mark_text(align="left", dx=5, baseline="top", color="#555").encode(
        x="length:Q", y=alt.value(4), text="text:N"
    )
    title = _title(
        f"Perplexity over length: {model}",
        [f"{protocol}, {n} document{'s' * (n != 1)}; bars: 95 % over documents"],
    )
    return alt.layer(spread, line, point, rule, note).properties(width=WIDTH, height=HEIGHT, title=title)


def passkey_chart(cells: Sequence[Cell], label: str, *, original_context: int, model: str, protocol: str = "") -> Chart:
    """Return one method's passkey accuracy, length by place, on a fixed scale from 0 to 1; unmeasured cells stay blank.

    Args:
        cells: of task "passkey", one method and one protocol, each with a depth or each with a position.
        protocol: in words, for the subtitle.
    """
    rows = [
        {
            "length": c.length,
            "place": f"{100 * c.depth:g}%" if c.depth is not None else str(c.position),
            "value": c.value,
            "text": f"{c.value:.2f}",
            "order": c.depth if c.depth is not None else c.position,
        }
        for c in cells
        if c.task == "passkey" and (c.depth, c.position) != (None, None) and c.status == "ok"
    ]
    n = max((c.n for c in cells), default=0)
    absolute = any(c.position is not None for c in cells)
    base = alt.Chart(_data(rows)).encode(
        x=alt.X("length:O", title="tokens of context", axis=alt.Axis(labelAngle=0)),
        y=alt.Y(
            "place:O",
            title="tokens before the key" if absolute else "depth of the key",
            sort=alt.EncodingSortField("order"),
        ),
    )
    scale = alt.Scale(domain=[0, 1], range=["#B2182B", "#F7F0D0", "#1A7837"], interpolate="rgb")
    cell = base.mark_rect(stroke="white").encode(color=alt.Color("value:Q", title="accuracy", scale=scale))
    dark = "datum.value < 0.2 || datum.value > 0.8"
    text = base.mark_text(fontSize=12).encode(
        text="text:N", color=alt.condition(dark, alt.value("white"), alt.value("#333"))
    )
    about = [f"{model}, trained window {original_context} tokens; {n} trials a cell", *([protocol] if protocol else [])]
    title = _title(f"Passkey: {label}", about)
    return alt.layer(cell, text).properties(width=alt.Step(72), height=alt.Step(40), title=title)


def frequencies_chart(ratios: Mapping[str, Sequence[float]], *, context: int, model: str) -> Chart:
    """Return what each method does to each pair: new frequency over old, on a log scale, fastest pair first."""
    rows = [
        {"method": method, "pair": pair, "ratio": ratio}
        for method, values in ratios.items()
        for pair, ratio in enumerate(values)
        if ratio > 0
    ]
    order = list(ratios)
    colour, shape = _by_method(order)
    lowest = min((float(r["ratio"]) for r in rows), default=1.0)  # pyright: ignore[reportArgumentType]
    halvings = [2.0**-k for k in range(math.ceil(-math.log2(lowest) - 1e-6) + 1)]
    chart = alt.Chart(_data(rows)).encode(
        x=alt.X("pair:Q", title="pair (0 turns fastest)", scale=alt.Scale(nice=False)).axis(tickMinStep=1, format="d"),
        y=alt.Y(
            "ratio:Q", title="new frequency / trained frequency", scale=alt.Scale(type="log", nice=False, padding=8)
        ).axis(values=halvings, format=".4~g"),
        color=colour,
    )
    point = chart.mark_point(filled=True, size=34).encode(shape=shape)
    title = _title(f"What each method does to the frequencies: {model}", [f"stretched to {context} tokens"])
    return alt.layer(chart.mark_line(strokeWidth=2), point).properties(width=WIDTH, height=HEIGHT, title=title)


def loss_chart(curve: Sequence[Mapping[str, float]], *, model: str, method: str, context: int) -> Chart:
    """Return the loss of every step.

    Args:
        curve: of "step" and "loss" (nats per token).
    """
    rows = [{"step": line["step"], "loss": line["loss"]} for line in curve]
    base = alt.Chart(_data(rows)).encode(x=alt.X("step:Q", title="step", axis=alt.Axis(format="d", tickMinStep=1)))
    loss = base.mark_line(color=PALETTE[6], strokeWidth=1.5).encode(
        y=alt.Y("loss:Q", title="nats per token", scale=alt.Scale(zero=False))
    )
    title = _title(f"Training loss: {model}", [f"{method}, for a window of {context} tokens"])
    return alt.layer(loss).properties(width=WIDTH, height=HEIGHT, title=title)


def recovery_chart(
    rows: Sequence[Mapping[str, object]], *, title: str, subtitle: Sequence[str], value: str, logarithmic: bool
) -> Chart:
    """Return a value over steps of training, one line with bars a method.

    Args:
        rows: of "method", "step", "value", "low" and "high".
        value: what it is, for the axis.
        logarithmic: of the axis; otherwise it runs from 0 to 1.
    """
    order = list(dict.fromkeys(str(row["method"]) for row in rows))
    steps = sorted({int(str(row["step"])) for row in rows})
    colour, shape = _by_method(order)
    x = alt.X("step:Q", title="steps of training", scale=alt.Scale(type="symlog", constant=5, nice=False, padding=14))
    scale = alt.Scale(type="log", nice=False, padding=10) if logarithmic else alt.Scale(domain=[0, 1])
    y = alt.Y("value:Q", title=value, scale=scale)
    if logarithmic:
        high = max(float(str(row["high"])) for row in rows)
        low = min(float(str(row["low"])) for row in rows)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        y = y.axis(values=[m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high], format="~g")
    base = alt.Chart(_data(rows)).encode(x=x.axis(values=steps, format="d", grid=False))
    spread = base.mark_rule(opacity=0.45).encode(y=alt.Y("low:Q", title=value), y2="high:Q", color=colour)
    line = base.mark_line(strokeWidth=2).encode(y=y, color=colour)
    point = base.mark_point(filled=True, size=46).encode(y=y, color=colour, shape=shape)
    return alt.layer(spread, line, point).properties(width=WIDTH, height=HEIGHT, title=_title(title, subtitle))
