"""lm-eval in and out: nothing cut, its own numbers to the last digit, ours and its log-likelihoods the same."""

import copy
import json
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.tasks import TaskManager

from evals import harness
from evals.corpora import TokenDocument
from evals.errors import EvalError
from evals.metrics import kind_of, metric_of
from evals.perplexity import nll_by_length
from recipes.benchmarks import TASKS
from recipes.lm_eval_model import RopeExtLM, run_cli
from rope_ext import extend, load_model
from rope_ext.registry import parse_method

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's own, and its tasks'


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("lm-eval")


def opened(tiny, cache, *names, lengths=(256,), window=1024, limit=6, **more):
    asked = {"shots": None, "seed": 0, "include_path": [TASKS]} | more
    return harness.open_tasks(
        list(names), tokenizer=tiny[1], window=window, lengths=lengths, limit=limit, cache=cache, **asked
    )


def scored(column, lm):
    return [each for some in harness.score(column, lm, [d.unit for d in column.documents]) for each in some]


@pytest.mark.parametrize("task", ["rope_ext_next_line", "rope_ext_passkey", "rope_ext_perplexity"])
def test_values_are_those_of_lm_eval_itself(tiny, cache, task):
    """The same documents through simple_evaluate with lm-eval's plain HFLM on the patched model."""
    from lm_eval.models.huggingface import HFLM

    (column,) = opened(tiny, cache, task, limit=8)
    model, tokenizer = tiny
    with extend(model, parse_method("yarn"), context=1024):
        ours = scored(column, harness.StrictLM(model, tokenizer, window=1024))
        plain = HFLM(pretrained=model, tokenizer=tokenizer, max_length=1024, batch_size=1)
        metadata = {"max_seq_lengths": [256], "tokenizer": "tiny"}
        manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
        theirs = lm_eval.simple_evaluate(model=plain, tasks=[task], task_manager=manager, limit=8, bootstrap_iters=0)
    for metric in column.metrics:
        mine = [each for each in ours if each.metric == metric]
        total = sum(each.weight for each in mine)
        mean = sum(each.value * each.weight for each in mine) / total
        value = math.exp(mean) if harness.kind_of_metric(metric.name) == "perplexity" else mean
        assert value == pytest.approx(theirs["results"][task][f"{metric.name},none"], rel=1e-6)
    theirs = [json.dumps(each["filtered_resps"]) for each in theirs["samples"][task]]
    mine = [json.dumps(each.logged["filtered_resps"]) for each in ours if each.metric == column.metrics[0]]
    assert theirs == mine


def test_a_log_likelihood_is_that_of_our_engine(tiny):
    model, tokenizer = tiny
    ids = tokenizer("def add(first, second):\n    return first + second\n" * 60)["input_ids"][:600]
    document = TokenDocument(name="text", ids=tuple(ids))
    for name in ("yarn", "unscaled", "llama3"):  # methods that follow the length: HFLM leaves the last token out
        with extend(model, parse_method(name), context=1024) as patch:
            ours = nll_by_length(model, document, (600,), frequency_key=patch.frequency_key, memory_budget=2**30)[600]
            lm = harness.StrictLM(model, tokenizer, window=1024)
            [(theirs, _)] = lm._loglikelihood_tokens([(("", ""), ids[:1], ids[1:])])
        assert -theirs / 599 == pytest.approx(float(torch.as_tensor(ours).double().mean()), abs=1e-5)


def test_our_passkey_and_lm_evals_answers_agree(tiny, cache):
    """The same prompts decoded through lm-eval and scored by our engine: found there iff found here."""
    from evals.corpora import encode
    from evals.passkey import FILLER, PromptMaker, RepeatedFiller
    from evals.variants import VARIANTS

    (column,) = opened(tiny, cache, "rope_ext_passkey", lengths=(700,), limit=20)
    model, tokenizer = tiny
    maker = PromptMaker(
        tokenizer=tokenizer,
        variant=VARIANTS["classic"],
        filler=RepeatedFiller(encode(tokenizer, FILLER)),
        seed=0,
        num_spare=16,
    )
    # A text can be read as fewer tokens than it was made of; the documents are made longer until they are as long
    every = [maker.relative(length=n, depths=[0.0, 0.25, 0.5, 0.75, 1.0], num_trials=4) for n in range(700, 730)]
    by_text = {tokenizer.decode(p.ids[1 : -p.num_answer]): p for prompts in every for p in prompts}  # without BOS
    found = {"lm-eval": [], "ours": []}
    for name in ("unscaled", "ntk", "yarn"):
        with extend(model, parse_method(name), context=1024):
            for each in scored(column, harness.StrictLM(model, tokenizer, window=1024)):
                prompt, text = by_text[each.logged["doc"]["input"]], each.logged["doc"]["input"]
                again = tokenizer(text)["input_ids"]
                assert len(again) == each.logged["doc"]["tokens"] <= 700 - 16
                answer = prompt.ids[-prompt.num_answer :]
                with torch.no_grad():
                    logits = model(torch.tensor([[*again, *answer]])).logits[0, -len(answer) - 1 : -1]
                ours = bool((logits.argmax(-1) == torch.tensor(answer)).all())
                found["lm-eval"].append(each.value == 1.0)
                found["ours"].append(ours)
    assert found["lm-eval"] == found["ours"]
    assert 0 < sum(found["ours"]) < len(found["ours"])


@pytest.mark.parametrize(
    ("ask", "tokens"),
    [
        (
            lambda lm: lm.loglikelihood([request("loglikelihood", ("word " * 300, " end"))]),
            "does not fit into the window of 256",
        ),
        (
            lambda lm: lm.generate_until(
                [request("generate_until", ("word " * 300, {"max_gen_toks": 8, "until": []}))]
            ),
            "and 8 for the answer",
        ),
    ],
)
def test_nothing_is_cut(tiny, ask, tokens):
    lm = harness.StrictLM(*tiny, window=256)
    with pytest.raises(EvalError, match=tokens):
        ask(lm)


def request(kind, arguments):
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("t", 0, 1))


def test_a_prompt_that_does_not_fit_is_told_before_anything_is_scored(tiny, cache):
    with pytest.raises(EvalError, match=r"rope_ext_next_line, document \d+: .* does not fit into the window of 128"):
        opened(tiny, cache, "rope_ext_next_line", window=128)
    with pytest.raises(EvalError, match=r"cannot make documents of 64 tokens: .*shorter than the template"):
        opened(tiny, cache, "rope_ext_passkey", lengths=(64,))


def test_names_that_are_none(tiny, cache):
    with pytest.raises(EvalError, match=r"'hellaswagg' is no task of lm-eval .*did you mean hellaswag"):
        opened(tiny, cache, "hellaswagg")


def test_a_data_set_that_is_not_here_is_one_line(tiny, cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        EvalError, match=r"arc_easy reads the data set allenai/ai2_arc from the Hub, which failed .*network"
    ):
        opened(tiny, cache, "arc_easy")


def test_a_generator_that_does_not_end_is_stopped(tiny, cache, tmp_path, monkeypatch):
    (tmp_path / "endless.yaml").write_text(
        (TASKS / "rope_ext_passkey.yaml")
        .read_text()
        .replace("rope_ext_passkey", "endless")
        .replace("generate.passkey", "endless.passkey")
        .replace("generate.found", "endless.found")
    )
    (tmp_path / "endless.py").write_text(
        "import time\ndef passkey(**_):\n    time.sleep(600)\ndef found(doc, results):\n    return {}\n"
    )
    monkeypatch.setattr(harness, "PATIENCE", 8.0)
    with pytest.raises(
        EvalError, match=r"endless had not made its documents of 256 tokens after 8 s; its generator does not end"
    ):
        opened(tiny, cache, "endless", include_path=[tmp_path])


def test_documents_that_are_made_are_the_same_again_and_other_ones_under_another_seed(tiny, cache, tmp_path):
    one, again, other = (
        opened(tiny, place, "rope_ext_passkey", seed=seed)[0] for place, seed in ((cache, 0), (tmp_path, 0), (cache, 1))
    )
    assert [d.data_hash for d in one.documents] == [d.data_hash for d in again.documents]
    assert [d.data_hash for d in one.documents] != [d.data_hash for d in other.documents]
    assert {d.doc["depth"] for d in one.documents} == {0.0, 0.25, 0.5, 0.75, 1.0}, "a limit leaves no depth out"


@pytest.mark.enable_socket  # what makes upstream's documents looks for data of nltk's, and goes on without
def test_rulers_tasks_one_length_at_a_time(tiny, cache):
    """Where upstream puts -1 beside lengths that a limit left out, each length has its own documents here."""
    columns = opened(tiny, cache, "niah_single_1", lengths=(600, 1000), limit=3)
    assert [column.length for column in columns] == [600, 1000]
    model, tokenizer = tiny
    for column in columns:
        assert len(column.documents) == 3
        assert all(max(d.stretches) <= column.length for d in column.documents)
        values = [each.value for each in scored(column, harness.StrictLM(model, tokenizer, window=1024))]
        assert len(values) == 3
        assert set(values) <= {0.0, 1.0}
        assert column.metrics[0].label == "string-match"


def test_a_batch_is_refused_where_padding_would_change_the_frequencies(tiny):
    with pytest.raises(EvalError, match="use batch_size 1"):
        harness.StrictLM(*tiny, window=512, batch_size=4, follows_length=True)
    with pytest.raises(EvalError, match="use batch_size 1"):
        RopeExtLM(pretrained="tiny", method="dynamic-ntk", factor=4, batch_size=2)


def test_batches_change_nothing_under_a_static_method():
    alone, together = (RopeExtLM(pretrained="tiny", method="yarn", factor=4, batch_size=n) for n in (1, 4))
    requests = [request("loglikelihood", ("x = " * n, " y")) for n in (3, 90, 150, 20)]
    one, many = ([value for value, _ in lm.loglikelihood(requests)] for lm in (alone, together))
    assert one == pytest.approx(many, abs=1e-4)


def test_the_model_class_is_the_method(tiny):
    lm = RopeExtLM(pretrained="tiny", method="linear", context=1024)
    model, tokenizer = tiny
    text = "import os\n" * 60
    with extend(model, parse_method("linear"), context=1024):
        want = harness.StrictLM(model, tokenizer, window=1024).loglikelihood(
            [request("loglikelihood", (text, "import"))]
        )
    assert lm.loglikelihood([request("loglikelihood", (text, "import"))]) == want
    assert lm.max_length == 1024
    assert lm.get_model_info()["rope_ext"]["method"] == "linear"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"method": "yran"}, "did you mean 'yarn'"),
        ({"methods": "yarn"}, "methods: not known; rope_ext takes pretrained, method"),
        ({"batch_size": "auto"}, "rope_ext takes a whole number"),
        ({"dtype": "float33"}, "none of torch's"),
    ],
)
def test_bad_arguments_of_the_model_class(words, told):
    with pytest.raises(Exception, match=told):
        RopeExtLM(**({"pretrained": "tiny", "factor": 2} | words))


def test_a_cache_of_another_method_is_refused(tmp_path):
    """lm-eval's cache knows answers by their prompts alone, and would give one method's to another."""
    from lm_eval.api.model import CachingLM

    yarn, again, linear = (RopeExtLM(pretrained="tiny", method=m, factor=4) for m in ("yarn", "yarn", "linear"))
    asked = [request("loglikelihood", ("a = 1\n" * 100, "a"))]
    first = CachingLM(yarn, str(tmp_path / "cache.db")).loglikelihood(asked)
    assert CachingLM(again, str(tmp_path / "cache.db")).loglikelihood(asked) == first
    with pytest.raises(EvalError, match="another model or method filled"):
        CachingLM(linear, str(tmp_path / "cache.db"))
    shutil.copy(tmp_path / "cache.db", tmp_path / "unmarked.db")
    CachingLM(yarn, str(tmp_path / "unmarked.db")).dbdict.pop(harness.FINGERPRINT)
    with pytest.raises(EvalError, match="does not say which model filled it"):
        CachingLM(linear, str(tmp_path / "unmarked.db"))


def test_kinds():
    assert kind_of("passkey", "classic") == kind_of("lm-eval/arc", "acc_norm, 0-shot") == "share"
    assert kind_of("perplexity", "prefix") == kind_of("lm-eval/wikitext", "word_perplexity, 0-shot") == "perplexity"
    assert kind_of("nll-by-position", "by-position") == kind_of("lm-eval/x", "bits_per_byte, 5-shot") == "mean"
    assert metric_of("lm-eval/gsm8k", "exact_match, strict-match, 5-shot") == "exact_match"
    assert harness.value_of("word_perplexity", (-20.0, 10)) == (2.0, 10)
    assert harness.value_of("bits_per_byte", (-20.0 * math.log(2), 10)) == (2.0, 10)
    with pytest.raises(EvalError, match="no number of its own"):
        harness.value_of("f1_macro", (1, 0))


def test_help_needs_no_lm_eval():
    code = "import sys\nimport recipes.setting, recipes.page\nassert 'lm_eval' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_file_imports_lm_eval():
    root = Path(__file__).parent.parent.parent
    folders = ("rope_ext", "evals", "recipes", "scripts")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    found = [path.name for path in files if re.search(r"^ *(import|from) lm_eval\b", path.read_text(), re.MULTILINE)]
    assert found == ["harness.py"]


def test_our_perplexity_task_is_the_first_tokens_once(tiny, cache):
    """One BOS, and every token behind it: what our engine has for the same ids."""
    (column,) = opened(tiny, cache, "rope_ext_perplexity", lengths=(300,), limit=3)
    model, tokenizer = tiny
    with extend(model, parse_method("yarn"), context=1024) as patch:
        for each in scored(column, harness.StrictLM(model, tokenizer, window=1024)):
            ids = tokenizer(each.logged["doc"]["text"])["input_ids"]
            assert ids[:2].count(tokenizer.bos_token_id) == 1
            document = TokenDocument(name="text", ids=tuple(ids))
            ours = nll_by_length(model, document, (len(ids),), frequency_key=patch.frequency_key, memory_budget=2**30)[
                len(ids)
            ]
            assert each.weight == len(ids) - 1 == len(ours)
            assert each.value == pytest.approx(float(torch.as_tensor(ours).double().mean()), abs=1e-5)


def test_a_tokenizer_that_ends_texts_is_refused(tiny):
    from tokenizers import processors

    model, tokenizer = tiny
    ending = copy.deepcopy(tokenizer)
    eos = (ending.eos_token, ending.eos_token_id)
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {eos[0]}", special_tokens=[eos])
    with pytest.raises(EvalError, match="ends every text with its EOS"):
        harness.StrictLM(model, ending, window=256)


def test_no_code_of_a_checkpoint_is_run(tiny, tmp_path):
    """A tokenizer that names code of its own is kept without that, since upstream's generators would run it."""
    tiny[1].save_pretrained(tmp_path / "evil")
    told = json.loads((tmp_path / "evil" / "tokenizer_config.json").read_text())
    (tmp_path / "evil" / "tokenizer_config.json").write_text(
        json.dumps(told | {"auto_map": {"AutoTokenizer": ["evil.Tok", None]}})
    )
    from transformers import AutoTokenizer

    evil = AutoTokenizer.from_pretrained(tmp_path / "evil", trust_remote_code=False)
    evil.init_kwargs["auto_map"] = {"AutoTokenizer": ["evil.Tok", None]}
    home = harness._tokenizer_folder(evil, tmp_path / "cache")
    assert "auto_map" not in (home / "tokenizer_config.json").read_text()


def test_a_generator_that_is_known_not_to_end_is_refused(tiny, cache):
    with pytest.raises(EvalError, match="does not end under 4096"):
        opened(tiny, cache, "ruler_vt", lengths=(300,))


OWN = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{c}}}}"
doc_to_target: a
num_fewshot: {shots}
metric_list:
{metrics}
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"q": f"{i} is", "c": [" a", " b"], "a": i % 2}) + "\n" for i in range(6))
    )
    (tmp_path / "fns.py").write_text("def med(values):\n    return sorted(values)[len(values) // 2]\n")

    def write(name, *metrics, shots=0):
        listed = "\n".join(f"  - {{metric: {m}, aggregation: {how}, higher_is_better: true}}" for m, how in metrics)
        text = OWN.format(name=name, data=tmp_path / "rows.jsonl", shots=shots, metrics=listed)
        (tmp_path / f"{name}.yaml").write_text(text)
        return tmp_path

    return write


def test_metrics_of_all_documents_together_are_left_out_and_said(tiny, cache, own):
    place = own("mixed", ("acc", "mean"), ("acc_norm", "!function fns.med"), ("f1", "f1"))
    (column,) = opened(tiny, cache, "mixed", include_path=[place])
    assert [metric.name for metric in column.metrics] == ["acc"]
    assert len(column.notes) == 2
    assert {each.metric.name for each in scored(column, harness.StrictLM(*tiny, window=1024))} == {"acc"}
    alone = own("none_left", ("f1", "f1"))
    with pytest.raises(EvalError, match="no metric of single documents"):
        opened(tiny, cache, "none_left", include_path=[alone])


def test_settings_that_a_group_gives_are_not_lost_in_silence(tiny, cache, own):
    place = own("member", ("acc", "mean"))
    (place / "plain.yaml").write_text("group: plain\ntask: [member]\n")
    (place / "shots.yaml").write_text("group: shots\ntask:\n  - {task: member, num_fewshot: 2}\n")
    assert [c.name for c in opened(tiny, cache, "plain", include_path=[place])] == ["member"]
    with pytest.raises(EvalError, match="the group shots sets num_fewshot for its tasks"):
        opened(tiny, cache, "shots", include_path=[place])
    with pytest.raises(EvalError, match="member takes no shots"):
        opened(tiny, cache, "member", include_path=[place], shots=3)


def test_what_made_documents_is_part_of_what_they_are_kept_under(tiny, cache, tmp_path):
    for name in ("rope_ext_passkey.yaml", "generate.py"):
        shutil.copy(TASKS / name, tmp_path / name)
    (tmp_path / "words.txt").write_text("one")
    first = {path.name for path in cache.glob("rope_ext_passkey-*.json")}
    opened(tiny, cache, "rope_ext_passkey", include_path=[tmp_path])
    second = {path.name for path in cache.glob("rope_ext_passkey-*.json")}
    (tmp_path / "words.txt").write_text("two")
    opened(tiny, cache, "rope_ext_passkey", include_path=[tmp_path])
    third = {path.name for path in cache.glob("rope_ext_passkey-*.json")}
    assert first < second < third


def test_a_document_graded_by_other_code_is_another_one(tiny, cache, own):
    place = own("graded", ("acc", "mean"))
    yaml = (place / "graded.yaml").read_text()

    def hashes(code):
        (place / "fns.py").write_text(code)
        (place / "graded.yaml").write_text(yaml + "process_results: !function fns.right\n")
        (column,) = opened(tiny, cache, "graded", include_path=[place])
        return [document.data_hash for document in column.documents]

    code = "def right(doc, results):\n    return {'acc': helper(results)}\n\n\ndef helper(results):\n    return "
    first = hashes(code + "1.0\n")
    assert len(set(first)) == 6
    assert hashes(code + "1.0\n") == first
    assert not set(hashes(code + "0.0\n")) & set(first)


WRITTEN = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: a
num_fewshot: 0
generation_kwargs: {options}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


@pytest.mark.parametrize("option", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_the_room_that_an_answer_needs_is_counted_under_all_its_names(tiny, cache, own, option):
    place = own("unused", ("acc", "mean"))
    options = "{until: ['x'], %s: %s}"
    text = WRITTEN.format(name="written", data=place / "rows.jsonl", options=options % (option, 40))
    (place / "written.yaml").write_text(text)
    (column,) = opened(tiny, cache, "written", include_path=[place])
    asked = len(tiny[1](column.documents[0].requests[0].args[0])["input_ids"])
    assert column.documents[0].stretches == (asked + 40,)
    with pytest.raises(EvalError, match=r"written, document 0: .* and 40 for the answer does not fit"):
        opened(tiny, cache, "written", include_path=[place], window=asked + 39)


def test_a_length_of_prompt_and_answer_together_is_refused(tiny, cache, own):
    place = own("unused", ("acc", "mean"))
    text = WRITTEN.format(name="whole", data=place / "rows.jsonl", options="{until: ['x'], max_length: 64}")
    (place / "whole.yaml").write_text(text)
    with pytest.raises(EvalError, match="max_length leaves no room known; give max_gen_toks"):
        opened(tiny, cache, "whole", include_path=[place])


def test_a_cache_of_another_tokenizer_is_refused(tmp_path):
    """The same weights under the same method: only how a text becomes tokens differs."""
    from lm_eval.api.model import CachingLM

    place = tmp_path / "model"
    model, tokenizer = load_model("tiny")
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    own = RopeExtLM(pretrained=str(place), method="yarn", factor=4)
    tokenizer.add_tokens(["hello there"])
    tokenizer.save_pretrained(place)
    other = RopeExtLM(pretrained=str(place), method="yarn", factor=4)
    assert own.fingerprint.split("-")[0] == other.fingerprint.split("-")[0]
    CachingLM(own, str(tmp_path / "cache.db"))
    with pytest.raises(EvalError, match="another model or method filled"):
        CachingLM(other, str(tmp_path / "cache.db"))


@pytest.mark.parametrize("words", [["--cache_requests", "true"], ["run", "--cache_requests=refresh"]])
def test_a_cache_of_requests_that_knows_no_lengths_is_refused(words):
    with pytest.raises(EvalError, match="--cache_requests knows no lengths"):
        run_cli([*words, "--model", "rope_ext", "--tasks", "rope_ext_passkey"])


def test_a_generator_ends_with_who_started_it(tmp_path):
    """A killed run must not leave a process that makes documents for nobody."""
    child = "import sys, threading, time, os\n"
    child += "from evals.harness import _end_with\n"
    child += "threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()\n"
    child += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)\n"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    started = subprocess.Popen([sys.executable, "-c", parent], cwd=Path(__file__).parent.parent.parent)
    pid = wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    started.kill()
    started.wait()
    assert wait_for(lambda: not is_running(int(pid))), "it goes on without its parent"


def wait_for(found, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
