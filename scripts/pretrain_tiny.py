"""Train the bundled tiny LLaMA (0.9 M parameters, window 256) from scratch and write it to rope_ext/assets/tiny.

    python scripts/pretrain_tiny.py                    # about an hour on two CPU cores; minutes on a GPU
    python scripts/pretrain_tiny.py --resume           # go on from the last checkpoint in --work
    python scripts/pretrain_tiny.py --method alibi     # the same with another method from the first step: tiny-alibi

Data: this Python's own sources (nine files in ten; evals.corpora holds the tenth out) and recall tasks made on
the fly. A passkey task alone is not learnt in so few tokens, so the curriculum varies the distance first:

    stage 1  128 tokens  text, repeated snippets, lists of named numbers
    stage 2  128 tokens  the same and passkeys
    stage 3  256 tokens  mostly text and passkeys

Every window of every task begins with BOS and every token keeps a small weight: otherwise BOS becomes the mark of
a synthetic task and the text after it noise. The batch of a step is a function of (seed, step): a resumed run
takes the same steps.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the script is run by path; `evals` lies beside it, installed or not

from evals import corpora, grading, passkey, variants  # noqa: E402  (after the path is set)
from rope_ext.export import save_extended  # noqa: E402
from rope_ext.hf import OWN_FORMAT  # noqa: E402
from rope_ext.patch import active_patch_table, extend  # noqa: E402
from rope_ext.registry import parse_method  # noqa: E402

VOCAB_SIZE = 1024
WINDOW = 256
TOKENS_PER_STEP = 8192
BOS, EOS = "<|begin|>", "<|end|>"
BACKGROUND_WEIGHT = 0.1
# (share of all steps, window, task -> share of windows)
STAGES = (
    (0.36, 128, {"text": 0.30, "copy": 0.40, "recall": 0.30}),
    (0.08, 128, {"text": 0.30, "copy": 0.20, "recall": 0.20, "passkey": 0.30}),
    (0.56, 256, {"text": 0.50, "copy": 0.13, "recall": 0.12, "passkey": 0.25}),
)
NAMES = (
    "alpha beta gamma delta size width height count total limit first last left right red green blue north south "
    "index value offset start stop step key code port lock door room box bag cup hat sun moon star tree"
).split()
RECALL_FORMS = (  # (a line of the list, the question up to its answer)
    ("{name} = {number}\n", "{name} ="),
    ("The {name} is {number}.\n", "\nWhat is the {name}? The {name} is"),
    ("{name}: {number}\n", "{name}:"),
)


def make_tokenizer(documents: list[corpora.Document]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of 1,024 tokens, one token a digit, trained on the training sources and the templates."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    needle = variants.NEEDLE.format(subject="pass key", value="{key}")
    template = variants.INSTRUCTION + passkey.FILLER + needle + variants.QUESTION
    tokenizer.train_from_iterator([*(d.text for d in documents), *[template] * 300], trainer)
    bos_id, eos_id = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
            ),
        ]
    )
    assert eos_id is not None
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=WINDOW,
        clean_up_tokenization_spaces=False,
    )


def bos_id(tokenizer: PreTrainedTokenizerFast) -> int:
    found = corpora.bos_id(tokenizer)
    assert found is not None
    return found


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained model; weights follow the torch seed."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=bos_id(tokenizer),
        eos_token_id=cast("int", tokenizer.eos_token_id),
        use_cache=True,
    )
    return LlamaForCausalLM(config)


class Windows:
    """Training windows on the fly: ids and loss weights, shape (num_windows, window), a function of (seed, step)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, documents: list[np.ndarray], seed: int) -> None:
        self.tokenizer = tokenizer
        self.documents = documents
        self.lengths = np.array([len(d) for d in documents], dtype=np.float64)
        self.seed = seed
        self.bos = bos_id(tokenizer)
        self.cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self.cache:
            self.cache[text] = corpora.encode(self.tokenizer, text)
        return self.cache[text]

    def text(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        """Return a slice of one document; one in ten is a document's very start."""
        while True:
            document = self.documents[rng.choice(len(self.documents), p=self.lengths / self.lengths.sum())]
            if len(document) >= num_tokens:
                break
        start = 0 if rng.random() < 0.1 else int(rng.integers(len(document) - num_tokens + 1))
        return document[start : start + num_tokens].tolist()

    def noise(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        return rng.integers(2, VOCAB_SIZE, num_tokens).tolist()

    def make_text(self, rng: np.random.Generator, window: int) -> tuple[list[int], list[float]]:
        return [self.bos, *self.text(rng, window - 1)], [1.0] * window

    def make_copy(self, rng: np.random.Generator, window: int) -> tuple[list[int], list[float]]:
        """Return gaps with one snippet again and again; all but the first token of each repeat is scored."""
        size = int(rng.integers(4, window // 4))
        snippet = self.text(rng, size) if rng.random() < 0.5 else self.noise(rng, size)
        background = self.text(rng, window) if rng.random() < 0.6 else self.noise(rng, window)
        ids, weights, seen = [self.bos], [0.0], False
        while len(ids) < window:
            gap = int(rng.integers(0, window // 2))
            ids += background[len(ids) : len(ids) + gap]
            weights += [BACKGROUND_WEIGHT] * (len(ids) - len(weights))
            ids += snippet
            weights += [BACKGROUND_WEIGHT] + [1.0 if seen else BACKGROUND_WEIGHT] * (size - 1)
            seen = True
        return ids[:window], weights[:window]

    def make_recall(self, rng: np.random.Generator, window: int) -> tuple[list[int], list[float]]:
        """Return a list of 2 to 6 named numbers, then questions in random order with filler between."""
        line_form, question_form = RECALL_FORMS[rng.integers(len(RECALL_FORMS))]
        names = rng.choice(NAMES, int(rng.integers(2, 7)), replace=False)
        numbers = [str(rng.integers(10 ** (k - 1), 10**k)) for k in rng.integers(2, 6, len(names))]
        ids = [self.bos]
        for name, number in zip(names, numbers, strict=True):
            ids += corpora.encode(self.tokenizer, line_form.format(name=name, number=number))
        weights = [BACKGROUND_WEIGHT] * len(ids)
        background = self.text(rng, window) if rng.random() < 0.5 else (self.encode(passkey.FILLER) * window)[:window]
        while len(ids) < window:
            for i in rng.permutation(len(names)):
                gap = int(rng.integers(0, window // 4)) if rng.random() < 0.6 else 0
                question = [*background[:gap], *self.encode(question_form.format(name=names[i]))]
                answer = [*self.encode(" "), *(d for c in numbers[i] for d in self.encode(c))]
                end = self.encode("\n")
                ids += [*question, *answer, *end]
                weights += [BACKGROUND_WEIGHT] * len(question) + [1.0] * (len(answer) + len(end))
        return ids[:window], weights[:window]

    def make_passkey(self, rng: np.random.Generator, window: int) -> tuple[list[int], list[float]]:
        """Return an evaluation prompt of exactly the window, or a shorter one with text after it, key scored."""
        filler = self.encode(passkey.FILLER) if rng.random() < 0.5 else self.text(rng, window)
        key = str(rng.integers(10 ** (variants.KEY_DIGITS - 1), 10**variants.KEY_DIGITS))
        maker = passkey.PromptMaker(
            tokenizer=self.tokenizer, variant=variants.classic_with(key), filler=passkey.RepeatedFiller(filler)
        )
        length = int(rng.integers(maker.shortest(1), window + 1)) if rng.random() < 0.3 else window
        [prompt] = maker.relative(length=length, depths=(float(rng.random()),), num_trials=1)
        ids = [*prompt.ids, *self.text(rng, window)[: window - length]]
        weights = [BACKGROUND_WEIGHT] * window
        weights[length - prompt.num_answer : length] = [1.0] * prompt.num_answer
        return ids, weights

    def batch(self, step: int, window: int, mix: dict[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids int64 and weights fp32, each (TOKENS_PER_STEP // window, window)."""
        rng = np.random.default_rng([self.seed, step])
        num_windows = TOKENS_PER_STEP // window
        tasks = [t for t, share in mix.items() for _ in range(round(share * num_windows))]
        tasks = (tasks + ["text"] * num_windows)[:num_windows]
        rows = [getattr(self, f"make_{task}")(rng, window) for task in tasks]
        return torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows])


def stage_at(step: int, num_steps: int) -> tuple[int, dict[str, float]]:
    done = 0.0
    for share, window, mix in STAGES:
        done += share
        if step < done * num_steps:
            return window, mix
    return STAGES[-1][1], STAGES[-1][2]


def lr_at(step: int, num_steps: int, peak: float) -> float:
    """Return the rate: linear warm-up over 150 steps, constant, linear decay to 2 % over the last third."""
    warm = min(1.0, (step + 1) / 150)
    left = min(1.0, (num_steps - step) / (num_steps / 3))
    return peak * warm * max(left, 0.02)


@torch.no_grad()
def evaluate(
    model: LlamaForCausalLM, windows: Windows, held_out: list[np.ndarray], num_trials: int = 24
) -> dict[str, float]:
    """Return held-out text NLL (first 256 tokens of each file) and passkey accuracy at 1x and 4x of the window."""
    ids = torch.tensor(
        np.stack([[windows.bos, *d[: WINDOW - 1]] for d in held_out if len(d) >= WINDOW]), device=model.device
    )
    losses = [
        F.cross_entropy(model(input_ids=b, use_cache=False).logits[:, :-1].transpose(1, 2), b[:, 1:], reduction="none")
        for b in ids.split(16)
    ]
    row = {"text_nll": float(torch.cat(losses).double().mean())}
    for length in (128, WINDOW, 4 * WINDOW):
        maker = passkey.PromptMaker(
            tokenizer=windows.tokenizer,
            variant=variants.VARIANTS["classic"],
            filler=passkey.RepeatedFiller(windows.encode(passkey.FILLER)),
            seed=99,
        )
        prompts = maker.relative(length=length, depths=(0.0, 0.5, 1.0), num_trials=num_trials // 3)
        scores = grading.score_prompts(model, prompts, frequency_key=lambda _n: 0)
        row[f"passkey_{length}"] = float(np.mean([score.correct for some in scores for _, score in some]))
    return row


def save_checkpoint(path: Path, state: dict[str, object]) -> None:
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def trained_under(model: LlamaForCausalLM, spelled: str | None) -> dict[str, str]:
    """Put the method into the model, if one is named, and return what the record says of it."""
    if spelled is None:
        return {}
    extend(model, parse_method(spelled), context=WINDOW)
    return {"method": spelled}


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Write the model: as it is, or with the method that it was trained under, for rope_ext.load."""
    if active_patch_table(model) is None:
        out.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(out)
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(save_extended(model, Path(folder) / "model", format=OWN_FORMAT), out, dirs_exist_ok=True)


def write_card(directory: Path) -> None:
    """Write the model card beside the weights, every number in it from training.json."""
    record = json.loads((directory / "training.json").read_text())
    method = record.get("method")
    positions = f"trained from the first step under {method}; rope_ext.load opens it" if method else "theta 10000"
    final = record["final"]
    mixes = [", ".join(f"{task} {part:.0%}" for task, part in mix.items()) for _, _, mix in STAGES]
    stages = "\n".join(
        f"- {share:.0%} of the steps on {window} tokens: {mix}"
        for (share, window, _), mix in zip(STAGES, mixes, strict=True)
    )
    (directory / "README.md").write_text(f"""# {directory.name}: a LLaMA with a window of {WINDOW} tokens

A subject for measuring context extension on a CPU, bundled with rope-ext; of no other use. {record["parameters"]:,}
parameters: hidden 128, 4 layers, 4 heads, 2 key-value heads, head_dim 32, tied embeddings;
{positions}. Byte-level BPE of {VOCAB_SIZE:,} tokens, one token a digit.

Data: the Python {record["python"]} standard library's sources ({record["train_tokens"]:,} tokens) and recall tasks
made on the fly. One source file in ten, chosen by a hash of its relative path (`evals.corpora.is_held_out`), was held
out ({record["held_out_tokens"]:,} tokens); rope-ext's default evaluation corpus is those files only.

Training, {record["tokens"]:,} tokens in {record["num_steps"]:,} steps, seed {record["seed"]}:

    {record["command"]}

{final["seconds"] / 60:.0f} minutes on {record["machine"]}, torch {record["torch"]}, while other work ran beside it.
AdamW, peak rate 3e-3, 150 steps of warm-up, linear decay over the last third. Tasks by share of windows:

{stages}

At the end: loss of the last step {final["loss"]:.3f} (all tasks, weighted); held-out text {final["text_nll"]:.3f} nats
per token over the first {WINDOW} tokens of each file; passkey {final["passkey_128"]:.2f} at 128 tokens,
{final["passkey_256"]:.2f} at 256 and {final["passkey_1024"]:.2f} at 1,024 (24 trials each, {method or "unscaled"}).

Weights: SHA-256 `{record["weights_sha256"]}`.
Apache-2.0; the text trained on is CPython's, under the PSF licence.
""")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--method", help="train under this position method, as alibi (default: plain rotation)")
    parser.add_argument("--out", type=Path, help="default: rope_ext/assets/tiny, or tiny-METHOD")
    parser.add_argument("--work", type=Path, help="checkpoints; default: runs/pretrain-NAME")
    parser.add_argument("--tokens", type=float, default=36e6, help="training tokens in all")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--card", action="store_true", help="only write the model card of the model in --out again")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.out = args.out or ROOT / "rope_ext" / "assets" / ("tiny" if args.method is None else f"tiny-{args.method}")
    args.work = args.work or ROOT / "runs" / f"pretrain-{args.out.name}"
    return args


def main() -> None:
    args = parsed()
    if args.card:
        write_card(args.out)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    random.seed(args.seed)
    torch.manual_seed(args.seed)

    train_documents = corpora.python_sources("train")
    tokenizer = make_tokenizer(train_documents)
    train = [np.array(corpora.encode(tokenizer, d.text), dtype=np.int64) for d in train_documents]
    held_out = [np.array(corpora.encode(tokenizer, d.text), dtype=np.int64) for d in corpora.python_sources("held-out")]
    train = [d for d in train if len(d) >= 16]
    windows = Windows(tokenizer, train, args.seed)
    model = make_model(tokenizer).to(args.device)
    chosen = trained_under(model, args.method)
    num_steps = int(args.tokens // TOKENS_PER_STEP)
    sizes = {"train_tokens": sum(map(len, train)), "held_out_tokens": sum(map(len, held_out)), "num_steps": num_steps}
    sizes["parameters"] = sum(p.numel() for p in model.parameters())
    print(json.dumps(sizes), flush=True)

    asked = {"tokens": args.tokens, "lr": args.lr, "seed": args.seed}
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.02)
    checkpoint = args.work / "checkpoint.pt"
    first_step, seconds_before = 0, 0.0
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint, map_location=args.device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step, seconds_before = state["step"], state["seconds"]
        if state["asked"] != asked | chosen:
            raise SystemExit(f"--resume: {checkpoint} was made with {state['asked']}, not {asked | chosen}; give those")

    def loss_of(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        nll = F.cross_entropy(logits.reshape(-1, VOCAB_SIZE), ids[:, 1:].reshape(-1), reduction="none")
        weight = weights[:, 1:].reshape(-1)
        return (nll * weight).sum() / weight.sum()

    compiled = torch.compile(loss_of)
    started = time.time()
    for step in range(first_step, num_steps):
        ids, weights = windows.batch(step, *stage_at(step, num_steps))
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, num_steps, args.lr)
        loss = compiled(ids.to(args.device), weights.to(args.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(loss.item()):
            raise SystemExit(f"step {step}: the loss is {loss.item()}")
        if (step + 1) % 20 == 0:
            seconds = seconds_before + time.time() - started
            print(f"step {step + 1}/{num_steps} loss {loss.item():.3f} seconds {seconds:.0f}", flush=True)
        if (step + 1) % 200 == 0 or step + 1 == num_steps:
            seconds = seconds_before + time.time() - started
            save_checkpoint(
                checkpoint,
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                    "seconds": seconds,
                    "loss": loss.item(),
                    "asked": asked | chosen,
                },
            )
            print(json.dumps({"step": step + 1, "seconds": seconds, **evaluate(model, windows, held_out)}), flush=True)

    # From the checkpoint, so that a run resumed after its last step ends with the same record.
    last = torch.load(checkpoint, map_location=args.device, weights_only=True)
    save(model, args.out)
    tokenizer.save_pretrained(args.out)
    digest = hashlib.sha256((args.out / "model.safetensors").read_bytes()).hexdigest()
    record = {
        "command": "python scripts/pretrain_tiny.py "
        + " ".join([*(f"--{k} {v}" for k, v in chosen.items()), *(f"--{k} {v:g}" for k, v in asked.items())]),
        **chosen,
        "seed": args.seed,
        "tokens": num_steps * TOKENS_PER_STEP,
        **sizes,
        "final": {"seconds": last["seconds"], "loss": last["loss"], **evaluate(model, windows, held_out)},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {args.device}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "weights_sha256": digest,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    write_card(args.out)
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
