"""The keys that an entry of models.yaml may have: one frozen class for each kind of model.

A key that overrides a setting has the setting's bounds and description.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.registry.fields import (
    AdapterOf,
    Name,
    ReasoningParser,
    Sizes,
    SourceOf,
    Template,
    ToolParser,
    read_aliases,
    read_batching,
    read_mode,
    read_source,
    read_thinking_budget,
)
from gateway.registry.names import did_you_mean, nearest
from gateway.registry.sources import Source
from gateway.settings import PrefixBytes, Settings


@dataclass(frozen=True, slots=True)
class Overrides:
    """Marks a key that overrides a setting of the gateway for one model."""

    setting: str


ADOPTABLE: Final = "adoptable"
"""Marks a key that loading does not depend on: a loaded model adopts a new value of it."""


def override(setting: str, *, adoptable: bool = False) -> Any:
    """Declare a key that overrides a setting, and has its bounds. It may be absent."""
    field: Any = Field(default=None)
    field.metadata = [*Settings.model_fields[setting].metadata, Overrides(setting)]
    field.metadata += [ADOPTABLE] if adoptable else []
    return field


class Section(BaseModel):
    """A mapping of models.yaml, in which unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: object) -> object:
        if isinstance(data, Mapping):  # null counts as an absent key
            return {key: value for key, value in data.items() if value is not None}
        return data

    @classmethod
    def adoptable_keys(cls) -> dict[str, Any]:
        """Return the keys that loading does not depend on, for pydantic's `exclude`."""
        keys: dict[str, Any] = {}
        for key, field in cls.model_fields.items():
            if ADOPTABLE in field.metadata:
                keys[key] = True
            elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                keys[key] = field.annotation.adoptable_keys()
        return keys

    def overrides(self) -> dict[str, Any]:
        overrides: dict[str, Any] = {}
        for key, field in type(self).model_fields.items():
            value = getattr(self, key)
            if isinstance(value, Section):
                overrides |= value.overrides()
            elif value is not None:
                names = (mark.setting for mark in field.metadata if isinstance(mark, Overrides))
                overrides |= dict.fromkeys(names, value)
        return overrides


class Alias(Section):
    """A further name for a model, with defaults for requests by that name."""

    name: Name
    """The name that clients send."""
    prompt_name: str | None = None
    """The prompt put before every text in requests by this name."""
    thinking: bool | None = None
    """Whether the model thinks before it answers requests by this name."""


class EmbeddingBatching(Section):
    """How waiting inputs share a forward pass."""

    max_batch_size: int | None = override("embedding_max_batch_size", adoptable=True)
    max_batch_tokens: int | None = override("embedding_max_batch_tokens", adoptable=True)
    batch_window_ms: float | None = override("embedding_batch_window_ms", adoptable=True)
    adaptive_window: bool | None = override("embedding_adaptive_window", adoptable=True)
    min_batch_size: int | None = override("embedding_min_batch_size", adoptable=True)
    batch_deadline_ms: float | None = override("embedding_batch_deadline_ms", adoptable=True)
    cache_size: int | None = override("embedding_cache_size", adoptable=True)


BatchingMode = Literal["auto", "force", "off"]
Modes = BatchingMode | bool


class ChatBatching(Section):
    """How answers share decoding steps."""

    max_batch_size: int | None = override("generation_max_batch_size", adoptable=True)
    prefill_chunk_tokens: int | None = override("prefill_chunk_tokens", adoptable=True)
    prefix_cache_bytes: PrefixBytes | None = override("prefix_cache_bytes")
    speculate_rows: int | None = override("speculate_rows")
    mode: Annotated[BatchingMode, BeforeValidator(read_mode, json_schema_input_type=Modes)] = "auto"
    """Whether answers are decoded together: `auto` if a self-test allows it; `force` always; `off`
    never.
    """


class Structured(Section):
    """How grammars constrain answers."""

    rows: int | None = override("structured_rows", adoptable=True)
    max_string_chars: int | None = Field(default=None, ge=1)
    """Longest string where a schema sets no bound."""
    max_array_items: int | None = Field(default=None, ge=1)
    """Longest array where a schema sets no bound."""
    schema_in_prompt: Annotated[bool, ADOPTABLE] = False
    """Constrain a json_object answer by a JSON Schema at the end of the last message."""


class Sampling(Section):
    """Defaults for fields that a request leaves out; if absent, those of generation_config.json."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    """0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample from this many of the likeliest tokens; 0 is all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Least probability of a token, as a share of the likeliest token's."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    """Above 1, tokens of the prompt and of the answer so far become less likely."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest answer, tokens."""


class ThinkingBudgets(Section):
    """Tokens of thinking, by the effort that a request asks for."""

    default: int | None = Field(default=None, ge=0)
    """Used if a request has no effort, or an effort that is not set here."""
    low: int | None = Field(default=None, ge=0)
    """With low effort."""
    medium: int | None = Field(default=None, ge=0)
    """With medium effort."""
    high: int | None = Field(default=None, ge=0)
    """With high effort."""
    xhigh: int | None = Field(default=None, ge=0)
    """With xhigh effort."""
    max: int | None = Field(default=None, ge=0)
    """With max effort."""


class _Spec(Section):
    """The keys of models of every kind."""

    input_modalities: ClassVar[tuple[str, ...]] = ("text",)
    takes_gguf: ClassVar[bool] = False
    alias_keys: ClassVar[Set[str]] = {"name"}

    id: Name
    """The model's id, which is the key of its entry in the file."""
    source: SourceOf
    """hub:org/name[@revision], path:folder or package:module/folder; for chat also a GGUF file:
    hub:org/name/x.gguf[@revision], path:x.gguf, package:module/x.gguf.
    """
    aliases: Annotated[
        tuple[Alias, ...],
        BeforeValidator(read_aliases, json_schema_input_type=str | list[str | Alias]),
        ADOPTABLE,
    ] = ()
    """Further names: text (commas separate several) or {name, …}."""
    preload: Annotated[bool, ADOPTABLE] = False
    """Load at start, before the gateway is ready."""
    pinned: Annotated[bool, ADOPTABLE] = False
    """Once loaded, stay loaded: never evicted, nor unloaded for being idle."""
    ttl_s: float | None = override("model_ttl_s", adoptable=True)
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type of the weights; auto is the checkpoint's type, or float32 on a CPU."""
    max_context: int | None = Field(default=None, ge=8)
    """Longest input in tokens, at most the model's own limit."""
    queue_limit: int | None = override("queue_limit", adoptable=True)
    queue_max_tokens: int | None = override("queue_max_tokens", adoptable=True)

    def loaded_with(self) -> dict[str, Any]:
        """Return the keys that a load depends on, without the places of files."""
        return self.model_dump(exclude={**self.adoptable_keys(), "source": True, "adapter": True})

    @property
    def weights_dtype(self) -> str | None:
        """Return the type that weights should have; None for the checkpoint's."""
        return None if self.dtype == "auto" else self.dtype

    @field_validator("source")
    @classmethod
    def _check_form(cls, source: Source) -> Source:
        if source.is_gguf and not cls.takes_gguf:
            raise ValueError("GGUF files are served as chat models only; this kind needs a folder")
        return source

    @field_validator("aliases")
    @classmethod
    def _check_alias_keys(cls, aliases: tuple[Alias, ...]) -> tuple[Alias, ...]:
        for alias in aliases:
            unknown = alias.model_fields_set - cls.alias_keys
            if unknown:
                raise ValueError(f"an alias of this kind of model has no {min(unknown)!r}")
        return aliases


def _misplaced(key: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("misplaced_key", "{message}", {"key": key, "message": message})


class EmbeddingSpec(_Spec):
    """A model that turns texts into vectors."""

    alias_keys = {"name", "prompt_name"}

    kind: Literal["embedding"]
    """This is an embedding model."""
    pooling: Literal["mean", "cls", "last", "splade"] | None = None
    """How a text's token vectors become one; needed only if the model's files don't say."""
    normalize: bool | None = None
    """Scale vectors to length 1; if absent, the model's files decide."""
    prompts: dict[str, str] = {}
    """Texts to put before inputs, by name; if absent, the model's own prompts."""
    default_prompt_name: Annotated[str | None, ADOPTABLE] = None
    """The prompt used when neither request nor alias names one."""
    overflow: Annotated[Literal["error", "truncate"], ADOPTABLE] = "error"
    """A text beyond the limit: `error` answers 400, `truncate` cuts it and reports that."""
    matryoshka: Annotated[Sizes, ADOPTABLE] = False
    """Whether vectors may be shortened: true for any size, or a list of the sizes allowed."""
    token_ids: Annotated[Literal["reject", "accept"], ADOPTABLE] = "reject"
    """Whether inputs may be token ids of this model's own tokenizer."""
    batching: EmbeddingBatching = Field(default_factory=EmbeddingBatching)
    """Overrides of the gateway's settings."""

    @model_validator(mode="after")
    def _prompts_exist(self) -> "EmbeddingSpec":
        names = [("aliases", alias.prompt_name) for alias in self.aliases]
        for key, name in (*names, ("default_prompt_name", self.default_prompt_name)):
            # The load checks the model's own prompts, which are used if the file has none.
            if self.prompts and name is not None and name not in self.prompts:
                message = f"no prompt is named {name!r}{did_you_mean(nearest(name, self.prompts))}"
                raise _misplaced(key, message)
        return self


def _rerank_template(value: str | None) -> str | None:
    if value is None:
        return None
    if [value.count(mark) for mark in ("{query}", "{document}")] != [1, 1]:
        raise ValueError("it should have {query} and {document} once each")
    if value.index("{document}") < max(value.find("{query}"), value.find("{instruction}")):
        raise ValueError("{document} should come last: the text before it is read once")
    return value


class RerankSpec(_Spec):
    """A model that scores documents by how well they answer a query: a cross-encoder or, with
    `scoring: labels`, a causal model that is asked for one of two words.
    """

    kind: Literal["rerank"]
    """This is a rerank model."""
    scoring: Literal["head", "labels"] = "head"
    """`head` scores by a classification head, `labels` by a causal model's label probabilities."""
    template: Annotated[Template, AfterValidator(_rerank_template)] = None
    """With labels: the prompt, or file:path to it, with {instruction}, {query} and {document}; if
    absent, Qwen3-Reranker's prompt.
    """
    labels: tuple[str, ...] = Field(default=("yes", "no"), min_length=1, max_length=2)
    """With labels: the words for relevant and not relevant, or only the first; each one token."""
    instruction: str | None = None
    """With labels: the instruction if a request has none; if absent, Qwen3-Reranker's."""
    max_tokens_per_doc: Annotated[int | None, ADOPTABLE] = Field(default=None, ge=1)
    """Longest document in tokens, where a request sets no limit; longer ones are cut."""
    batching: EmbeddingBatching = Field(default_factory=EmbeddingBatching)
    """Overrides of the gateway's settings."""

    @model_validator(mode="after")
    def _labels_alone(self) -> "RerankSpec":
        recipe = self.model_fields_set & {"template", "labels", "instruction"}
        if self.scoring == "head" and recipe:
            message = f"only a model with `scoring: labels` can have '{min(recipe)}'"
            raise _misplaced(min(recipe), message)
        return self


ADAPTER_KEYS: Final = frozenset(
    {
        *("id", "kind", "source", "base", "adapter", "aliases", "preload", "pinned", "ttl_s"),
        *("queue_limit", "sampling", "thinking", "thinking_budget"),
    }
)
"""The keys that an adapter's entry may have. All other keys are set in the entry of its base, and
hold for both.
"""


class ChatSpec(_Spec):
    """A model that answers conversations: a whole model, or an adapter that uses its base's
    weights. The `source` of an adapter is where its own files are.
    """

    takes_gguf = True
    alias_keys = {"name", "thinking"}

    kind: Literal["chat"]
    """This is a chat model."""
    sampling: Annotated[Sampling, ADOPTABLE] = Field(default_factory=Sampling)
    """Defaults for fields that a request leaves out."""
    chat_template: Template = None
    """A Jinja template, or file:path to one; if absent, the model's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the template on every request."""
    tool_parser: ToolParser | None = None
    """How the model marks tool calls; if absent, its files decide."""
    reasoning_parser: ReasoningParser | None = None
    """How the model marks its thinking; if absent, its files decide."""
    split_special_tokens: bool = False
    """Whether control tokens in texts from callers are read as plain letters."""
    thinking: Annotated[bool | None, ADOPTABLE] = None
    """Whether the model thinks before it answers; if absent, its template decides."""
    thinking_budget: Annotated[
        ThinkingBudgets,
        BeforeValidator(read_thinking_budget, json_schema_input_type=ThinkingBudgets | int),
        ADOPTABLE,
    ] = Field(default_factory=ThinkingBudgets)
    """The most tokens of thinking before it is ended; a number stands for `{default: …}`."""
    draft: Name | None = None
    """The id of a smaller chat model with the same tokenizer. It guesses tokens, which this model
    checks several at a time. Answers stay the same.
    """
    mtp_head: bool = True
    """Whether the head for multi-token prediction that some files have guesses tokens.
    If false, its weights are not loaded.
    """
    base: Name | None = None
    """The id of the chat model whose weights this adapter uses, in place of a `source`."""
    adapter: AdapterOf = None
    """With `base`: the LoRA adapter, a folder as mlx-lm writes it: hub:org/name[@revision],
    path:folder or package:module/folder.
    """
    fuse_projections: bool = False
    """Compute q, k and v as one product, and gate and up as another, which may be faster on a GPU:
    `mlx-gateway doctor --engine` shows the speed with and without.
    """
    kv_bits: Literal[8, 4] | None = None
    """Bits of each value in the KV cache; if absent, the cache is not quantized."""
    images: bool = True
    """Whether images are read, if the model can. If false, its vision weights are not loaded."""
    parallel: Literal["tensor", "pipeline"] | None = None
    """Under mlx.launch: how the model is divided among all Macs. `tensor` divides each layer, and
    `pipeline` gives each Mac some layers. A single Mac serves the whole model.
    """
    structured: Structured = Field(default_factory=Structured)
    """How grammars constrain answers."""
    batching: Annotated[
        ChatBatching,
        BeforeValidator(read_batching, json_schema_input_type=ChatBatching | Modes),
    ] = Field(default_factory=ChatBatching)
    """Overrides of the gateway's settings; a word such as `off` stands for `{mode: off}`."""
    _draft_spec: "ChatSpec | None" = PrivateAttr(default=None)
    _base_spec: "ChatSpec | None" = PrivateAttr(default=None)

    @property
    def base_spec(self) -> "ChatSpec | None":
        return self._base_spec

    @property
    def draft_spec(self) -> "ChatSpec | None":
        return self._draft_spec

    def drafts_with(self) -> tuple[object, ...]:
        """Return the values that matter to a model that uses this one as draft."""
        return (self.source, self.dtype, self.fuse_projections, self.kv_bits)

    def draft_in_use(self, speculate_rows: int) -> "ChatSpec | None":
        """Return the draft model; None if drafts are off.

        The setting `speculate_rows` counts unless this model has a value of its own.
        """
        return self._draft_spec if self._speculates(speculate_rows) else None

    def head_in_use(self, speculate_rows: int) -> bool:
        """Return True if the model's own MTP head may be loaded."""
        is_alone = self._draft_spec is None and self.parallel is None
        return self.mtp_head and is_alone and self._speculates(speculate_rows)

    def _speculates(self, speculate_rows: int) -> bool:
        rows = self.batching.speculate_rows
        return (speculate_rows if rows is None else rows) > 0

    def with_part(self, key: Literal["draft", "base"], part: "ChatSpec") -> "ChatSpec":
        spec = self.model_copy()
        if key == "draft":
            spec._draft_spec = part
        else:
            spec._base_spec = part
        return spec

    @model_validator(mode="before")
    @classmethod
    def _take_adapter_as_source(cls, data: object, info: ValidationInfo) -> object:
        if not isinstance(data, Mapping):
            return data
        keys = {key for key, value in data.items() if value is not None}
        if keys.isdisjoint({"base", "adapter"}):
            return data
        for key, other in (("base", "adapter"), ("adapter", "base")):
            if key not in keys:
                raise _misplaced(other, f"`{other}` needs `{key}` beside it")
        if "source" in keys and data["source"] != data["adapter"]:
            raise _misplaced("source", "an adapter uses its base's weights, and has no `source`")
        of_base = (keys & cls.model_fields.keys()) - ADAPTER_KEYS
        if of_base:
            raise _misplaced(min(of_base), f"`{min(of_base)}` can only be set for the base")
        try:
            adapter = read_source(data["adapter"], info)
        except ValueError as error:
            raise _misplaced("adapter", f"`adapter`: {error}") from None
        if adapter.is_gguf:
            raise _misplaced("adapter", "`adapter` must be a folder as mlx-lm writes it, not GGUF")
        return {**data, "adapter": adapter, "source": adapter}

    @model_validator(mode="after")
    def _divided_as_it_is(self) -> "ChatSpec":
        if self.parallel and self.fuse_projections:
            raise _misplaced("parallel", "a model with 'parallel' cannot have 'fuse_projections'")
        return self


class Inputs(NamedTuple):
    """The inputs that a model on disk takes, and how its family was verified."""

    max_tokens: int | None  # tokens; for a chat model, prompt and answer; None if unknown
    modalities: Sequence[str] = _Spec.input_modalities
    # The reference that answers of the model's family were compared with; None if unknown.
    verified: Literal["transformers", "mlx-lm", "no"] | None = None


ModelSpec = EmbeddingSpec | RerankSpec | ChatSpec
SPECS: Mapping[str, type[EmbeddingSpec] | type[RerankSpec] | type[ChatSpec]] = MappingProxyType(
    {"embedding": EmbeddingSpec, "rerank": RerankSpec, "chat": ChatSpec}
)
