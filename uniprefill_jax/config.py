"""What a user may set: how prompts shrink, how tokens are sampled, what an engine may hold. Frozen, validated."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from uniprefill_jax.errors import ConfigError

BLOCK_SIZES = (16, 32, 64, 128, 256)
PAGE_SIZES = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class UniPrefillConfig:
    """How prompt tokens are dropped during prefill (notes: algorithm, steps 1-5).

    Attributes:
        top_p: share of the attention mass that the kept blocks carry, in (0, 1]; 1 is exactly dense.
        block_size: tokens scored and dropped together (G).
        sink_tokens: first tokens of a prompt that always stay (A), a multiple of `block_size` or 0.
        window_tokens: last tokens of a prompt that score it and always stay (n).
        drop_layers: full-attention layers after which tokens leave, or "auto" (by family and depth), or () for none.
        dropped_tokens: "discard" drops for good; "carry" lets dropped tokens skip ahead to the next drop layer, where
            all tokens are scored again (paper Eq. 8).
        sliding_window: "position" measures windows in original positions, "kept" in kept tokens (as the authors' code).
        cut: "crossing" keeps the block in which the mass passes top_p (paper Eq. 5), "below" drops it.
        score: "mean" of the window's attention over heads and rows, or its "peak".
        score_memory: weight in [0, 1) of the score that tokens carry from the previous drop layer.
        top_p_over: whether top_p counts "all" blocks or only "candidates" (those that are not forced to stay).
        most_blocks: block_size doubles with the prompt's length until there are no more blocks than this; 0 leaves it
            as it is (see `for_length`).
    """

    top_p: float = 0.99
    block_size: int = 64
    sink_tokens: int = 128
    window_tokens: int = 128
    drop_layers: Literal["auto"] | tuple[int, ...] = "auto"
    dropped_tokens: Literal["discard", "carry"] = "discard"
    sliding_window: Literal["position", "kept"] = "position"
    cut: Literal["crossing", "below"] = "crossing"
    score: Literal["mean", "peak"] = "mean"
    score_memory: float = 0.0
    top_p_over: Literal["all", "candidates"] = "all"
    most_blocks: int = 0

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_number(self, "top_p", self.top_p, "in (0, 1]", lambda value: 0.0 < value <= 1.0)
        _check_number(self, "score_memory", self.score_memory, "in [0, 1)", lambda value: 0.0 <= value < 1.0)
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"UniPrefillConfig: block_size is {self.block_size!r}; use one of {BLOCK_SIZES}")
        if not _is_integer(self.window_tokens) or not 1 <= self.window_tokens <= 1024:
            raise ConfigError(f"UniPrefillConfig: window_tokens is {self.window_tokens!r}; use 1 to 1024")
        if not _is_integer(self.sink_tokens) or self.sink_tokens < 0 or self.sink_tokens % self.block_size:
            raise ConfigError(
                f"UniPrefillConfig: sink_tokens is {self.sink_tokens!r}; use a multiple of block_size "
                f"({self.block_size}) or 0, so that blocks stay aligned over drops"
            )
        if not _is_integer(self.most_blocks) or self.most_blocks < 0:
            raise ConfigError(f"UniPrefillConfig: most_blocks is {self.most_blocks!r}; use 0 (no limit) or more")
        if self.drop_layers != "auto":
            object.__setattr__(self, "drop_layers", _layer_tuple(self.drop_layers))

    @classmethod
    def dense(cls) -> "UniPrefillConfig":
        """The setting that drops nothing."""
        return cls(top_p=1.0, drop_layers=())

    @property
    def is_dense(self) -> bool:
        """Whether this setting can drop no token at all."""
        return self.top_p >= 1.0 or self.drop_layers == ()

    def for_length(self, length: int) -> "UniPrefillConfig":
        """The setting of a prompt of `length` tokens, in which block_size is settled and most_blocks 0.

        The size is that of the prompt alone, at all of its drops and whatever shares its batch. It ends at the largest
        of `BLOCK_SIZES` that divides sink_tokens, with more blocks than most_blocks if need be.
        """
        if not self.most_blocks:
            return self
        size = self.block_size
        larger = [other for other in BLOCK_SIZES if other > size and self.sink_tokens % other == 0]
        for other in larger:
            if -(-length // size) <= self.most_blocks:
                break
            size = other
        return replace(self, block_size=size, most_blocks=0)

    @property
    def definition(self) -> dict[str, Any]:
        """All fields, in JSON's types; `config_of` reads them back."""
        values = asdict(self)
        return values | {"drop_layers": values["drop_layers"] if self.drop_layers == "auto" else list(self.drop_layers)}


def config_of(definition: dict[str, Any], source: str) -> UniPrefillConfig:
    """The setting with these fields (`UniPrefillConfig.definition`), found in `source`.

    Raises:
        ConfigError: a field that there is not, or a value that it cannot have.
    """
    known = {field.name for field in fields(UniPrefillConfig)}
    unknown = next((name for name in definition if name not in known), None)
    if unknown is not None:
        raise ConfigError(f"{source}: no field {unknown!r}; fields are {', '.join(sorted(known))}")
    layers = definition.get("drop_layers", "auto")
    values: dict[str, Any] = {**definition, "drop_layers": layers if layers == "auto" else tuple(layers)}
    return UniPrefillConfig(**values)


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn after the prefill.

    Attributes:
        max_tokens: most tokens to generate, at least 1; a request ends earlier, with reason "length", where the model's
            length is reached.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: only the k likeliest tokens are drawn from; 0 for all.
        top_p: only the likeliest tokens that together reach this probability are drawn from; 1 for all.
        seed: seed of the random draws; the same seed gives the same tokens.
        stop: strings that end the text (they are not part of it).
        ignore_eos: go on after an end-of-sequence token (for timing).
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"SamplingConfig: stop is {self.stop!r}; use non-empty strings")
        object.__setattr__(self, "stop", tuple(self.stop))
        if not _is_integer(self.max_tokens) or self.max_tokens < 1:
            raise ConfigError(f"SamplingConfig: max_tokens is {self.max_tokens!r}; use at least 1")
        if not _is_integer(self.top_k) or self.top_k < 0:
            raise ConfigError(f"SamplingConfig: top_k is {self.top_k!r}; use 0 (all) or more")
        if not _is_integer(self.seed) or not 0 <= self.seed < 2**32:
            raise ConfigError(f"SamplingConfig: seed is {self.seed!r}; use an integer in [0, 2**32)")
        _check_number(self, "top_p", self.top_p, "in (0, 1]", lambda value: 0.0 < value <= 1.0)
        _check_number(self, "temperature", self.temperature, "0 or more", lambda value: 0.0 <= value < float("inf"))


@dataclass(frozen=True)
class BatchShape:
    """A size to compile programs for, so that batches which fit into it share them, whatever their own lengths.

    Attributes:
        requests: most prompts of a batch.
        length: most tokens of a prompt.
        new_tokens: most tokens after a prompt.
    """

    requests: int
    length: int
    new_tokens: int = 16

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not _is_integer(value) or value < 1:
                raise ConfigError(f"BatchShape: {field.name} is {value!r}; use an integer of at least 1")


@dataclass(frozen=True)
class EngineConfig:
    """What the serving engine may hold at a time, and how it divides its work.

    Attributes:
        page_size: tokens per page of keys and values.
        pool_pages: pages in all. A page holds `page_size` tokens of one attention layer, so a prompt of n tokens that
            drops none takes ceil(n / page_size) pages in every attention layer, one that drops takes fewer.
        max_running: most requests admitted at a time: rows of every decode step.
        prefill_chunk: most prompt tokens that one step prefills through one segment of layers.
        max_length: most tokens of a request, prompt and generated ones; the model's own limit where that is lower.
        prefix_reuse: keep what was computed of a prompt up to its first drop (of a prompt without drops: all of it) for
            prompts that begin with the same tokens. It lies in pages that nobody needs otherwise: requests have
            precedence, and the least recently used goes first. Beside keys and values a prompt with drops keeps the
            hidden states at its first drop layer: ceil(hidden size / (2 * KV heads * head size)) more layers' worth of
            pages, in Llama-3.1-8B 2 beside 8.
        state_checkpoints: of a model with recurrent layers, states kept for prefix reuse: such a prefix can only be
            gone on with where one was kept. Each takes as much memory as the states of one more running request.
    """

    page_size: int = 64
    pool_pages: int = 16384
    max_running: int = 16
    prefill_chunk: int = 2048
    max_length: int = 32768
    prefix_reuse: bool = True
    state_checkpoints: int = 16

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise ConfigError(f"EngineConfig: page_size is {self.page_size!r}; use one of {PAGE_SIZES}")
        for name in ("pool_pages", "max_running", "prefill_chunk", "max_length"):
            value = getattr(self, name)
            if not _is_integer(value) or value < 1:
                raise ConfigError(f"EngineConfig: {name} is {value!r}; use an integer of at least 1")
        if not _is_integer(self.state_checkpoints) or self.state_checkpoints < 0:
            raise ConfigError(f"EngineConfig: state_checkpoints is {self.state_checkpoints!r}; use 0 or more")
        if not isinstance(self.prefix_reuse, bool):
            raise ConfigError(f"EngineConfig: prefix_reuse is {self.prefix_reuse!r}; use True or False")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_number(config: object, name: str, value: object, wanted: str, accept) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not accept(value):
        raise ConfigError(f"{type(config).__name__}: {name} is {value!r}; use a number {wanted}")


def _check_choices(config: UniPrefillConfig) -> None:
    hints = get_type_hints(type(config))
    for field in fields(config):
        if get_origin(hints[field.name]) is Literal:
            choices = get_args(hints[field.name])
            value = getattr(config, field.name)
            if value not in choices:
                raise ConfigError(f"UniPrefillConfig: {field.name} is {value!r}; use one of {', '.join(choices)}")


def _layer_tuple(layers: object) -> tuple[int, ...]:
    if not isinstance(layers, tuple | list) or not all(_is_integer(layer) and layer >= 0 for layer in layers):
        raise ConfigError(
            f'UniPrefillConfig: drop_layers is {layers!r}; use "auto" or a tuple of layer numbers such as (7, 11)'
        )
    if list(layers) != sorted(set(layers)):
        raise ConfigError(f"UniPrefillConfig: drop_layers is {layers!r}; list each layer once, in rising order")
    return tuple(layers)
