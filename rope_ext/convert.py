"""Turn a checkpoint as Meta publishes it into a Hugging Face one with the same logits."""

import importlib
import itertools
import math
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from tokenizers import normalizers, processors
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, LlamaTokenizer, PreTrainedTokenizerFast

from rope_ext.errors import ExportError, ModelError
from rope_ext.export import check_target, write_config, written_aside
from rope_ext.layout import Layout, LayoutGuess, guess_layout, to_halves
from rope_ext.meta import MetaRope, meta_rope
from rope_ext.shards import EMBEDDING, OUTPUT, MetaCheckpoint, read_meta
from rope_ext.stock import frequencies_agree, stock_frequencies

TOKENIZER = "tokenizer.model"
# The first and last token by vocabulary, which no file states: LLaMA 1 and 2, Code Llama, LLaMA 3.
ENDS = {32000: (1, 2), 32016: (1, 2), 128256: (128000, 128001)}
NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# What SentencePiece does to leading and doubled spaces, digits, bytes and its own control tokens
PROBES = (
    "Hello world",
    " a  b\n\n\tc ",
    "x = 1234.5",
    "na\u00efve \u6f22\u5b57 \U0001f642",
    "",
    "def f(x):\n    return x",
)


class Conversion(NamedTuple):
    """What a conversion wrote, and what it took for granted.

    `layout` is the one the rows were taken to be in, `guess` what the weights say of it; `tokenizer` says in words
    what became of tokenizer.model.
    """

    path: Path
    window: int
    layout: Layout
    guess: LayoutGuess
    dtype: torch.dtype
    num_shards: int
    tied: bool
    tokenizer: str

    def as_dict(self) -> dict[str, object]:
        """Return the same for JSON."""
        return {
            "out": str(self.path),
            "window": self.window,
            "layout": self.layout,
            "layout_guess": self.guess._asdict(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "num_shards": self.num_shards,
            "tied": self.tied,
            "tokenizer": self.tokenizer,
        }

    def layout_in_words(self) -> str:
        """Return which layout was taken, and on what evidence."""
        if self.guess.layout is None:
            return f"cannot be told from the weights ({self.guess}); taken as {self.layout}"
        said = "" if self.guess.layout == self.layout else f", though the weights look like {self.guess.layout}"
        return f"{self.layout}{said} ({self.guess})"


def convert_meta(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    window: int | None = None,
    rope_factor: float | None = None,
    layout: Layout | None = None,
) -> Conversion:
    """Write Meta's checkpoint in `source` to a new directory as a Hugging Face one, and return what was done.

    Query and key rows go from neighbouring pairs to halves; every other weight is copied, bit for bit. The output is
    tied to the embedding where the two are equal. config.json states the frequencies in both dialects, and stock code
    must read the ones that Meta's parameters ask for before the checkpoint is kept.

    Args:
        window: tokens, where the parameters leave it open (`meta_rope` says where).
        rope_factor: of LLaMA 3.1's rescaling, where the parameters leave it open.
        layout: how the query and key rows are stored, over what the weights say; "halves" leaves them in place.

    Raises:
        ModelError: not a checkpoint of Meta's, a setting that is missing or has no effect, or rows that look as if
            they were in halves already.
        ExportError: the directory is not empty or cannot be written, or stock code would read other frequencies.
    """
    if layout not in {None, "neighbours", "halves"}:
        raise ModelError(f"layout: {layout!r} is neither neighbours nor halves; give one of the two, or leave it out")
    target = check_target(directory)
    checkpoint = read_meta(source)
    rope = meta_rope(checkpoint.params, window=window, factor=rope_factor)
    guess = _guess(checkpoint)
    if not math.isfinite(guess.neighbours + guess.halves):
        raise ModelError(f"meta: query or key weights of {source} are not finite; get the files again")
    if guess.layout == "halves" and layout is None:
        raise ModelError(
            f"layout: the query and key rows of {source} look like halves already ({guess}); moving them again would "
            "ruin the model: --layout halves keeps them in place, --layout neighbours moves them all the same"
        )
    taken: Layout = layout or "neighbours"
    weights = _renamed(checkpoint, move=taken == "neighbours")
    tied = torch.equal(checkpoint.weights[EMBEDDING], checkpoint.weights[OUTPUT])
    config = _config(checkpoint, rope, tied=tied)
    with written_aside(target) as partial:
        _save(config, weights, partial)
        write_config(partial / "config.json", rope.parameters, rope.window)
        _check_stock_turns_alike(partial, rope)
        tokenizer = _convert_tokenizer(Path(source) / TOKENIZER, partial, checkpoint.shape.vocab_size, rope.window)
    dtype = checkpoint.weights[EMBEDDING].dtype
    return Conversion(target, rope.window, taken, guess, dtype, checkpoint.num_shards, tied, tokenizer)


def _guess(checkpoint: MetaCheckpoint) -> LayoutGuess:
    names = [f"layers.{i}.attention" for i in range(checkpoint.shape.num_layers)]
    layers = ((checkpoint.weights[f"{name}.wq.weight"], checkpoint.weights[f"{name}.wk.weight"]) for name in names)
    return guess_layout(layers, checkpoint.shape.head_dim)


def _renamed(checkpoint: MetaCheckpoint, *, move: bool) -> dict[str, Tensor]:
    """Return the weights by Hugging Face's names, with query and key rows moved from neighbours to halves if asked."""
    ends = {EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight", OUTPUT: "lm_head.weight"}
    weights: dict[str, Tensor] = {}
    for name, tensor in checkpoint.weights.items():
        if name in ends:
            weights[ends[name]] = tensor
            continue
        _, layer, part = name.removesuffix(".weight").split(".", 2)
        turns = part in {"attention.wq", "attention.wk"}
        moved = to_halves(tensor, checkpoint.shape.head_dim) if turns and move else tensor
        weights[f"model.layers.{layer}.{NAMES[part]}.weight"] = moved
    return weights


def _config(checkpoint: MetaCheckpoint, rope: MetaRope, *, tied: bool) -> LlamaConfig:
    shape = checkpoint.shape
    first, last = ENDS.get(shape.vocab_size, (None, None))
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.ffn_width,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        max_position_embeddings=rope.window,
        rope_parameters=cast("Any", dict(rope.parameters)),
        tie_word_embeddings=tied,
        bos_token_id=first,
        eos_token_id=last,
        dtype=checkpoint.weights[EMBEDDING].dtype,
    )


def _save(config: LlamaConfig, weights: dict[str, Tensor], directory: Path) -> None:
    with torch.device("meta"):  # names and shapes only; the weights below take the places, uncopied
        model = LlamaForCausalLM(config)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.save_pretrained(directory)


def _check_stock_turns_alike(directory: Path, rope: MetaRope) -> None:
    config = AutoConfig.from_pretrained(directory)
    stock = stock_frequencies(config, rope.window)
    if not (frequencies_agree(stock.inv_freq, rope.inv_freq) and stock.attention_scale == 1.0):
        raise ExportError("export: stock transformers would read other frequencies than params.json asks for")


def _convert_tokenizer(file: Path, directory: Path, vocab_size: int, window: int) -> str:
    """Write Hugging Face's form of tokenizer.model if that can be done truly, and return in words what became of it."""
    instead = "copy a Hugging Face tokenizer beside the weights"
    if not file.is_file():
        return f"no {TOKENIZER} beside the weights; {instead}"
    with file.open("rb") as stream:
        start = stream.readline(200)
    if re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", start):
        return f"{TOKENIZER} was not converted: a file for tiktoken does not list its special tokens; {instead}"
    try:
        tokenizer = _from_sentencepiece(file, vocab_size)
    except ImportError:
        return f"{TOKENIZER} was not converted: that needs the packages sentencepiece and protobuf; {instead}"
    except Exception as error:  # noqa: BLE001  (whatever the readers of a foreign format raise: the weights are sound)
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"{TOKENIZER} was not converted: {reason[:200]}; {instead}"
    tokenizer.model_max_length = window
    tokenizer.save_pretrained(directory)
    return f"{TOKENIZER} was converted, and splits {len(PROBES)} probes as sentencepiece does"


def _from_sentencepiece(file: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that opens with BOS and splits as SentencePiece does.

    transformers' own reading leaves a leading space alone, where SentencePiece puts one more before it.

    Raises:
        ImportError: sentencepiece or protobuf is not installed.
        ValueError: the file does not fit the weights, or the two split a probe differently.
    """
    sentencepiece = importlib.import_module("sentencepiece")
    importlib.import_module("google.protobuf")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(file))
    if pieces.get_piece_size() > vocab_size:
        raise ValueError(f"it has {pieces.get_piece_size()} tokens, the weights {vocab_size}")
    with tempfile.TemporaryDirectory() as alone:  # so that no other file beside it has a say
        shutil.copy(file, alone)
        backend = LlamaTokenizer.from_pretrained(alone).backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    first, last, unknown = (pieces.id_to_piece(i) for i in (pieces.bos_id(), pieces.eos_id(), pieces.unk_id()))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, pieces.bos_id())]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=first, eos_token=last, unk_token=unknown, clean_up_tokenization_spaces=False
    )
    for probe in itertools.chain(PROBES, (" ".join(PROBES),)):
        if tokenizer.encode(probe, add_special_tokens=False) != pieces.encode(probe):
            raise ValueError(f"transformers would split {probe!r} otherwise than sentencepiece")
    return tokenizer
