import os
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

from evals import corpora
from evals.corpora import Document, bos_id, encode, hash_ids, is_held_out, python_sources, read_documents, tokenise
from evals.errors import EvalError
from tests.evals.conftest import byte_tokenizer


def test_python_sources_split_once_and_for_all():
    train, held_out, everything = (python_sources(s) for s in ("train", "held-out", "all"))
    names = [d.name for d in everything]
    assert names == sorted(names)
    assert sorted(d.name for d in train + held_out) == names
    assert 0.05 < len(held_out) / len(everything) < 0.2
    assert all(is_held_out(d.name) for d in held_out)
    assert not any("/test/" in n or n.startswith(("test/", "encodings/")) for n in names)


def test_the_split_is_frozen():
    """The bundled model was trained on one side of it: a change would let it be tested on its training text."""
    assert {n: is_held_out(n) for n in ("argparse.py", "sysconfig.py", "typing.py", "distutils/dist.py")} == {
        "argparse.py": False,
        "sysconfig.py": True,
        "typing.py": False,
        "distutils/dist.py": True,
    }


def test_text_jsonl_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("plain")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 7}\n')
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / ".hidden").write_text("no")
    assert [(d.name, d.text) for d in read_documents(tmp_path)] == [
        ("a.jsonl:1", "one"),
        ("a.jsonl:3", "two"),
        ("b.txt", "plain"),
    ]
    assert [d.text for d in read_documents(tmp_path / "b.txt")] == ["plain"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing", None, "does not exist"),
        ("empty.txt", b"", "holds no documents"),
        ("latin.txt", b"caf\xe9", "not UTF-8"),
        ("bad.jsonl", b'{"text": "x"}\n{"text": \n', "line 2 is not JSON"),
        ("keys.jsonl", b'{"body": "x"}\n', 'line 1 has no "text"'),
        ("list.jsonl", b"[1]\n", 'line 1 has no "text"'),
        ("half.jsonl", b'{"text": "\\ud800"}\n', "line 1 holds half a surrogate pair"),
        ("deep.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("digits.jsonl", b'{"n": ' + b"1" * 5000 + b"}", "line 1 is not JSON"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(EvalError, match=words):
        read_documents(tmp_path / name)


def test_file_names_that_are_not_utf8(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("text")
    with pytest.raises(EvalError, match="a name that is not UTF-8; rename it"):
        read_documents(tmp_path)


def write_parquet(path, **columns):
    parquet.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_parquet_rows_are_documents(tmp_path):
    texts = ["one", "", None, " \n", "长文本 \U0001f600", "six" * 30_000]
    path = write_parquet(tmp_path / "b.parquet", id=range(6), text=texts)
    named = [("b.parquet:0", "one"), ("b.parquet:4", "长文本 \U0001f600"), ("b.parquet:5", "six" * 30_000)]
    assert [(d.name, d.text) for d in read_documents(path)] == named
    (tmp_path / "sub").mkdir()
    write_parquet(tmp_path / "sub" / "large.parquet", text=pa.array(["a"], pa.large_string()))
    write_parquet(tmp_path / "sub" / "words.parquet", text=pa.array(["b"]).dictionary_encode())
    (tmp_path / "a.txt").write_text("plain")
    assert [d.name for d in read_documents(tmp_path)] == [
        "a.txt",
        *(name for name, _ in named),
        "sub/large.parquet:0",
        "sub/words.parquet:0",
    ]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"body": ["x"], "id": [1]}, 'has no column "text"; it has: body, id$'),
        ({"text": [None, 7]}, 'row 1: "text" is no text but int'),
        ({"text": [["a", "b"]]}, 'row 0: "text" is no text but list'),
        ({"text": [None, ""]}, "holds no documents"),
        ({"text": pa.array([], pa.string())}, "holds no documents"),
        ({"text": pa.array([b"caf\xe9"]).view(pa.string())}, "cannot be read as Parquet: .*utf-8"),
    ],
)
def test_bad_columns_are_named(tmp_path, columns, words):
    path = write_parquet(tmp_path / "x.parquet", **columns)
    with pytest.raises(EvalError, match=words) as caught:
        read_documents(path)
    assert "\n" not in str(caught.value)


def test_damaged_parquet_is_one_line(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", text=[str(n) * 1000 for n in range(100)])
    whole = path.read_bytes()
    for broken in (b"", b"no parquet", whole[:-100], whole[:50] + bytes(2000) + whole[2050:]):
        path.write_bytes(broken)
        with pytest.raises(EvalError, match="cannot be read as Parquet") as caught:
            read_documents(path)
        assert "\n" not in str(caught.value)


def test_without_pyarrow_the_line_that_installs_it_is_named(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", text=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EvalError, match=r"needs a package \(.*\): pip install 'rope-ext\[data\]'"):
        read_documents(path)


def documents(*lengths):
    return [Document(name=f"d{i}", text=chr(97 + i) * n) for i, n in enumerate(lengths)]


def test_every_document_has_the_same_length_and_one_bos(tokenizer):
    corpus = tokenise(documents(100, 5, 50, 49), tokenizer, name="toy", num_tokens=50, num_documents=3)
    assert {len(d.ids) for d in corpus.documents} == {50}
    assert all(d.ids[0] == 0 and 0 not in d.ids[1:] for d in corpus.documents)
    # 49 characters and BOS make exactly 50 tokens
    assert sorted(d.name for d in corpus.documents) == ["d0", "d2", "d3"]
    assert corpus.num_too_short <= 1
    assert corpus.bos == 0
    with pytest.raises(EvalError, match="3 documents of at least 50 tokens, 4 asked"):
        tokenise(documents(100, 5, 50, 49), tokenizer, name="toy", num_tokens=50, num_documents=4)


def test_a_tokenizer_without_bos_gets_none():
    corpus = tokenise(documents(50), byte_tokenizer(bos=False), name="toy", num_tokens=50, num_documents=1)
    assert corpus.bos is None
    assert 0 not in corpus.documents[0].ids


def test_choice_and_hash_do_not_depend_on_the_order_given(tokenizer):
    docs = documents(60, 60, 60, 60)
    one, other = (
        tokenise(d, tokenizer, name="toy", num_tokens=50, num_documents=2) for d in (docs, list(reversed(docs)))
    )
    assert one == other
    assert len(one.documents) == 2


def test_a_stream_is_taken_in_its_own_order_and_no_further_than_needed(tokenizer):
    def stream():
        yield from documents(60, 5, 60)
        pytest.fail("read beyond what was needed")

    corpus = tokenise(stream(), tokenizer, name="toy", num_tokens=50, num_documents=2, in_order=True)
    assert [d.name for d in corpus.documents] == ["d0", "d2"]
    assert corpus.num_too_short == 1


def test_a_stream_without_end_is_given_up(tokenizer, monkeypatch):
    monkeypatch.setattr(corpora, "MAX_TRIED", 7)
    endless = iter(lambda: Document(name="d", text="short"), None)
    words = r"0 documents of at least 50 tokens among its first 7, and no more are tried, 1 asked \(longest of 7: 6\)"
    with pytest.raises(EvalError, match=words):
        tokenise(endless, tokenizer, name="toy", num_tokens=50, num_documents=1, in_order=True)
    with pytest.raises(EvalError, match=r"0 documents of at least 50 tokens, 1 asked \(longest of 2: 41\)"):
        tokenise(documents(10, 40), tokenizer, name="toy", num_tokens=50, num_documents=1, in_order=True)


def test_too_few_is_an_error_that_tells_the_longest(tokenizer):
    with pytest.raises(EvalError, match=r"toy has 0 documents of at least 50 tokens, 1 asked \(longest of 2: 41\)"):
        tokenise(documents(10, 40), tokenizer, name="toy", num_tokens=50, num_documents=1)


def test_special_tokens_spelled_in_a_text_stay_text(tokenizer):
    ids = encode(tokenizer, "a<s>b</s>c")
    assert len(ids) == len("a<s>b</s>c")
    assert not {0, 1} & set(ids)


def test_bos_is_added_only_where_the_tokenizer_does():
    """SmolLM2 names a BOS and does not add it; a prompt must not begin with what the model never saw there."""
    quiet = byte_tokenizer(adds_bos=False)
    assert quiet.bos_token_id == 0
    assert bos_id(quiet) is None
    assert bos_id(byte_tokenizer()) == 0
    assert bos_id(byte_tokenizer(bos=False)) is None


def test_hash_tells_borders_apart():
    assert hash_ids([[1, 2], [3]]) != hash_ids([[1], [2, 3]])
    assert hash_ids([[1, 2]]) == hash_ids([(1, 2)])
