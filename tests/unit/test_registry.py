import pytest

import rope_ext
from rope_ext import Abf, Linear, MethodError, Yarn
from rope_ext.plan import Method, spell
from rope_ext.registry import known_methods, method, parse_method, parse_methods


def test_the_six_basic_methods_are_found():
    assert {"unscaled", "linear", "abf", "ntk", "yarn", "llama3"} <= set(known_methods())


@pytest.mark.parametrize("name", known_methods())
def test_methods_keep_the_protocol(name):
    instance = method(name)
    assert isinstance(instance, Method)
    assert instance.name == name
    with pytest.raises((AttributeError, TypeError)):
        instance.factor = 2
    assert parse_method(spell(instance)) == instance


def test_public_names_resolve():
    for name in rope_ext.__all__:
        assert getattr(rope_ext, name) is not None
    assert set(rope_ext.__all__) <= set(dir(rope_ext))
    with pytest.raises(AttributeError, match="no attribute 'Yarm'"):
        _ = rope_ext.Yarm


def test_values_come_as_text_or_as_themselves():
    assert parse_method("yarn:beta_fast=16:truncate=false") == Yarn(beta_fast=16.0, truncate=False)
    assert method("yarn", beta_fast=16, truncate=False) == Yarn(beta_fast=16.0, truncate=False)
    assert parse_method("yarn:attention_scale=1.25") == Yarn(attention_scale=1.25)
    assert parse_method("yarn:attention_scale=auto") == Yarn()
    assert parse_methods("linear, abf:theta=160000") == [Linear(), Abf(theta=160000.0)]


@pytest.mark.parametrize(
    "instance", [Linear(), Yarn(beta_fast=16.0, truncate=False), Yarn(attention_scale=1.0), Abf(theta=123456.75)]
)
def test_spelling_parses_back(instance):
    assert parse_method(spell(instance)) == instance


def test_spelling_names_only_what_differs():
    assert spell(Yarn()) == "yarn"
    assert spell(Yarn(beta_fast=16.0, truncate=False)) == "yarn:beta_fast=16:truncate=false"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("yran", "'yran' is not a method; did you mean 'yarn'?.*known: abf, alibi, dynamic-ntk"),
        ("zzz", "'zzz' is not a method; known:"),
        ("yarn:beta_fats=16", "'beta_fats' is not a hyper-parameter; did you mean 'beta_fast'?"),
        ("linear:factor=2", "linear: 'factor' is not a hyper-parameter; it has none"),
        ("yarn:beta_fast", "'beta_fast' is not key=value"),
        ("yarn:beta_fast=", "is not key=value"),
        ("yarn:beta_fast=16:beta_fast=8", "given twice"),
        ("yarn:beta_fast=lots", "beta_fast = 'lots' is refused"),
        ("yarn:truncate=perhaps", "truncate = 'perhaps' is refused"),
    ],
)
def test_bad_spellings_are_refused(text, words):
    with pytest.raises(MethodError, match=words):
        parse_method(text)


@pytest.mark.parametrize("name", [None, 5])
def test_a_name_is_text(name):
    with pytest.raises(MethodError, match="is not a name"):
        method(name)


@pytest.mark.parametrize("text", ["", ",", "  "])
def test_an_empty_list_is_refused(text):
    with pytest.raises(MethodError, match="names none"):
        parse_methods(text)
