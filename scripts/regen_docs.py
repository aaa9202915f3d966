"""Draw the pictures of docs/methods/ and fill the tables of docs/: what readers make of an export, what was measured.

python scripts/regen_docs.py            # write
python scripts/regen_docs.py --check    # say whether pictures and tables are current

A picture is current if it was drawn from the present numbers and words, of which it holds a checksum: its bytes depend
on the fonts of the machine and on the version of Vega too.
"""

import argparse
import functools
import hashlib
import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from evals import plots
from evals.rows import Cell, read_cells
from rope_ext.errors import ExportError
from rope_ext.export import portability
from rope_ext.geometry import RopeGeometry
from rope_ext.patch import active_patch_table, extend
from rope_ext.plan import Method, PositionPlan, spell
from rope_ext.readers import READERS
from rope_ext.registry import known_methods, method, parse_method

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = DOCS / "methods"
RESULTS = ROOT / "recipes" / "results"

# Pictures: LLaMA-2 7B's heads, base and window, stretched by 8.
GEOMETRY = RopeGeometry(head_dim=128, theta=10_000.0, original_context=4096, num_heads=32)
CONTEXT = 8 * GEOMETRY.original_context
MODEL = "LLaMA-2's geometry"
# Lists of the right form and not from any search: divisors that grow from 1 to the factor.
SHORT = tuple(round(1 + 0.5 * (i / 63) ** 2, 4) for i in range(64))
LONG = tuple(round(1 + 7 * (i / 63) ** 1.5, 4) for i in range(64))
LISTS = method("longrope", short_factor=SHORT, long_factor=LONG)


class Picture(NamedTuple):
    """What is drawn: one of the charts of evals/plots.py and all that it is given."""

    chart: Callable[..., plots.Chart]
    values: Mapping[str, Any]

    @property
    def checksum(self) -> str:
        text = json.dumps([self.chart.__name__, self.values], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def svg(self) -> str:
        """Return the picture without what only an interactive page reads, and with its checksum at the end."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "picture.svg"
            self.chart(**self.values).save(str(path), format="svg")
            text = path.read_text(encoding="utf-8")
        # A page says what is to be seen in words, and a list of a thousand points is none for a reader of screens
        text = re.sub(r' (?:aria-[a-z]+|role|class|pointer-events)="[^"]*"', "", text)
        text = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)  # 1/100 of a pixel is enough
        return f"{text.rstrip()}\n<!-- drawn from {self.checksum} by scripts/regen_docs.py -->\n"


def _short(value: float) -> float:
    """Return a number to five digits: another machine may round the sixth of fp32 otherwise."""
    return float(f"{value:.5g}")


def _plan(chosen: Method, seq_len: int = CONTEXT) -> PositionPlan:
    return chosen.plan(GEOMETRY, context=CONTEXT, seq_len=seq_len)


def _ratios(plan: PositionPlan) -> list[float]:
    return [_short(ratio) for ratio in (plan.inv_freq.double() / GEOMETRY.inv_freq.double()).tolist()]


def frequencies(*spelled: str) -> Picture:
    """Return what methods do to every pair."""
    ratios = {name: _ratios(_plan(parse_method(name))) for name in spelled}
    return Picture(plots.frequencies_chart, {"ratios": ratios, "context": CONTEXT, "model": MODEL})


def by_length(chosen: Method, names: Mapping[str, int]) -> Picture:
    """Return what one method does to every pair at each of several lengths."""
    ratios = {name: _ratios(_plan(chosen, seq_len)) for name, seq_len in names.items()}
    return Picture(plots.frequencies_chart, {"ratios": ratios, "context": CONTEXT, "model": MODEL})


def wavelengths(*spelled: str) -> Picture:
    """Return the wavelengths of every pair under methods."""
    turns = {name: (2 * math.pi / _plan(parse_method(name)).inv_freq.double()).tolist() for name in spelled}
    values = {name: [_short(turn) for turn in each] for name, each in turns.items()}
    window = GEOMETRY.original_context
    return Picture(
        plots.wavelength_chart,
        {"wavelengths": values, "original_context": window, "context": CONTEXT, "model": MODEL},
    )


def stopped(*spelled: str) -> Picture:
    """Return which pairs still turn."""
    curves = {name: list(enumerate(_ratios(_plan(parse_method(name))))) for name in spelled}
    words = {
        "x": "pair (0 turns fastest)",
        "y": "new frequency / trained frequency",
        "title": f"Which pairs turn: {MODEL}",
        "subtitle": ["1: as trained; 0: stopped; the same at any window"],
    }
    return Picture(plots.curves_chart, {"curves": curves, "logarithmic": False, **words})


def rounding() -> Picture:
    """Return by how much whole wavelengths move the frequencies, in percent."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for over in ("unscaled", "yarn"):
        plain, rounded = _plan(method(over)), _plan(method("resonance", over=method(over)))
        moved = 100 * (rounded.inv_freq.double() / plain.inv_freq.double() - 1)
        curves[f"resonance:over={over}"] = [(pair, round(each, 3)) for pair, each in enumerate(moved.tolist())]
    words = {
        "x": "pair (0 turns fastest)",
        "y": "change of the frequency, %",
        "title": f"What rounding to whole tokens changes: {MODEL}",
        "subtitle": [f"stretched to {CONTEXT} tokens, against the wrapped method"],
    }
    return Picture(plots.curves_chart, {"curves": curves, "logarithmic": False, **words})


def weights() -> Picture:
    """Return what ALiBi leaves of a key's weight by distance, for some heads."""
    slopes = _plan(method("alibi")).alibi_slopes
    assert slopes is not None
    distances = [2 ** (k / 8) for k in range(8 * int(math.log2(CONTEXT)) + 1)]
    curves = {
        f"head {head} of 32, slope {slopes[head - 1]:.3g}": [
            (_short(distance), round(math.exp(-float(slopes[head - 1]) * distance), 4)) for distance in distances
        ]
        for head in (1, 8, 16, 24, 32)
    }
    words = {
        "x": "distance between query and key, tokens",
        "y": "factor on the key's weight",
        "title": "What ALiBi leaves of a key's weight: 32 heads",
        "subtitle": ["exp(-slope x distance), before the softmax divides by the sum"],
    }
    return Picture(plots.curves_chart, {"curves": curves, "logarithmic": True, **words})


LENGTHS = {f"at {n:,} tokens": n for n in (4096, 8192, 16_384, 32_768)}
PICTURES: dict[str, Callable[[], Picture]] = {
    "abf": lambda: frequencies("abf", "abf:theta=1000000", "ntk", "linear"),
    "alibi": weights,
    "dynamic-ntk": lambda: by_length(method("dynamic-ntk"), LENGTHS),
    "dynamic-yarn": lambda: by_length(method("dynamic-yarn"), LENGTHS),
    "linear": lambda: frequencies("unscaled", "linear", "ntk"),
    "llama3": lambda: frequencies("llama3", "yarn", "linear"),
    "longrope": lambda: by_length(LISTS, {"short list, to 4,096 tokens": 4096, "long list, beyond": 4097}),
    "nope": lambda: stopped("unscaled", "p-rope", "nope"),
    "ntk": lambda: frequencies("ntk", "linear", "yarn"),
    "ntk-by-parts": lambda: frequencies("ntk-by-parts", "ntk-by-parts:truncate=false", "ntk", "linear"),
    "p-rope": lambda: stopped("p-rope", "p-rope:fraction=0.25"),
    "resonance": rounding,
    "unscaled": lambda: wavelengths("unscaled"),
    "yarn": lambda: frequencies("yarn", "yarn:ramp=rotations", "ntk", "linear"),
}


def drawn_from(path: Path) -> str | None:
    """Return the checksum that a picture holds, or None."""
    found = re.search(r"<!-- drawn from (\w+) ", path.read_text(encoding="utf-8")) if path.exists() else None
    return found[1] if found else None


# Exports: the same geometry at factor 4, on a model of one small layer, as verdicts are about positions alone.
FACTOR = 4
GGUF = "GGUF (`--gguf`)"


class Judged(NamedTuple):
    """A verdict of one reader: exact, approximate or cannot, and why."""

    kind: str
    words: str


@functools.cache
def judged(chosen: Method) -> Mapping[str, Judged]:
    """Return what every reader makes of a method, with the nearest form where there is only that."""
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=GEOMETRY.head_dim,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=GEOMETRY.head_dim,
        max_position_embeddings=GEOMETRY.original_context,
        rope_parameters={"rope_type": "default", "rope_theta": GEOMETRY.theta},
        initializer_range=0.3,  # so that positions matter to it: a patch proves itself
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    with extend(model, chosen, factor=FACTOR):
        try:
            verdicts = portability(model, allow_approximate=True)
            found = {verdict.reader: Judged(verdict.kind, verdict.words) for verdict in verdicts}
        except ExportError:
            found = {reader: Judged("cannot", "refused; `--format rope-ext` writes it") for reader in READERS}
        table = active_patch_table(model)
        assert table is not None
        if table.plan.alibi_slopes is not None:
            found[GGUF] = Judged("cannot", "refused: a bias has no place in a LLaMA's GGUF")
        elif not table.is_static:
            found[GGUF] = Judged("cannot", "refused: one vector of frequencies for all lengths")
        else:
            found[GGUF] = Judged("exact", "")
    return found


def _needs_leave(chosen: Method) -> bool:
    """Return whether an export is refused unless approximations are allowed."""
    return chosen.name in {"dynamic-ntk", "dynamic-yarn"}


def _of(name: str) -> Method:
    return LISTS if name == "longrope" else method(name)


def exports_list(name: str) -> str:
    """Return the verdicts on one method with its defaults, a line a reader."""
    how = "illustrative lists of the picture" if name == "longrope" else "defaults"
    allowed = ", with `--allow-approximate`" if _needs_leave(_of(name)) else ""
    lines = [f"Verdicts for the {how} at factor {FACTOR} on LLaMA-2's geometry{allowed}:", ""]
    for reader, verdict in judged(_of(name)).items():
        lines.append(f"- {reader}: {verdict.kind}" + (f" ({verdict.words})" if verdict.words else ""))
    return "\n".join(lines)


def _short_verdict(verdict: Judged) -> str:
    """Return a verdict for a cell: by how much it is off at worst, and a star where there is more to say."""
    frequencies_off = re.search(r"off by up to ([^,;]+)", verdict.words)
    off = [frequencies_off[1]] if frequencies_off else []
    if "attention scale" in verdict.words:
        off.append("scale")
    return verdict.kind + (f" ({', '.join(off)})" if off else "") + ("*" if verdict.words else "")


VARIANTS = (
    "ntk-by-parts:truncate=false",
    "resonance:over=yarn",
    "yarn:beta_fast=16",
    "yarn:truncate=false",
    "yarn:ramp=rotations",
    "yarn:attention_scale=1",
)


def export_matrix() -> str:
    """Return method by reader, and in words whatever is not plainly exact."""
    chosen = {name: _of(name) for name in known_methods()} | {name: parse_method(name) for name in VARIANTS}
    found = {name: judged(each) for name, each in sorted(chosen.items())}
    readers = [*READERS, GGUF]
    lines = ["| method | " + " | ".join(readers) + " |", "|---" * (len(readers) + 1) + "|"]
    notes: dict[str, list[str]] = {}
    for name, verdicts in found.items():
        cells = [_short_verdict(verdicts[reader]) for reader in readers]
        shown = f"[`{name}`](methods/{name}.md)" if name in known_methods() else f"`{name}`"
        lines.append(f"| {shown} | " + " | ".join(cells) + " |")
        for reader in readers:
            verdict = verdicts[reader]
            if verdict.words:
                notes.setdefault(f"`{name}`: {verdict.kind}: {verdict.words}", []).append(reader)
    lines += ["", "`*` in words:", ""]
    lines += [f"- {about.replace(': ', ', ' + ', '.join(readers) + ': ', 1)}" for about, readers in notes.items()]
    return "\n".join(lines)


# Measured: runs that are kept in recipes/results/, and how each was made.
RUNS = {
    "tiny": ("tiny", "the bundled model at 8 times its window, `make demo`"),
    "smollm2-135m": ("smollm2-135m", "SmolLM2-135M at twice its window, `make smollm2`"),
    "tiny-alibi": ("tiny-alibi", "the bundled model `tiny-alibi`, `rope-ext compare --model tiny-alibi`"),
}


def measured(name: str) -> str:
    """Return what the kept runs say of a method with its defaults, beside the control."""
    parts: list[str] = []
    for folder, about in RUNS.values():
        cells = read_cells(RESULTS / folder / "cells.jsonl")
        first = {cell.task: cell.protocol for cell in reversed(cells)}
        pooled = [c for c in cells if c.depth is None and c.position is None and c.protocol == first[c.task]]
        spelled = {cell.fingerprint: spell(method(cell.method, **cell.method_args)) for cell in pooled}
        if name in spelled.values():
            commit = json.loads((RESULTS / folder / "run.json").read_text(encoding="utf-8"))["legs"][-1]["commit"]
            parts += [*_run_table(pooled, spelled, name, about), f"Run `recipes/results/{folder}/`, commit `{commit}`."]
            parts.append("")
    parts += _trained_table(name)
    if not parts:
        return "No run in `recipes/results/` measured this method with its defaults."
    return "\n".join([*parts, "95 % intervals in brackets."])


def _run_table(pooled: Sequence[Cell], spelled: Mapping[str, str], name: str, about: str) -> list[str]:
    lengths = sorted({cell.length for cell in pooled})
    lines = [f"| {about} | " + " | ".join(f"L = {n:,}" for n in lengths) + " |", "|---" + "|---:" * len(lengths) + "|"]
    for task, what in (("perplexity", "perplexity of the first L tokens"), ("passkey", "passkeys found")):
        at = {(spelled[c.fingerprint], c.length): c for c in pooled if c.task == task}
        shown = [each for each in dict.fromkeys(("unscaled", name)) if any(key[0] == each for key in at)]
        for each in shown:
            values = [_interval(cell.value, cell.ci_low, cell.ci_high) for cell in (at[each, n] for n in lengths)]
            lines.append(f"| {what}, `{each}` | " + " | ".join(values) + " |")
    return [*lines, ""]


def _trained_table(name: str) -> list[str]:
    summary = json.loads((RESULTS / "tiny-finetune" / "summary.json").read_text(encoding="utf-8"))
    at = {(p["method"], p["task"], p["length"], p["step"]): p for p in summary["places"]}
    if name not in {key[0] for key in at}:
        return []
    lengths = (summary["original_context"], max(key[2] for key in at))
    last = max(key[3] for key in at)
    head = f"the bundled model after {last} steps on rows of {lengths[1]:,} tokens, means of 3 seeds"
    lines = [f"| {head} | " + " | ".join(f"L = {n:,}" for n in lengths) + " |", "|---" + "|---:" * len(lengths) + "|"]
    for task, what in (("perplexity", "perplexity of the first L tokens"), ("passkey", "passkeys found")):
        for each in dict.fromkeys(("unscaled", name)):
            places = [at[each, task, n, last] for n in lengths]
            values = [_interval(place["value"], place["ci_low"], place["ci_high"]) for place in places]
            lines.append(f"| {what}, `{each}` | " + " | ".join(values) + " |")
    commits = "`, `".join(summary["commits"])
    made = f"`scripts/experiment_finetune.py`, `recipes/results/tiny-finetune/`, commits `{commits}`."
    return [*lines, "", f"Made by {made}", ""]


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    assert value is not None
    shown = f"{value:{'.2f' if value < 100 else '.0f'}}"
    return shown if low is None or high is None else f"{shown} [{low:.3g}, {high:.3g}]"


def index_table() -> str:
    """Return all methods with what they change, from the registry."""
    lines = ["| method | what changes | fine-tuning | stock readers, exactly |", "|---|---|---|---|"]
    for name, cls in known_methods().items():
        verdicts = judged(_of(name))
        exact = [reader for reader, verdict in verdicts.items() if verdict.kind == "exact"]
        readers = "all" if len(exact) == len(verdicts) else ", ".join(exact) or "none"
        lines.append(f"| [`{name}`]({name}.md) | {cls.summary} | {cls.needs_training} | {readers} |")
    return "\n".join(lines)


def tables() -> dict[Path, dict[str, str]]:
    """Return what stands between the marks of every page."""
    pages = {
        PAGES / f"{name}.md": {"exports": exports_list(name), "measured": measured(name)} for name in known_methods()
    }
    return pages | {PAGES / "README.md": {"index": index_table()}, DOCS / "export.md": {"export": export_matrix()}}


def filled(text: str, made: Mapping[str, str], where: str) -> str:
    """Return a page's text with what is between its marks made anew."""
    for name, table in made.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", flags=re.DOTALL)
        assert pattern.search(text), f"{where} has no marks for {name}"
        text = pattern.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)
    return text


def stale() -> list[str]:
    """Return what is not current."""
    found: list[str] = []
    for path, made in tables().items():
        text = path.read_text(encoding="utf-8")
        if filled(text, made, path.name) != text:
            found.append(path.relative_to(ROOT).as_posix())
    for name, draw in PICTURES.items():
        path = PAGES / f"{name}.svg"
        if drawn_from(path) != draw().checksum:
            found.append(path.relative_to(ROOT).as_posix())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true")
    transformers_logging.set_verbosity_error()
    if parser.parse_args().check:
        found = stale()
        raise SystemExit(f"not current: {', '.join(found)}; run scripts/regen_docs.py" if found else 0)
    for path, made in tables().items():
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text, made, path.name), encoding="utf-8")
    for name, draw in PICTURES.items():
        (PAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
