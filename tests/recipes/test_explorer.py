"""The explorer's page: its values are the library's, its controls choose among them, and a browser shows it offline."""

import json
import math
import re

import pytest
import torch

from recipes.explorer import STEPS, explore
from rope_ext.hf import load_config, load_model
from rope_ext.inspection import inspect_config
from rope_ext.patch import extend
from rope_ext.registry import parse_method, parse_methods
from tests.recipes.browser import needs_browser, opened
from tests.recipes.test_cli import document, refused

METHODS = "unscaled,linear,yarn,dynamic-ntk,nope"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "tiny.html"
    told = document("explore", "tiny", "--methods", METHODS, "--factor", "4", "--out", out, "--json")
    assert told == {"out": str(out), "bytes": out.stat().st_size}
    return out


@pytest.fixture(scope="module")
def found():
    return explore(load_config("tiny"), parse_methods(METHODS), factor=4)


def data_of(page):
    return json.loads(re.search(r"const data = (.*);\n", page.read_text())[1])


def test_arrows_are_what_the_patched_model_turns_by(found):
    """cos and sin of the module that extend() puts into the model, at the places named, to the digits kept."""
    model, _ = load_model("tiny")
    for arrow in found.arrows:
        places = torch.arange(2 * STEPS + 1)[None] * arrow["apart"]
        for name in found.names:
            with extend(model, parse_method(name), factor=4):
                cos, sin = model.model.rotary_emb(torch.zeros(1, 2 * STEPS + 1, 1), places)
            here = torch.tensor(arrow["turned"][name])
            assert torch.allclose(here[:, 0], cos[0, :, arrow["pair"]], atol=1e-5, rtol=1e-4)
            assert torch.allclose(here[:, 1], sin[0, :, arrow["pair"]], atol=1e-5, rtol=1e-4)


def test_only_the_distance_matters(found):
    """Of one method, the product of the arrows is the same wherever the key stands."""
    for arrow in found.arrows:
        turned = torch.tensor(arrow["turned"]["yarn"], dtype=torch.float64)
        for distance in (1, 7, STEPS):
            scores = (turned[: STEPS + 1] * turned[distance : STEPS + 1 + distance]).sum(dim=-1)
            assert scores.max() - scores.min() < 5e-4


def test_pairs_are_those_of_inspect(found):
    for name in ("linear", "yarn"):
        want = inspect_config(load_config("tiny"), parse_method(name), factor=4)
        rows = [row for row in found.pairs if (row["method"], row["factor"]) == (name, 4.0)]
        assert [row["pair"] for row in rows] == list(range(16))
        wavelengths = (2 * math.pi / want.plan.inv_freq.double()).tolist()
        assert [row["wavelength"] for row in rows] == pytest.approx(wavelengths, rel=1e-4)
        assert [row["unseen"] for row in rows] == want.unseen_angles.tolist()
    assert not [row for row in found.pairs if row["method"] == "nope"], "what does not turn has no wavelength"


def test_scores_of_ones_are_the_mean_cosine(found):
    want = inspect_config(load_config("tiny"), parse_method("yarn"), factor=4)
    rows = [row for row in found.scores if (row["method"], row["factor"]) == ("yarn", 4.0)]
    assert rows[-1]["distance"] == 1023
    for row in rows:
        cosines = torch.cos(row["distance"] * want.plan.inv_freq.double())
        assert row["score"] == pytest.approx(want.plan.attention_scale**2 * float(cosines.mean()), abs=1e-4)
    assert {row["score"] for row in found.scores if row["method"] == "nope"} == {1.0}


def test_seen_ends_where_the_trained_angles_do(found):
    geometry = found.geometry
    slow = found.arrows[-1]
    assert slow["trained"] == pytest.approx(float(geometry.rotations[slow["pair"]]), rel=1e-4)
    reached = geometry.original_context / slow["apart"]
    assert slow["seen"]["unscaled"] == min(STEPS, math.floor(reached * (1 + 1e-6)))
    assert slow["seen"]["linear"] == STEPS
    assert found.arrows[0]["seen"]["unscaled"] == STEPS, "a fast pair has seen all angles"


def test_a_method_that_fits_some_factors_alone_says_so_and_the_rest_is_drawn():
    # at factor 1 nothing is left to wrap; a window that no list fits
    found = explore(load_config("tiny"), parse_methods("unscaled,yarn"), context=300)
    assert found.factor == 300 / 256
    assert 300 / 256 in found.factors
    line = refused("explore", "tiny", "--methods", "longrope")
    assert "longrope" in line


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--methods", "yran"], "did you mean 'yarn'"),
        (["--context", "2048", "--factor", "2"], "context"),
        (["--factor", "0"], "factor"),
        (["--out", "."], "name a file"),
    ],
)
def test_bad_input_is_one_line(words, told):
    assert told in refused("explore", "tiny", *words)


@needs_browser
def test_a_browser_moves_it_and_asks_no_network(page):
    data = data_of(page)
    with opened(page) as view:

        def move(control, value):
            view.locator(f"#{control}").evaluate(
                "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", str(value)
            )

        assert view.locator("svg.marks").count() == 5
        assert view.locator(".dial").count() == 5
        # a slow pair, unscaled: far away the angle was never seen; under linear it was
        move("pair", len(data["arrows"]) - 1)
        move("distance", STEPS)
        said = dict(
            zip(view.locator(".dial .name").all_text_contents(), view.locator(".dial").all_text_contents(), strict=True)
        )
        assert "never seen" in said["unscaled"]
        assert "never seen" not in said["linear"]
        scores = view.locator(".dial .score, .dial .new").all_text_contents()
        move("key", 20)
        assert view.locator(".dial .score, .dial .new").all_text_contents() == scores, "only the distance matters"
        # a chart follows the factor
        before = view.locator("[data-chart=ratios] svg.marks").inner_html()
        move("factor", len(data["factors"]) - 1)
        view.wait_for_timeout(300)
        assert "64, 16,384 tokens" in view.locator("#factor-out").text_content()
        assert view.locator("[data-chart=ratios] svg.marks").inner_html() != before
        # and the cache its heads and its dtype, by the library's numbers
        tokens = data["tokens"]
        for heads, kind in ((4, "fp32"), (1, "fp8")):
            move("heads", heads)
            view.locator("#dtype").select_option(kind)
            (row,) = (r for r in data["cache"] if (r["heads"], r["tokens"], r["dtype"]) == (heads, tokens, kind))
            shown = view.locator("#cost").text_content()
            assert float(re.search(r"Cache ([0-9.e-]+) GB", shown)[1]) == pytest.approx(row["gigabytes"], rel=1e-2)
            size = {"fp32": 4, "fp8": 1}[kind]
            assert row["gigabytes"] * 1e9 == pytest.approx(2 * 4 * heads * 32 * tokens * size, rel=1e-4)
