"""Rows to charts. One Altair definition per chart; the PNG is rendered without a browser."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from evals.rows import Cell

# What layering and setting properties may return; all of it can be saved.
Chart = alt.LayerChart | alt.FacetChart
Spec = dict[str, Any]
WIDTH, HEIGHT, PIXELS = 560, 340, 2
# Okabe & Ito's palette: told apart with any kind of colour vision, and in print.
PALETTE = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#8A8A8A")
SHAPES = ("circle", "square", "triangle-up", "cross", "diamond", "triangle-right", "triangle-down")
"""One fewer than colours, so that a second round of these comes with other shapes."""


def save(chart: Chart, path: Path) -> None:
    """Write the chart as PNG at twice its nominal size."""
    chart.save(str(path), format="png", scale_factor=PIXELS)


def spec(chart: Chart) -> Spec:
    """Return the chart as Vega-Lite, for a page; its width follows the page unless it counts in steps."""
    found = chart.to_dict()
    if isinstance(found.get("width"), int):
        found["width"] = "container"
        found["autosize"] = {"type": "fit-x", "contains": "padding"}
    found["config"] = {**found.get("config", {}), "background": "transparent"}
    return found


def javascript() -> str:
    """Return the code that draws specs in a browser without a network: vega, vega-lite and vega-embed."""
    import vl_convert  # late: it starts a JavaScript engine

    return vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]  (its stub has no defaults)


def _data(rows: Sequence[Mapping[str, object]]) -> alt.Data:
    return alt.Data(values=[dict(row) for row in rows])


def _title(text: str, subtitle: Sequence[str]) -> alt.TitleParams:
    return alt.TitleParams(text=text, subtitle=list(subtitle), anchor="start", subtitleColor="#555")


def _by_method(order: Sequence[str]) -> tuple[alt.Color, alt.Shape]:
    """Return colour and shape by method over one domain, so that they share one legend."""
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(order))]
    shapes = [SHAPES[i % len(SHAPES)] for i in range(len(order))]
    return (
        alt.Color("method:N", title=None, sort=list(order), scale=alt.Scale(domain=list(order), range=colours)).legend(
            symbolOpacity=1, labelLimit=420
        ),
        alt.Shape("method:N", title=None, sort=list(order), scale=alt.Scale(domain=list(order), range=shapes)).legend(
            labelLimit=420
        ),
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
    told = [alt.Tooltip(f"{name}:{kind}") for name, kind in (("method", "N"), ("length", "Q"))]
    told += [alt.Tooltip(f"{name}:Q", format=".4~g") for name in ("value", "low", "high")]
    point = base.mark_point(filled=True, size=46).encode(x=x, y=y, color=colour, shape=shape, tooltip=told)
    rule, note = _window(original_context)
    title = _title(
        f"Perplexity over length: {model}",
        [f"{protocol}, {n} document{'s' * (n != 1)}; bars: 95 % over documents"],
    )
    return alt.layer(spread, line, point, rule, note).properties(width=WIDTH, height=HEIGHT, title=title)


def _window(original_context: int) -> tuple[alt.Chart, alt.Chart]:
    """Return a rule at the trained window on an axis of lengths, and its name."""
    window = alt.Chart(_data([{"length": original_context, "text": f"trained window {original_context}"}]))
    rule = window.mark_rule(strokeDash=[5, 4], color="#777").encode(x="length:Q")
    note = window.mark_text(align="left", dx=5, baseline="top", color="#555").encode(
        x="length:Q", y=alt.value(4), text="text:N"
    )
    return rule, note


def position_chart(
    rows: Sequence[Mapping[str, object]], order: Sequence[str], *, original_context: int, model: str
) -> Chart:
    """Return nats per token by position, one line with 95 % bars a method: where in a long document a method fails.

    Args:
        rows: of "method", "length" (the end of a range that begins at the one before), "value", "low" and "high".
        order: of the legend.
    """
    lengths = sorted({int(str(row["length"])) for row in rows})
    colour, shape = _by_method(order)
    x = alt.X("length:Q", title="tokens from the start", scale=alt.Scale(type="log", base=2, nice=False, padding=14))
    x = x.axis(values=lengths, format="d", grid=False)
    y = alt.Y("value:Q", title="nats per token", scale=alt.Scale(zero=False))
    base = alt.Chart(_data(rows)).encode(x=x, color=colour)
    spread = base.mark_rule(opacity=0.45).encode(y=alt.Y("low:Q", title="nats per token"), y2="high:Q")
    told = [alt.Tooltip("method:N"), alt.Tooltip("length:Q", title="up to"), alt.Tooltip("value:Q", format=".4~g")]
    point = base.mark_point(filled=True, size=46).encode(y=y, shape=shape, tooltip=told)
    title = _title(f"Where in a document it reads: {model}", ["the tokens up to each position, from the one before"])
    layers = (spread, base.mark_line(strokeWidth=2).encode(y=y), point, *_window(original_context))
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT, title=title)


HEAT = alt.Scale(domain=[0, 1], scheme="cividis")
"""From dark to light with the value, in any kind of colour vision and in grey."""


def passkey_maps(rows: Sequence[Mapping[str, object]], *, native: int | None, absolute: bool, title: str) -> Chart:
    """Return passkey accuracy by length and place of the method that is picked, from 0 to 1; blank is not measured.

    Args:
        rows: of "method", "length", "place" (in words), "order" (its number), "value", "low", "high" and "n".
        native: the last measured length within the trained window, after which a line is drawn.
        absolute: places are tokens before the key, not fractions of the length.
    """
    names = list(dict.fromkeys(str(row["method"]) for row in rows))
    picked = alt.param("picked", value=_fullest(rows), bind=alt.binding_select(options=names, name="method "))
    cell, text = _heat(rows, "value", HEAT, "accuracy", absolute=absolute)
    kept = f"datum.method === {picked.name}"
    drawn = (cell.transform_filter(kept), text.transform_filter(kept), *_native_edge(native))
    return _in_steps(alt.layer(*drawn).add_params(picked), title, "share found, 0 to 1; blank: not measured")


def passkey_difference(
    rows: Sequence[Mapping[str, object]], *, native: int | None, absolute: bool, title: str
) -> Chart:
    """Return how the passkey accuracy of one picked method differs from another's, on a scale from -1 to 1.

    Args:
        rows: as for `passkey_maps`.
    """
    names = list(dict.fromkeys(str(row["method"]) for row in rows))
    first = alt.param("first", value=_fullest(rows), bind=alt.binding_select(options=names, name="method "))
    second = alt.param("second", value=names[0], bind=alt.binding_select(options=names, name="less "))
    scale = alt.Scale(domain=[-1, 1], scheme="purpleorange")
    cell, text = _heat(rows, "difference", scale, "difference", absolute=absolute)

    def paired(chart: alt.Chart) -> alt.Chart:
        return (
            chart.transform_calculate(ours=f"datum.method === {first.name} ? datum.value : null")
            .transform_calculate(theirs=f"datum.method === {second.name} ? datum.value : null")
            .transform_aggregate(
                ours="max(ours)",
                theirs="max(theirs)",
                a="valid(ours)",
                b="valid(theirs)",
                groupby=["length", "place", "order"],
            )
            .transform_filter("datum.a > 0 && datum.b > 0")
            .transform_calculate(difference="datum.ours - datum.theirs")
        )

    drawn = (paired(cell), paired(text), *_native_edge(native))
    about = "share found, the first less the second; paired intervals are in the table of differences"
    return _in_steps(alt.layer(*drawn).add_params(first, second), title, about)


def _fullest(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the method with the largest values, of which a reader wants to see the map first."""
    totals: dict[str, float] = {}
    for row in rows:
        totals[str(row["method"])] = totals.get(str(row["method"]), 0.0) + float(str(row["value"]))
    return max(totals, key=lambda name: totals[name])


def _places(rows: Sequence[Mapping[str, object]], *, absolute: bool) -> alt.Chart:
    """Return the frame of a map: lengths to the right, places of the key downwards."""
    return alt.Chart(_data(rows)).encode(
        x=alt.X("length:O", title="tokens of context", axis=alt.Axis(labelAngle=0)),
        y=alt.Y(
            "place:O",
            title="tokens before the key" if absolute else "depth of the key",
            sort=alt.EncodingSortField("order"),
        ),
    )


def _heat(
    rows: Sequence[Mapping[str, object]], value: str, scale: alt.Scale, name: str, *, absolute: bool
) -> tuple[alt.Chart, alt.Chart]:
    base = _places(rows, absolute=absolute)
    told = [alt.Tooltip("length:O"), alt.Tooltip("place:O"), alt.Tooltip(f"{value}:Q", format=".2f")]
    if value == "value":
        told += [alt.Tooltip("low:Q", format=".2f"), alt.Tooltip("high:Q", format=".2f"), alt.Tooltip("n:Q")]
    cell = base.mark_rect(stroke="white").encode(color=alt.Color(f"{value}:Q", title=name, scale=scale), tooltip=told)
    dark = "datum.value < 0.55" if value == "value" else "abs(datum.difference) > 0.7"
    text = base.mark_text(fontSize=12).encode(
        text=alt.Text(f"{value}:Q", format=".2f" if value == "value" else "+.2f"),
        color=alt.condition(dark, alt.value("white"), alt.value("#222")),
    )
    return cell, text


def _native_edge(native: int | None) -> tuple[alt.Chart, ...]:
    """Return a line behind the last length that the model was trained for, if one was measured."""
    if native is None:
        return ()
    edge = alt.Chart(_data([{"length": native}])).mark_rule(strokeDash=[5, 4], strokeWidth=2, color="#D55E00")
    return (edge.encode(x=alt.X("length:O", bandPosition=1)),)


def _in_steps(chart: Chart, title: str, about: str) -> Chart:
    return chart.properties(width=alt.Step(72), height=alt.Step(40), title=_title(title, [about]))


def effective_chart(rows: Sequence[Mapping[str, object]], *, lengths: Sequence[int], original_context: int) -> Chart:
    """Return how far each method reaches: a bar to the effective length, a tick where the intervals' lower ends put it.

    Args:
        rows: of "method", "reached" and "bound" in tokens; a shortest length that is missed is None.
        lengths: that were measured.
    """
    start = min(lengths) / 2
    drawn = [
        {
            "method": row["method"],
            "start": start,
            "reached": row["reached"] or start,
            "bound": row["bound"] or start,
            "text": f"below {min(lengths)}" if row["reached"] is None else f"{row['reached']}",
        }
        for row in rows
    ]
    order = [str(row["method"]) for row in rows]
    scale = alt.Scale(type="log", base=2, nice=False, domain=[start, max(lengths) * 1.35])
    x = alt.X("start:Q", title="tokens of context", scale=scale).axis(values=list(lengths), format="d")
    base = alt.Chart(_data(drawn)).encode(y=alt.Y("method:N", title=None, sort=order, axis=alt.Axis(labelLimit=320)))
    bar = base.mark_bar(color=PALETTE[2], height=16).encode(x=x, x2="reached:Q")
    tick = base.mark_tick(color="#000", thickness=3, height=22).encode(x=alt.X("bound:Q", scale=scale))
    text = base.mark_text(align="left", dx=6).encode(x=alt.X("reached:Q", scale=scale), text="text:N")
    rule = alt.Chart(_data([{"length": original_context}])).mark_rule(strokeDash=[5, 4], color="#777")
    title = _title("How far passkeys are found", ["bar: by the shares; tick: by the lower ends of their intervals"])
    layers = (bar, tick, text, rule.encode(x=alt.X("length:Q", scale=scale)))
    return alt.layer(*layers).properties(width=WIDTH, height=30 * len(drawn), title=title)


def wavelength_chart(
    wavelengths: Mapping[str, Sequence[float]], *, original_context: int, context: int, model: str
) -> Chart:
    """Return the wavelength of every pair under each method; above the trained window lie angles never seen in full.

    Args:
        wavelengths: tokens per turn, fastest pair first; pairs that do not turn are left out.
    """
    rows = [
        {"method": name, "pair": pair, "wavelength": value}
        for name, values in wavelengths.items()
        for pair, value in enumerate(values)
        if math.isfinite(value)
    ]
    colour, shape = _by_method(list(wavelengths))
    high = max((float(str(row["wavelength"])) for row in rows), default=10.0) * 1.3
    low = min((float(str(row["wavelength"])) for row in rows), default=1.0) / 1.3
    scale = alt.Scale(type="log", nice=False, domain=[low, max(high, context * 1.3)])
    y = alt.Y("wavelength:Q", title="tokens per turn", scale=scale).axis(format="~s")
    chart = alt.Chart(_data(rows)).encode(
        x=alt.X("pair:Q", title="pair (0 turns fastest)", scale=alt.Scale(nice=False)).axis(tickMinStep=1, format="d"),
        y=y,
        color=colour,
    )
    told = [alt.Tooltip("method:N"), alt.Tooltip("pair:Q"), alt.Tooltip("wavelength:Q", format=",.1f")]
    unseen = alt.Chart(_data([{"from": original_context, "to": max(high, context * 1.3)}])).mark_rect(opacity=0.12)
    shade = unseen.encode(y=alt.Y("from:Q", scale=scale, title="tokens per turn"), y2="to:Q", color=alt.value("#777"))
    marks = [{"length": original_context, "text": f"trained window {original_context}"}]
    marks.append({"length": context, "text": f"stretched to {context}"})
    lines = alt.Chart(_data(marks)).encode(y=alt.Y("length:Q", scale=scale))
    rule = lines.mark_rule(strokeDash=[5, 4], color="#777")
    note = lines.mark_text(align="left", dy=-7, color="#555").encode(x=alt.value(6), text="text:N")
    point = chart.mark_point(filled=True, size=34).encode(shape=shape, tooltip=told)
    about = ["shaded: pairs that did not turn once inside the trained window, so that part of their angles is new"]
    layers = (shade, rule, note, chart.mark_line(strokeWidth=2), point)
    return alt.layer(*layers).properties(
        width=WIDTH, height=HEIGHT, title=_title(f"Wavelength of every pair: {model}", about)
    )


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
    base = _places(rows, absolute=absolute)
    cell = base.mark_rect(stroke="white").encode(color=alt.Color("value:Q", title="accuracy", scale=HEAT))
    text = base.mark_text(fontSize=12).encode(
        text="text:N", color=alt.condition("datum.value < 0.55", alt.value("white"), alt.value("#222"))
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


def live_wavelengths(
    rows: Sequence[Mapping[str, object]], order: Sequence[str], *, original_context: int, factor: float, model: str
) -> Chart:
    """Return the wavelength of every pair at one factor, which a page moves by the signal `factor`.

    Args:
        rows: method, pair, factor, wavelength (tokens per turn), unseen (whether angles are met that training never
            showed).
        factor: shown first.
    """
    chosen = alt.param(name="factor", value=factor)
    colour, shape = _by_method(order)
    high = max([original_context * 2.0, *(float(str(row["wavelength"])) for row in rows)]) * 1.3
    low = min([original_context / 2.0, *(float(str(row["wavelength"])) for row in rows)]) / 1.3
    scale = alt.Scale(type="log", nice=False, domain=[low, high])
    chart = (
        alt.Chart(_data(rows))
        .transform_filter(alt.datum.factor == chosen)
        .encode(
            x=alt.X("pair:Q", title="pair (0 turns fastest)", scale=alt.Scale(nice=False)).axis(
                tickMinStep=1, format="d"
            ),
            y=alt.Y("wavelength:Q", title="tokens per turn", scale=scale).axis(format="~s"),
            color=colour,
        )
    )
    told = [alt.Tooltip("method:N"), alt.Tooltip("pair:Q"), alt.Tooltip("wavelength:Q", format=",.1f")]
    told.append(alt.Tooltip("unseen:N", title="meets unseen angles"))
    above = alt.Chart(_data([{"from": original_context, "to": high}])).mark_rect(opacity=0.12)
    shade = above.encode(y=alt.Y("from:Q", scale=scale), y2="to:Q", color=alt.value("#777"))
    rule = alt.Chart(_data([{"length": original_context, "text": f"trained window {original_context:,}"}]))
    line = rule.mark_rule(strokeDash=[5, 4], color="#777").encode(y=alt.Y("length:Q", scale=scale))
    note = rule.mark_text(align="left", dy=-7, color="#555").encode(
        x=alt.value(6), y=alt.Y("length:Q", scale=scale), text="text:N"
    )
    seen = chart.transform_filter("!datum.unseen").mark_point(filled=True, size=38).encode(shape=shape, tooltip=told)
    unseen = chart.transform_filter("datum.unseen").mark_point(filled=False, size=38).encode(shape=shape, tooltip=told)
    about = ["hollow: meets angles that training never showed", "shaded: did not turn once in training"]
    return (
        alt.layer(shade, line, note, chart.mark_line(strokeWidth=2), seen, unseen)
        .add_params(chosen)
        .properties(width=WIDTH, height=HEIGHT, title=_title(f"Wavelength of every pair: {model}", about))
    )


def live_ratios(rows: Sequence[Mapping[str, object]], order: Sequence[str], *, factor: float, model: str) -> Chart:
    """Return new frequency over trained frequency of every pair at one factor, moved by the signal `factor`."""
    chosen = alt.param(name="factor", value=factor)
    colour, shape = _by_method(order)
    turning = [row for row in rows if float(str(row["ratio"])) > 0]
    lowest = min((float(str(row["ratio"])) for row in turning), default=1.0)
    halvings = [2.0**-k for k in range(math.ceil(-math.log2(lowest) - 1e-6) + 1)]
    scale = alt.Scale(type="log", nice=False, domain=[lowest / 1.1, 1.1])
    chart = (
        alt.Chart(_data(turning))
        .transform_filter(alt.datum.factor == chosen)
        .encode(
            x=alt.X("pair:Q", title="pair (0 turns fastest)", scale=alt.Scale(nice=False)).axis(
                tickMinStep=1, format="d"
            ),
            y=alt.Y("ratio:Q", title="new frequency / trained frequency", scale=scale).axis(
                values=halvings, format=".4~g"
            ),
            color=colour,
        )
    )
    told = [alt.Tooltip("method:N"), alt.Tooltip("pair:Q"), alt.Tooltip("ratio:Q", format=".4f")]
    point = chart.mark_point(filled=True, size=34).encode(shape=shape, tooltip=told)
    return (
        alt.layer(chart.mark_line(strokeWidth=2), point)
        .add_params(chosen)
        .properties(width=WIDTH, height=HEIGHT, title=_title(f"What is left of every frequency: {model}", []))
    )


def live_scores(
    rows: Sequence[Mapping[str, object]], order: Sequence[str], *, original_context: int, factor: float, model: str
) -> Chart:
    """Return the score of a query and an equal key over their distance, moved by the signal `factor`.

    Args:
        rows: method, factor, distance (tokens), score (1 at distance 0 where attention is not rescaled).
    """
    chosen = alt.param(name="factor", value=factor)
    colour, _ = _by_method(order)
    chart = (
        alt.Chart(_data(rows))
        .transform_filter(alt.datum.factor == chosen)
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("distance:Q", title="distance, tokens", scale=alt.Scale(type="log", base=2, nice=False)).axis(
                format=",", labelOverlap=True
            ),
            y=alt.Y("score:Q", title="score / score of the untouched model at 0"),
            color=colour,
            tooltip=[
                alt.Tooltip("method:N"),
                alt.Tooltip("distance:Q", format=","),
                alt.Tooltip("score:Q", format=".3f"),
            ],
        )
    )
    mark = alt.Chart(_data([{"length": original_context, "text": f"trained window {original_context:,}"}]))
    rule = mark.mark_rule(strokeDash=[5, 4], color="#777").encode(x="length:Q")
    note = mark.mark_text(align="right", dx=-4, color="#555").encode(x="length:Q", y=alt.value(10), text="text:N")
    about = ["a query and a key of ones: the mean over pairs", "of the cosine of the angle between them"]
    return (
        alt.layer(rule, note, chart)
        .add_params(chosen)
        .properties(width=WIDTH, height=HEIGHT, title=_title(f"Score over distance: {model}", about))
    )


def live_cache(
    rows: Sequence[Mapping[str, object]], *, heads: int, tokens: int, dtype: str, weights: Sequence[tuple[str, float]]
) -> Chart:
    """Return the size of the key-value cache over length, moved by the signals `heads`, `tokens` and `dtype`.

    Args:
        rows: heads (key heads), tokens, dtype, gigabytes.
        weights: sizes in GB that the cache is held against, each with its name.
    """
    params = [alt.param(name=n, value=v) for n, v in (("heads", heads), ("tokens", tokens), ("dtype", dtype))]
    here, length, kind = params
    names = list(dict.fromkeys(str(row["dtype"]) for row in rows))
    colours = alt.Scale(domain=names, range=list(PALETTE[2 : 2 + len(names)]))
    values = [float(str(row["gigabytes"])) for row in rows] + [size for _, size in weights]
    scale = alt.Scale(type="log", nice=False, domain=[min(values) / 1.3, max(values) * 1.6])
    chart = (
        alt.Chart(_data(rows))
        .transform_filter(alt.datum.heads == here)
        .encode(
            x=alt.X("tokens:Q", title="tokens in the cache", scale=alt.Scale(type="log", base=2, nice=False)).axis(
                format=",", labelOverlap=True
            ),
            y=alt.Y("gigabytes:Q", title="GB a sequence", scale=scale).axis(format="~g"),
            color=alt.Color("dtype:N", title=None, sort=names, scale=colours),
            tooltip=[
                alt.Tooltip("dtype:N"),
                alt.Tooltip("tokens:Q", format=","),
                alt.Tooltip("gigabytes:Q", format=".3g"),
            ],
        )
    )
    at = chart.transform_filter(f"datum.tokens == {length.name} && datum.dtype == {kind.name}")
    marks = alt.Chart(_data([{"gigabytes": size, "text": name} for name, size in weights]))
    rule = marks.mark_rule(strokeDash=[5, 4], color="#777").encode(y=alt.Y("gigabytes:Q", scale=scale))
    note = marks.mark_text(align="left", dy=-7, color="#555").encode(
        x=alt.value(6), y=alt.Y("gigabytes:Q", scale=scale), text="text:N"
    )
    return (
        alt.layer(rule, note, chart.mark_line(strokeWidth=2), at.mark_point(filled=True, size=110))
        .add_params(*params)
        .properties(width=WIDTH, height=HEIGHT, title=_title("Key-value cache over length", []))
    )


def live_prefill(rows: Sequence[Mapping[str, object]], *, tokens: int) -> Chart:
    """Return operations of a prefill over length, those of weights and of attention apart; `tokens` is a signal.

    Args:
        rows: tokens, part ("products with weights" or "attention"), operations.
    """
    length = alt.param(name="tokens", value=tokens)
    names = list(dict.fromkeys(str(row["part"]) for row in rows))
    chart = alt.Chart(_data(rows)).encode(
        x=alt.X("tokens:Q", title="tokens in the prompt", scale=alt.Scale(type="log", base=2, nice=False)).axis(
            format=",", labelOverlap=True
        ),
        y=alt.Y("operations:Q", title="floating-point operations", scale=alt.Scale(type="log", nice=False)).axis(
            format=".0e"
        ),
        color=alt.Color(
            "part:N", title=None, sort=names, scale=alt.Scale(domain=names, range=[PALETTE[6], PALETTE[4]])
        ),
        tooltip=[alt.Tooltip("part:N"), alt.Tooltip("tokens:Q", format=","), alt.Tooltip("operations:Q", format=".3e")],
    )
    at = chart.transform_filter(alt.datum.tokens == length)
    return (
        alt.layer(chart.mark_line(strokeWidth=2), at.mark_point(filled=True, size=110))
        .add_params(length)
        .properties(width=WIDTH, height=HEIGHT, title=_title("Cost of a prefill over length", []))
    )


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


def curves_chart(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x: str,
    y: str,
    title: str,
    subtitle: Sequence[str],
    logarithmic: bool,
) -> Chart:
    """Return named curves on a linear scale upwards, with a mark at every point where these are few.

    Args:
        curves: points from left to right.
        x, y: what the axes show.
        logarithmic: of the axis to the right.
    """
    rows = [{"method": name, "x": right, "y": up} for name, points in curves.items() for right, up in points]
    colour, shape = _by_method(list(curves))
    scale = alt.Scale(type="log", base=2, nice=False) if logarithmic else alt.Scale(nice=False)
    base = alt.Chart(_data(rows)).encode(
        x=alt.X("x:Q", title=x, scale=scale).axis(format=",d"),
        y=alt.Y("y:Q", title=y, scale=alt.Scale(nice=False, padding=8)).axis(format="~g"),
        color=colour,
    )
    layers = [base.mark_line(strokeWidth=2)]
    if max(len(points) for points in curves.values()) <= 64:
        layers.append(base.mark_point(filled=True, size=34).encode(shape=shape))
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT, title=_title(title, subtitle))
