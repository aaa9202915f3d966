"""Recipes as frozen values. A recipe says everything that a run depends on; the resolved one re-runs it."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

_STRICT = ConfigDict(extra="forbid")
Fraction = Annotated[float, Field(ge=0, le=1)]
VariantName = Literal[
    "classic", "text", "distractors", "multi-key", "multi-query", "uuid", "needle", "no-needle", "needle-only"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityTask:
    """What to measure on documents; see evals.perplexity for the protocols.

    Attributes:
        documents: of the corpus; 0 measures none.
        protocols: "prefix" alone costs one forward a document, and "last-k" and "by-position" come with it;
            "sliding", "yarn-legacy" and "gain" have forwards of their own.
        stride: by which sliding windows move, tokens; by default 256, and at most half of the shortest length.
        last: k of last-k and gain, tokens; by default 256, and at most half of the shortest length and of the original
            window.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    documents: Annotated[int, Field(ge=0)] = 8
    protocols: tuple[Literal["prefix", "last-k", "by-position", "sliding", "yarn-legacy", "gain"], ...] = ("prefix",)
    stride: Annotated[int, Field(ge=1)] | None = None
    last: Annotated[int, Field(ge=1)] | None = None

    @property
    def stride_tokens(self) -> int:
        """The stride, once a setting has put its default in."""
        assert self.stride is not None
        return self.stride

    @property
    def last_tokens(self) -> int:
        """The last tokens, once a setting has put their default in."""
        assert self.last is not None
        return self.last


@dataclass(frozen=True, slots=True, kw_only=True)
class PasskeyTask:
    """Retrieval of a hidden value; see evals.variants for the tasks.

    Attributes:
        variants: the first one is what the table and the effective length are of.
        grid: "relative" hides the needle at `depths`, fractions of each length, as published; "absolute" after
            `positions` tokens, wherever they fit, so that position and distance to the question vary apart.
        positions: by default eight evenly spaced ones up to the longest length.
        trials: at each depth or position and length; 0 measures none.
        threshold: the accuracy that the effective length asks for, at it and at every shorter length: 0.2 is Position
            Interpolation's, 0.856 RULER's.
        of_base: take the threshold as a share of what the baseline scores at the shortest length, as NoLiMa takes 0.85.
        generate: decode for real instead of scoring the known answer in one forward.
        share: compute what several prompts begin with once; it changes no score.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    variants: tuple[VariantName, ...] = ("classic",)
    grid: Literal["relative", "absolute"] = "relative"
    depths: tuple[Fraction, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    positions: tuple[Annotated[int, Field(ge=0)], ...] = ()
    trials: Annotated[int, Field(ge=0, le=10_000)] = 5
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.85
    of_base: bool = False
    generate: bool = False
    share: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmarks:
    """Tasks of lm-eval, each document a sample as all others are; see evals.harness.

    Attributes:
        tasks: names of tasks, groups or tags of lm-eval or of ours, or a preset: "native" (short-context sanity, from
            the Hub), "native-offline" (the same of what is here). None measures none.
        limit: the first documents of each task and length; None takes all.
        lengths: of tasks that make their own documents, tokens; by default those of the comparison.
        num_fewshot: examples before each prompt; by default the task's own.
        include_path: a folder with task YAMLs of one's own.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    tasks: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    limit: Annotated[int, Field(ge=1)] | None = None
    lengths: tuple[Annotated[int, Field(ge=2)], ...] = ()
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    include_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Where a run goes besides its own files.

    Attributes:
        report_to: each needs its package installed. "wandb" is ours, and never in the way of the run; the others take
            the curve of a training alone, through the Trainer's integrations.
        project: of wandb.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    project: Annotated[str, Field(min_length=1)] = "rope-ext"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRecipe:
    """Methods side by side on one model.

    Attributes:
        model: tiny, smollm2, a directory, or a Hub id.
        methods: each as NAME:key=value; YAML may also say {NAME: {key: value}}.
        context: the window every method is asked for, tokens; None is four times the original.
        lengths: at which to measure, tokens; empty is the original window and its doublings up to the context.
        base, original_context: for a checkpoint that already carries scaling, see `rope_ext.extend`.
        data: "python" (the standard library's sources that the bundled model never saw), "python-all" (all of them,
            for models trained elsewhere), a text, JSONL or Parquet file, a folder of them, "pg19", "proof-pile", or a
            Hub data set as hub:OWNER/NAME@REVISION:split=test (`evals.hub`).
        baseline: the method that the others are paired with; by default unscaled, or the first if that is not there.
        memory_budget: bytes for activations and logits of one forward, besides weights and cache.
        seed: of passkeys and bootstrap.
        track: where the run goes besides its own files; here wandb alone.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    model: str = "tiny"
    methods: tuple[str, ...] = ("unscaled", "linear", "abf", "ntk", "yarn", "llama3")
    context: Annotated[int, Field(ge=1)] | None = None
    lengths: tuple[Annotated[int, Field(ge=2)], ...] = ()
    base: Literal["original", "checkpoint"] | None = None
    original_context: Annotated[int, Field(ge=1)] | None = None
    data: str = "python"
    perplexity: PerplexityTask = field(default_factory=PerplexityTask)
    passkey: PasskeyTask = field(default_factory=PasskeyTask)
    benchmarks: Benchmarks = field(default_factory=Benchmarks)
    baseline: str | None = None
    memory_budget: Annotated[int, Field(ge=1)] = 2 * 2**30
    seed: Annotated[int, Field(ge=0)] = 0
    track: Track = field(default_factory=Track)
