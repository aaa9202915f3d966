"""Hub data sets: how they are written, pinned and streamed; the real `datasets`, on folders in place of the Hub."""

import gzip
import json
import sys
from types import SimpleNamespace

import huggingface_hub
import pyarrow as pa
import pytest
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from pyarrow import parquet

from evals import hub
from evals.corpora import tokenise
from evals.errors import EvalError
from evals.hub import HubData, parse_hub, pin, stream

SHA = "0123456789abcdef0123456789abcdef01234567"


def write(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path)


@pytest.fixture
def repository(tmp_path):
    """A repository as the Hub holds them: two splits of Parquet, the test split in two files."""
    data = tmp_path / "set" / "data"
    write(data / "test-00000-of-00002.parquet", text=["one", None, "", "长文 \U0001f600"], id=range(4))
    write(data / "test-00001-of-00002.parquet", text=["five"], id=[4])
    write(data / "validation-00000-of-00001.parquet", text=["other"], id=[5])
    return tmp_path / "set"


def read(repository, spelled="hub:a/b"):
    return [(d.name, d.text) for d in hub._read(str(repository), parse_hub(spelled))]


def test_a_data_set_is_one_word():
    assert parse_hub("hub:emozilla/pg19-test") == HubData(repository="emozilla/pg19-test")
    assert parse_hub("hub:a/b@refs/convert/parquet:split=train:config=en.v2:column=body") == HubData(
        repository="a/b", revision="refs/convert/parquet", split="train", config="en.v2", column="body"
    )
    assert parse_hub("hub:a/b:file=x/y.jsonl.gz").file == "x/y.jsonl.gz"


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("hub:a/b", "hub:a/b@main:split=test"),
        ("hub:a/b@v1:column=body:split=train", "hub:a/b@v1:split=train:column=body"),
        ("hub:a/b:config=x", "hub:a/b@main:split=test:config=x"),
        ("hub:a/b@refs/pr/1:column=body:file=c.parquet", "hub:a/b@refs/pr/1:column=body:file=c.parquet"),
    ],
)
def test_what_is_recorded_means_the_same(text, spelled):
    assert parse_hub(text).spell() == spelled
    assert parse_hub(spelled) == parse_hub(text)


def test_presets_are_pinned():
    for spelled in hub.PRESETS.values():
        data = parse_hub(spelled)
        assert data.spell() == spelled
        assert len(data.revision) == 40
        assert set(data.revision) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hub:", "names no data set of the Hub; write hub:OWNER/NAME"),
        ("hub:pg19", "names no data set"),  # without an owner, `datasets` could take it for one of its readers
        ("hub:a/b/c", "names no data set"),
        ("hub:a b/c", "names no data set"),
        ("hub:../b/c", "names no data set"),
        ("hub:a/b@", "no revision after the @"),
        ("hub:a/b:test", "'test' is not key=value"),
        ("hub:a/b:split=", "'split=' is not key=value"),
        ("hub:a/b:splt=test", "'splt' is not an option; known: split, config, column, file"),
        ("hub:a/b:revision=v1", "'revision' is not an option"),
        ("hub:a/b:split=test:split=train", "'split' is given twice"),
        ("hub:a/b:split=test[0:10]", "is not key=value"),
        ("hub:a/b:file=x.jsonl:split=test", "'split' says nothing about one file"),
        ("hub:a/b:file=x.csv", "neither .parquet nor .jsonl"),
    ],
)
def test_other_words_are_refused_in_one_line(text, words):
    with pytest.raises(EvalError, match=words) as caught:
        parse_hub(text)
    assert "\n" not in str(caught.value)


def answer(monkeypatch, reply):
    """Let the Hub's client answer a question for a data set with `reply`; return the questions."""
    asked = []

    def dataset_info(_, repository, *, revision, timeout):
        asked.append((repository, revision))
        assert timeout
        if isinstance(reply, Exception):
            raise reply
        return SimpleNamespace(sha=reply)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    return asked


def test_a_revision_is_pinned_to_its_commit(monkeypatch):
    asked = answer(monkeypatch, SHA)
    assert pin(parse_hub("hub:a/b:split=train")).spell() == f"hub:a/b@{SHA}:split=train"
    assert pin(parse_hub("hub:a/b@refs/convert/parquet")).revision == SHA
    assert pin(parse_hub(f"hub:a/b@{SHA}")).revision == SHA
    assert asked == [("a/b", "main"), ("a/b", "refs/convert/parquet"), ("a/b", SHA)]


def test_a_hub_that_tells_no_commit_leaves_the_revision(monkeypatch):
    answer(monkeypatch, None)
    assert pin(parse_hub("hub:a/b@v1")).revision == "v1"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (RevisionNotFoundError, "a/b has no revision 'v9'; give a branch"),
        (RepositoryNotFoundError, "a/b is no data set of the Hub, or a private one"),
        (OSError, r"the Hub was asked for a/b at v9 and did not answer \(OSError: \)"),
    ],
)
def test_what_the_hub_refuses_is_one_line(monkeypatch, kind, words):
    answer(monkeypatch, kind.__new__(kind))
    with pytest.raises(EvalError, match=words):
        pin(parse_hub("hub:a/b@v9"))


def test_without_a_network_one_line_says_what_was_tried():
    """The sockets of the tests are blocked, so that this is the real client's own failure."""
    with pytest.raises(EvalError, match=r"Hub was asked for emozilla/pg19-test at main .* needs the network") as caught:
        pin(parse_hub("hub:emozilla/pg19-test"))
    assert "\n" not in str(caught.value)
    with pytest.raises(EvalError, match="cannot be opened: ") as caught:
        next(stream(parse_hub(f"hub:a/b@{SHA}:file=x.jsonl")))
    assert "\n" not in str(caught.value)


def test_rows_come_in_order_over_files_and_without_the_empty_ones(repository):
    assert read(repository) == [("test:0", "one"), ("test:3", "长文 \U0001f600"), ("test:4", "five")]
    assert read(repository, "hub:a/b:split=validation") == [("validation:0", "other")]


def test_splits_configs_and_columns_that_are_not_there(repository, tmp_path):
    with pytest.raises(EvalError, match=r"a/b has no split 'train'; it has: validation, test$"):
        read(repository, "hub:a/b:split=train")
    with pytest.raises(EvalError, match=r"row 0 has no column 'body'; name one with column=: text, id$"):
        read(repository, "hub:a/b:column=body")
    with pytest.raises(EvalError, match="'id' is no text but int; name one with column="):
        read(repository, "hub:a/b:column=id")
    with pytest.raises(EvalError, match=r"cannot be opened: ValueError: BuilderConfig 'en' not found. Available:"):
        read(repository, "hub:a/b:config=en")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EvalError, match="cannot be opened: EmptyDatasetError"):
        read(tmp_path / "empty")


def test_a_config_by_name(tmp_path):
    write(tmp_path / "x" / "test.parquet", text=["of x"])
    write(tmp_path / "y" / "test.parquet", text=["of y"])
    card = "---\nconfigs:\n" + "".join(f"- config_name: {c}\n  data_files: {c}/*.parquet\n" for c in "xy") + "---\n"
    (tmp_path / "README.md").write_text(card)
    assert read(tmp_path, "hub:a/b:config=y:split=train") == [("train:0", "of y")]
    with pytest.raises(EvalError, match=r"cannot be opened: .*Config name is missing.*\['x', 'y'\]") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_one_line(repository):
    path = repository / "data" / "test-00001-of-00002.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    documents = hub._read(str(repository), parse_hub("hub:a/b"))
    assert next(documents).name == "test:0"
    with pytest.raises(EvalError, match="a/b test row 4 cannot be read: ArrowInvalid") as caught:
        list(documents)
    assert "\n" not in str(caught.value)


def test_one_file_whose_lines_differ_in_their_other_keys(tmp_path):
    """Its metadata change beyond the ten MiB that readers infer a schema from, as those of proof-pile do."""
    rows = [{"text": "长文" * 300_000, "meta": {"config": "arxiv"}} for _ in range(12)]
    rows += [{"text": "last\u2028line", "meta": {"score": 3}}]
    folder = tmp_path / f"set@{SHA}" / "test"
    folder.mkdir(parents=True)
    with gzip.open(folder / "t.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in [*rows[:6], {"text": " "}, *rows[6:]])
        file.write("\n")
    found = read(tmp_path / "set", f"hub:a/b@{SHA}:file=test/t.jsonl.gz")
    assert [text for _, text in found] == [row["text"] for row in rows]
    assert [name for name, _ in found] == [f"t.jsonl.gz:{n}" for n in range(14) if n != 6]
    with pytest.raises(EvalError, match=r'a/b t\.jsonl\.gz row 0 has no "body"'):
        read(tmp_path / "set", f"hub:a/b@{SHA}:column=body:file=test/t.jsonl.gz")
    with pytest.raises(EvalError, match="cannot be opened: FileNotFoundError"):
        read(tmp_path / "set", f"hub:a/b@{SHA}:file=test/u.jsonl.gz")


def test_one_parquet_file(repository):
    repository.rename(repository.with_name("set@main"))
    assert read(repository, "hub:a/b:file=data/test-00001-of-00002.parquet") == [
        ("test-00001-of-00002.parquet:0", "five")
    ]


def test_no_row_is_read_beyond_those_needed(repository, tokenizer, monkeypatch):
    whole = list(hub._open(str(repository), parse_hub("hub:a/b")))

    def rows():
        yield from whole[:4]
        pytest.fail("read beyond what was needed")

    monkeypatch.setattr(hub, "_open", lambda repository, data: rows())
    corpus = tokenise(stream(parse_hub("hub:a/b")), tokenizer, name="toy", num_tokens=5, num_documents=1, in_order=True)
    assert [d.name for d in corpus.documents] == ["test:3"]
    assert corpus.num_too_short == 1


def test_without_datasets_the_line_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EvalError, match=r"hub:a/b@main:split=test needs a package .*: pip install 'rope-ext\[data\]'"):
        next(stream(parse_hub("hub:a/b")))
