"""Training documents as ids: what evaluations would read, made once, made again where anything differs."""

import json
import re
from types import SimpleNamespace

import huggingface_hub
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from evals import corpora, hub
from evals.corpora import Document, encode
from evals.errors import EvalError
from recipes import sources
from recipes.load import RecipeError
from recipes.packing import Documents
from recipes.sources import NAMES, TRAIN, open_source, recall_texts
from recipes.tuning import Source
from tests.evals.conftest import byte_tokenizer

TEXTS = ["one two three", "长文本 \U0001f600 café", "spells <s> and </s> out", "x" * 700]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPE_EXT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXTS[1])
    return path


def opened(name, tokenizer, *, text_tokens=256, **more):
    return open_source(Source(name=str(name), **more), tokenizer, text_tokens=text_tokens)


def all_ids(found):
    return [found.ids(number).tolist() for number in range(len(found.lengths))]


def forbid_tokenising(monkeypatch):
    def refuse(*_args, **_kwargs):
        pytest.fail("something was tokenised")

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", refuse)


def write_text(path):
    path.write_text(TEXTS[0])
    return [TEXTS[0]]


def write_jsonl(path):
    lines = [json.dumps({"text": text}) for text in (TEXTS[0], "", TEXTS[1], " \n", TEXTS[2])]
    path.write_text("\n".join([*lines, ""]))
    return TEXTS[:3]


def write_parquet(path):
    parquet.write_table(pa.table({"text": [TEXTS[3], None, "", TEXTS[0]]}), path)
    return [TEXTS[3], TEXTS[0]]


def write_folder(path):
    path.mkdir()
    return [*write_text(path / "a.txt"), *write_jsonl(path / "b.jsonl"), *write_parquet(path / "c.parquet")]


KINDS = {"a.txt": write_text, "a.jsonl": write_jsonl, "a.parquet": write_parquet, "folder": write_folder}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_evaluations(kind, tmp_path, tokenizer, monkeypatch):
    path = tmp_path / kind
    texts = KINDS[kind](path)
    expected = [encode(tokenizer, text) for text in texts]
    found = opened(path, tokenizer)
    assert isinstance(found, Documents)
    assert found.name == str(path)
    assert all_ids(found) == expected
    assert found.lengths.tolist() == [len(ids) for ids in expected]
    assert found.lengths.dtype == found.ids(0).dtype == "int64"
    assert found.data_hash == corpora.hash_ids(expected)
    assert not {0, 1} & {i for ids in expected for i in ids}, "neither BOS nor EOS"

    forbid_tokenising(monkeypatch)
    again = opened(path, tokenizer)
    assert all_ids(again) == expected
    assert (again.name, again.data_hash, again.lengths.tolist()) == (
        found.name,
        found.data_hash,
        found.lengths.tolist(),
    )


def test_many_documents_are_tokenised_in_order(tmp_path, tokenizer):
    """More than one batch of them."""
    texts = [f"number {i}" for i in range(150)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert all_ids(opened(tmp_path / "a.jsonl", tokenizer)) == [encode(tokenizer, text) for text in texts]


def test_the_training_split_of_the_standard_library(tokenizer, monkeypatch):
    asked = []

    def python_sources(split):
        asked.append(split)
        return [Document(name=f"{i}.py", text=f"print({i})") for i in range(3)]

    monkeypatch.setattr(corpora, "python_sources", python_sources)
    found = opened(TRAIN, tokenizer)
    assert asked == ["train"]
    assert all_ids(found) == [encode(tokenizer, f"print({i})") for i in range(3)]
    assert len(opened(TRAIN, tokenizer, max_documents=2).lengths) == 2


def files_in(cache):
    return {path.name for path in cache.iterdir()}


def test_whatever_changes_the_ids_makes_another_file(tmp_path, tokenizer, cache):
    path = tmp_path / "a.jsonl"
    words = "tell me what to do and what to leave; " * 20
    path.write_text("\n".join(json.dumps({"text": f"{i} {words}"}) for i in range(3)))
    seen = [opened(path, tokenizer)]
    num_files = [len(files_in(cache))]

    def another(*given, **more):
        seen.append(opened(*given, **more))
        num_files.append(len(files_in(cache)))

    another(path, byte_tokenizer(digits=False))
    another(path, tokenizer, max_documents=2)
    another(path, tokenizer, max_documents=1)
    another(path, tokenizer, recall=True)
    another(path, tokenizer, recall=True, text_tokens=300)
    path.write_text(path.read_text().replace("leave", "keep"))
    another(path, tokenizer)
    assert num_files == [2, 4, 6, 8, 10, 12, 14]
    assert len({found.data_hash for found in seen}) == len(seen) - 1, "the other tokenizer's ids are equal here"
    assert files_in(cache) == {f"{p.stem}{suffix}" for p in cache.iterdir() for suffix in (".arrow", ".json")}
    assert [len(found.lengths) for found in seen[:4]] == [3, 3, 2, 1]
    # what has no bearing on the ids makes none
    opened(path, byte_tokenizer(), text_tokens=300, share=0.5, long_tokens=10, long_share=0.5)
    assert len(files_in(cache)) == 14


def test_a_tokenizer_does_not_become_another_by_being_used(tmp_path, tokenizer, cache):
    """Many a tokenizer.json says where to cut texts, which a tokenizer forgets when it is asked not to."""
    path = tmp_path / "a.txt"
    path.write_text(TEXTS[3])
    tokenizer.backend_tokenizer.enable_truncation(max_length=512)
    assert all_ids(opened(path, tokenizer)) == [encode(byte_tokenizer(), TEXTS[3])]
    opened(path, tokenizer)
    assert len(files_in(cache)) == 2


def test_a_text_moved_to_another_file_is_another_document(tmp_path, tokenizer):
    """Names are hidden numbers' seeds; and the border between two texts counts."""
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('{"text": "ab"}\n{"text": "c"}\n')
    two.write_text('{"text": "a"}\n{"text": "bc"}\n')
    assert opened(one, tokenizer).data_hash != opened(two, tokenizer).data_hash


def arrow_in(cache):
    (path,) = cache.glob("*.arrow")
    return path


@pytest.fixture
def calls(monkeypatch):
    """How often the documents of a source were tokenised."""
    seen = []
    encoded = sources._encoded

    def counted(*given):
        seen.append(given)
        return encoded(*given)

    monkeypatch.setattr(sources, "_encoded", counted)
    return seen


@pytest.mark.parametrize("lost", [".json", ".arrow"])
def test_a_torn_cache_is_made_again(lost, text_file, tokenizer, cache, calls):
    """Killed between its two files; or one of them deleted."""
    first = opened(text_file, tokenizer)
    whole = arrow_in(cache)
    expected = files_in(cache)
    whole.with_suffix(lost).unlink()
    again = opened(text_file, tokenizer)
    assert len(calls) == 2
    assert files_in(cache) == expected
    assert (all_ids(again), again.data_hash) == (all_ids(first), first.data_hash)
    opened(text_file, tokenizer)
    assert len(calls) == 2


def test_what_a_killed_process_left_is_passed_over(text_file, tokenizer, cache, calls):
    first = opened(text_file, tokenizer)
    whole = arrow_in(cache)
    (cache / f"{whole.stem}abcd.part").write_bytes(whole.read_bytes()[:100])
    whole.with_suffix(".7.part").write_text('{"lengths": [')
    opened(text_file, tokenizer)
    assert len(calls) == 1, "the whole files are read"
    whole.unlink()
    whole.with_suffix(".json").unlink()
    again = opened(text_file, tokenizer)
    assert len(calls) == 2
    assert all_ids(again) == all_ids(first)


def test_killed_while_tokenising(text_file, tokenizer, cache, monkeypatch):
    encoded = sources._encoded

    def killed(*given):
        yield from encoded(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sources, "_encoded", killed)
        with pytest.raises(KeyboardInterrupt):
            opened(text_file, tokenizer)
    assert files_in(cache) == set(), "nothing is left that could be taken for whole"
    assert all_ids(opened(text_file, tokenizer)) == [encode(tokenizer, text_file.read_text())]


@pytest.mark.parametrize("is_file", ["cache", "cache/tokens"])
def test_a_cache_that_cannot_be_written(is_file, text_file, tokenizer, tmp_path):
    """A file in the place of the folder: even root cannot write into that."""
    (tmp_path / is_file).parent.mkdir(exist_ok=True)
    (tmp_path / is_file).write_text("in the way")
    folder = re.escape(str(tmp_path / "cache" / "tokens"))
    words = f"the cache {folder} cannot be written: .+; name another folder with ROPE_EXT_CACHE"
    with pytest.raises(RecipeError, match=words) as caught:
        opened(text_file, tokenizer)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_told_likewise(text_file, tokenizer, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sources.tempfile, "mkstemp", full)
    with pytest.raises(RecipeError, match="cannot be written: No space left on device; name another folder"):
        opened(text_file, tokenizer)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "does not exist; name a text"), ("", "holds no documents"), (" \n", "holds no documents")],
)
def test_an_empty_source_is_named(content, words, tmp_path, tokenizer):
    path = tmp_path / "empty.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EvalError, match=rf"{re.escape(str(path))} {words}"):
        opened(path, tokenizer)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pythn", "'pythn' does not exist; did you mean 'python'"),
        ("python-trian", "'python-trian' does not exist; did you mean 'python-train'[?] .*python-train"),
        ("", "the name is empty; give python"),
    ],
)
def test_misspelled_names(name, words, tokenizer):
    with pytest.raises(RecipeError, match=words):
        opened(name, tokenizer)


ENDLESS = r"data.sources \({}\): a stream of the Hub has no end to wait for; say max_documents"


@pytest.mark.parametrize("name", ["hub:a/b", "pg19"])
def test_a_stream_without_an_end_is_refused(name, tokenizer, monkeypatch):
    monkeypatch.setattr(hub, "pin", lambda data: data)
    with pytest.raises(RecipeError, match=ENDLESS.format(name)):
        opened(name, tokenizer)


def test_a_stream_without_an_end_is_refused_before_the_hub_is_asked(tokenizer):
    with pytest.raises(RecipeError, match=ENDLESS.format("hub:a/b")):
        opened("hub:a/b", tokenizer)


def test_a_stream_is_read_as_far_as_asked_and_cached_under_its_commit(tokenizer, monkeypatch):
    sha = ["0" * 40]
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_args, **_kwargs: SimpleNamespace(sha=sha[0]))
    read = []

    def stream(data):
        for number in range(1000):
            read.append((data.revision, number))
            yield Document(name=f"test:{number}", text=f"document {number}")

    monkeypatch.setattr(hub, "stream", stream)
    expected = [encode(tokenizer, f"document {i}") for i in range(3)]
    assert all_ids(opened("hub:a/b", tokenizer, max_documents=3)) == expected
    assert read == [("0" * 40, 0), ("0" * 40, 1), ("0" * 40, 2)], "in its own order, and no further"
    assert all_ids(opened("hub:a/b", tokenizer, max_documents=3)) == expected
    assert len(read) == 3, "the cache is read"
    assert len(opened("hub:a/b", tokenizer, max_documents=4).lengths) == 4
    sha[0] = "1" * 40
    opened("hub:a/b", tokenizer, max_documents=3)
    assert [revision[0] for revision, _ in read] == [*"0000000", *"111"]


def test_documents_without_tokens_are_left_out(tmp_path, cache):
    """A text that a tokenizer makes nothing of."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("x", "")
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("xx", "axb", "x", "c", "xxx")))
    found = opened(path, tokenizer)
    assert all_ids(found) == [encode(tokenizer, "ab"), encode(tokenizer, "c")]
    assert found.lengths.tolist() == [2, 1]
    nothing = tmp_path / "x.txt"
    nothing.write_text("xxx")
    with pytest.raises(
        RecipeError, match=rf"data.sources \({re.escape(str(nothing))}\): it is empty; give longer texts"
    ):
        opened(nothing, tokenizer)
    assert len(files_in(cache)) == 2


# ---- numbers to recall

TEXT = "a text of words without digits or lines, that goes on and on and on for a while; "


def recalled(name, text, num_tokens):
    tokenizer = byte_tokenizer()
    found = [*recall_texts(name, encode(tokenizer, text), tokenizer, num_tokens=num_tokens)]
    return [(label, ids, tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for label, ids in found]


def parsed(whole):
    """Return the document's own text, the hidden (name, number) in order, and the asked ones."""
    line = r"\n(\w+) = (\d{5})"
    tail = re.search(rf"((?:{line})+)\n\Z", whole)
    body = whole[: tail.start()]
    return re.sub(rf"{line}\n", "", body), re.findall(rf"{line}\n", body), re.findall(line, tail[1])


@pytest.mark.parametrize("num_tokens", [64, 127, 256, 1000, 1024, 6000])
def test_every_hidden_number_is_asked_for_once(num_tokens):
    expected = max(1, min(len(NAMES), num_tokens // 128))
    found = recalled("book", TEXT * (3 * num_tokens // len(TEXT) + 1), num_tokens)
    assert len(found) >= 3
    orders = []
    for _, ids, whole in found:
        assert len(ids) == num_tokens
        _, hidden, asked = parsed(whole)
        assert len(hidden) == expected
        assert len({name for name, _ in hidden}) == expected
        assert {name for name, _ in hidden} <= set(NAMES)
        assert sorted(asked) == sorted(hidden), "each is asked for once, and its answer is what was hidden"
        assert all(10_000 <= int(number) < 100_000 for _, number in hidden)
        orders.append(asked == hidden)
    assert expected < 4 or not all(orders), "in another order"


def test_texts_of_a_document_are_disjoint_pieces_of_it():
    text = "".join(f"[{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676)}]" for i in range(900))
    found = recalled("book", text, 512)
    assert len(found) >= 10
    assert [label for label, _, _ in found] == [f"book#{number}" for number in range(len(found))]
    bodies = [parsed(whole)[0] for _, _, whole in found]
    together = "".join(bodies)
    assert text.startswith(together), "one goes on where the other ends"
    assert len(text) - len(together) <= max(map(len, bodies)) + 10, "and what is left would not fill another"
    assert len({str(parsed(whole)[1]) for _, _, whole in found}) == len(found), "each with numbers of its own"


def test_numbers_follow_the_documents_name():
    one, again, other = (recalled(name, TEXT * 20, 600) for name in ("book", "book", "other"))
    assert one == again
    for (_, _, mine), (_, _, theirs) in zip(one, other, strict=False):
        assert not {number for _, number in parsed(mine)[1]} & {number for _, number in parsed(theirs)[1]}


def test_numbers_stand_all_over_the_text():
    """Uniform places: the longest distances are trained, and the short ones."""
    places = []
    for number in range(200):
        ((_, _, whole),) = recalled(f"book {number}", TEXT[:80] * 3, 255)[:1]
        places.append(re.search(r"\n\w+ = \d", whole).start() / len(parsed(whole)[0]))
    assert min(places) < 0.05
    assert max(places) > 0.95
    assert 0.4 < sum(places) / len(places) < 0.6


@pytest.mark.parametrize("text", ["", "short", TEXT * 2])
def test_a_short_document_gives_none(text):
    assert recalled("book", text, 600) == []


def test_a_document_gives_a_text_from_just_the_length_that_fills_it():
    room = len(parsed(recalled("book", TEXT * 20, 600)[0][2])[0])
    assert len(recalled("book", (TEXT * 20)[:room], 600)) == 1
    assert recalled("book", (TEXT * 20)[: room - 1], 600) == []


@pytest.mark.parametrize("num_tokens", [1, 20, 26])
def test_a_row_without_room_for_text_gives_none(num_tokens):
    assert recalled("book", TEXT * 20, num_tokens) == []


def test_a_source_with_numbers_to_recall(tmp_path, tokenizer, monkeypatch):
    path = tmp_path / "a.jsonl"
    texts = [TEXT * 30, "short", TEXT * 10]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    found = opened(path, tokenizer, recall=True, text_tokens=500)
    expected = [
        ids
        for number, text in enumerate(texts, start=1)
        for _, ids in recall_texts(f"a.jsonl:{number}", encode(tokenizer, text), tokenizer, num_tokens=500)
    ]
    assert all_ids(found) == expected
    assert len(expected) > 4
    assert found.name == f"{path} with numbers to recall"
    assert set(found.lengths.tolist()) == {500}
    forbid_tokenising(monkeypatch)
    assert all_ids(opened(path, tokenizer, recall=True, text_tokens=500)) == expected


def test_texts_that_are_too_short_for_numbers_are_an_error(text_file, tokenizer):
    words = rf"data.sources \({re.escape(str(text_file))}\): none of its documents fills a row with numbers to recall"
    with pytest.raises(RecipeError, match=words):
        opened(text_file, tokenizer, recall=True, text_tokens=500)


def test_names_are_distinct():
    assert len(set(NAMES)) == len(NAMES)
