"""The recipe of a brief fine-tune as frozen values: what is trained, on what, how, and what is measured around it."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from recipes.schema import Benchmarks, PasskeyTask, PerplexityTask, Track

_STRICT = ConfigDict(extra="forbid")
Count = Annotated[int, Field(ge=1, lt=2**40)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where training documents come from.

    Attributes:
        name: as `data` of a comparison, or "python-train", the sources that the bundled model was trained on.
        share: of the tokens, against the shares of the other sources.
        recall: hide numbers in each text and ask for them at its end, so that the longest distances are trained.
        long_tokens, long_share: documents of at least so many tokens make up this share of the source's tokens
            (length up-sampling: the mix of sources stays as it is).
        max_documents: the most that are read; a stream of the Hub needs it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    share: Positive = 1.0
    recall: bool = False
    long_tokens: Count | None = None
    long_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    max_documents: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pose:
    """Long positions from short rows (PoSE, arXiv 2309.10400): chunks of a short window, positions skipped between.

    Attributes:
        window: tokens of a row.
        chunks: that a row is cut into; each begins at a drawn position behind the one before.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    window: Annotated[int, Field(ge=2)]
    chunks: Annotated[int, Field(ge=2)] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """Which documents, and how they become rows.

    Attributes:
        row_tokens: of one training row; by default the context, or PoSE's window.
        bookends: what begins with BOS (if the tokenizer adds one): a "document", or every "piece" that a long one is
            cut into.
        eos: end what bookends says with EOS.
        min_tokens: shorter pieces are left out.
        pose: train in short rows with skipped positions; None trains in whole ones.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    sources: Annotated[tuple[Source, ...], Field(min_length=1)] = (Source(name="python-train"),)
    row_tokens: Annotated[int, Field(ge=2)] | None = None
    bookends: Literal["document", "piece"] = "document"
    eos: bool = False
    min_tokens: Annotated[int, Field(ge=2)] = 32
    pose: Pose | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Low-rank adaptation (LoRA, arXiv 2106.09685) through peft.

    Attributes:
        rank, alpha, dropout: of the added matrices; their product is scaled by alpha / rank.
        targets: the linear layers that get them.
        also_train: modules that are trained whole. Without norms and embeddings LoRA does not learn a longer context
            (LongLoRA, arXiv 2309.12307, table 2).
        merge: write the model with the adapter merged in as well, which stock code serves.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    rank: Count = 8
    alpha: Positive = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("q_proj", "k_proj", "v_proj", "o_proj")
    also_train: tuple[str, ...] = ("embed_tokens", "norm", "input_layernorm", "post_attention_layernorm")
    merge: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointing:
    """Recompute activations in the backward pass instead of keeping them.

    Attributes:
        keep: "nothing" of a layer but its input, at a third more work; or the results of matrix products and attention
            ("products"), which keeps more and makes no product twice.
        every_n_layers: 1 recomputes all layers, 2 every second one.
        offload: keep what is left on the CPU.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    keep: Literal["nothing", "products"] = "nothing"
    every_n_layers: Count = 1
    offload: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """What processes share besides rows; the rest of the processes is data parallel.

    Attributes:
        fsdp: processes that weights, gradients and optimizer are sharded over (FSDP2).
        cpu_offload: keep the shards in the CPU's memory.
        context: GPUs that one row is cut over, by ring attention (accelerate's context parallel).
        ulysses: GPUs that the heads of one row are cut over (DeepSpeed Ulysses).
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    fsdp: Count = 1
    cpu_offload: bool = False
    context: Count = 1
    ulysses: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """How to train. The optimizer is AdamW.

    Attributes:
        steps: optimizer steps; 0 only stretches and measures.
        rows_per_step: rows in one optimizer step over all processes, whatever their number.
        rows_per_device: rows in one forward; what is left of a step is accumulated.
        lr: the peak learning rate.
        schedule: what follows the linear warm-up of `warmup_steps`, whose first step has rate 0 (as transformers has
            it): "cosine" ends at `min_lr_fraction` of the peak.
        clip: the largest gradient norm; 0 clips nothing.
        precision: "fp32"; "bf16" computes in bf16 on fp32 weights; "pure-bf16" keeps the weights in bf16 too, which
            loses every change of less than a 256th of a weight: at 2e-5 most of them. "auto" is bf16 on a GPU and fp32
            on a CPU.
        loss_rows: rows of logits that the loss holds at a time.
        liger: use Liger's norms and feed-forward kernels; needs the package and a GPU.
        save_every: steps between checkpoints; 0 writes one at the end alone.
        keep: how many checkpoints stay.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    steps: Annotated[int, Field(ge=0)] = 100
    rows_per_step: Count = 4
    rows_per_device: Count = 1
    lr: Positive = 2e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    clip: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    precision: Literal["auto", "fp32", "bf16", "pure-bf16"] = "auto"
    adapter: Adapter | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    parallel: Parallel = field(default_factory=Parallel)
    loss_rows: Count = 512
    liger: bool = False
    save_every: Annotated[int, Field(ge=0)] = 0
    keep: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is measured before and after, on the same tokens.

    Attributes:
        data, lengths, perplexity, passkey, benchmarks, memory_budget: as in a comparison.
        at: steps between first and last after which the same is measured.
        seed: of passkeys and bootstrap; not the recipe's, so that runs with other seeds are measured on the same.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    data: str = "python"
    lengths: tuple[Annotated[int, Field(ge=2)], ...] = ()
    perplexity: PerplexityTask = field(default_factory=PerplexityTask)
    passkey: PasskeyTask = field(default_factory=PasskeyTask)
    benchmarks: Benchmarks = field(default_factory=Benchmarks)
    at: tuple[Count, ...] = ()
    memory_budget: Count = 2 * 2**30
    seed: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneRecipe:
    """A model, a method, a window, and a brief training that makes the model at home in it.

    Attributes:
        model: tiny, smollm2, a directory, or a Hub id.
        method: as NAME:key=value; YAML may also say {NAME: {key: value}}.
        context: the window to reach, tokens.
        base, original_context: for a checkpoint that already carries scaling, see `rope_ext.extend`.
        allow_approximate: write the nearest stock form of a method that stock code does not follow exactly.
        format: of the model that is written: for stock code, or for `rope_ext.load` alone, which opens every method.
        seed: of the order of the data, of PoSE's positions and of an adapter's first weights.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    model: str = "tiny"
    method: str = "yarn"
    context: Count
    base: Literal["original", "checkpoint"] | None = None
    original_context: Count | None = None
    data: TrainingData = field(default_factory=TrainingData)
    train: Train = field(default_factory=Train)
    eval: Evaluation = field(default_factory=Evaluation)
    track: Track = field(default_factory=Track)
    allow_approximate: bool = False
    format: Literal["stock", "rope-ext"] = "stock"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
