"""The explorer's page: its values are the library's, its controls choose among them, and a browser shows it offline."""

import json
import math
import os
import re
import stat

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
    for factor, context in found.contexts.items():
        for name in found.names:
            with extend(model, parse_method(name), factor=factor):
                whole = torch.arange(context)[None]
                cos, sin = model.model.rotary_emb(torch.zeros(1, context, 1), whole)
            for arrow in found.arrows:
                view = arrow["views"][[*found.contexts].index(factor)]
                here = torch.tensor(view["turned"][name])
                places = torch.arange(len(here)) * view["apart"]
                assert STEPS // 2 < len(here) <= STEPS + 1
                assert torch.allclose(here[:, 0], cos[0, places, arrow["pair"]], atol=6e-5, rtol=0)
                assert torch.allclose(here[:, 1], sin[0, places, arrow["pair"]], atol=6e-5, rtol=0)


def test_only_the_distance_matters(found):
    """Of one method, the product of the arrows is the same wherever the key stands."""
    for view in (view for arrow in found.arrows for view in arrow["views"]):
        turned = torch.tensor(view["turned"]["yarn"], dtype=torch.float64)
        for distance in (1, 7, len(turned) // 2):
            scores = (turned[:-distance] * turned[distance:]).sum(dim=-1)
            assert scores.max() - scores.min() < 1e-3


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


def test_unseen_are_the_angles_that_the_trained_window_did_not_hold(found):
    geometry, at = found.geometry, [*found.contexts].index(4.0)
    slow = found.arrows[-1]
    view, pair = slow["views"][at], slow["pair"]
    assert slow["trained"] < 1
    assert slow["trained"] == pytest.approx(float(geometry.rotations[pair]), rel=1e-4)
    places = [k * view["apart"] for k in range(len(view["turned"]["unscaled"]))]
    assert places[-1] > 0.9 * found.context, "distances reach to the end of the window"
    # By the cosines and sines of every position that was trained, without a formula
    trained = torch.arange(geometry.original_context + 1).double() * float(geometry.inv_freq[pair])
    for name in ("unscaled", "linear"):
        cos, sin = torch.tensor(view["turned"][name], dtype=torch.float64).T
        apart = (cos[:, None] - trained.cos()).abs() + (sin[:, None] - trained.sin()).abs()
        far = (apart.min(dim=1).values > 2 * float(geometry.inv_freq[pair])).nonzero().flatten().tolist()
        assert set(far) <= set(view["unseen"][name])
        assert len(set(view["unseen"][name]) - set(far)) <= 2, "but for the borders"
    assert view["unseen"]["linear"] == []
    assert found.arrows[0]["views"][at]["unseen"]["unscaled"] == [], "a fast pair has seen all angles"


def test_factors_that_a_model_cannot_have_are_left_out():
    found = explore(load_config("tiny"), parse_methods("unscaled,yarn"), context=300)
    assert found.factor == 300 / 256
    assert found.contexts[300 / 256] == 300
    config = load_config("tiny")
    config.max_position_embeddings = 100_000_000
    assert max(explore(config, parse_methods("linear"), factor=2).contexts) == 16


def test_two_spellings_of_a_method_have_two_names():
    found = explore(load_config("tiny"), parse_methods("yarn,yarn:beta_fast=16"), factor=2)
    assert len(set(found.names)) == 2
    assert {row["method"] for row in found.pairs} == set(found.names)


def test_a_model_that_turns_nothing_draws_all_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert explore(load_config("tiny"), parse_methods("nope"), factor=2).pairs == []
    document("explore", "tiny", "--methods", "nope", "--out", "nope.html", "--json")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--methods", "yran"], "did you mean 'yarn'"),
        (["--context", "2048", "--factor", "2"], "context"),
        (["--factor", "0"], "factor"),
        (["--out", "."], "name a file"),
        (["--methods", "longrope"], "longrope"),
        (["--methods", "yarn,alibi"], "which this page does not show; leave it out"),
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
        move("distance", STEPS // 2)
        said = dict(
            zip(view.locator(".dial .name").all_text_contents(), view.locator(".dial").all_text_contents(), strict=True)
        )
        assert "never seen" in said["unscaled"]
        assert "never seen" not in said["linear"]
        scores = view.locator(".dial .score, .dial .new").all_text_contents()
        move("key", 20)
        moved = view.locator(".dial .score, .dial .new").all_text_contents()
        numbers = [[float(re.search(r"-?[0-9.]+", text)[0]) for text in texts] for texts in (scores, moved)]
        assert numbers[1] == pytest.approx(numbers[0], abs=1e-3), "only the distance matters"
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
            number, prefix = re.search(r"Cache ([0-9.,]+) (k|M|G)B", shown).groups()
            told = float(number.replace(",", "")) * {"k": 1e3, "M": 1e6, "G": 1e9}[prefix]
            assert told == pytest.approx(row["gigabytes"] * 1e9, rel=1e-2)
            size = {"fp32": 4, "fp8": 1}[kind]
            assert row["gigabytes"] * 1e9 == pytest.approx(2 * 4 * heads * 32 * tokens * size, rel=1e-4)


def test_a_model_written_under_a_bias_is_refused():
    assert "written under alibi" in refused("explore", "tiny-alibi")


def test_a_page_goes_where_a_link_leads_and_destroys_no_device(tmp_path):
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    document("explore", "tiny", "--methods", "linear", "--out", tmp_path / "link.html", "--json")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text().startswith("<!DOCTYPE html>")
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refused("explore", "tiny", "--methods", "linear", "--out", tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert {path.name for path in tmp_path.iterdir()} == {"real.html", "link.html", "pipe"}, "nothing is left beside"
