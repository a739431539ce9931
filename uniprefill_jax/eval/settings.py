"""Settings to compare, as a user writes them: a name, or fields such as `top_p=0.9,score=peak`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_type_hints

from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import InputError
from uniprefill_jax.sparsify.methods.protocol import Method

DENSE = "dense"
NAMED = {
    DENSE: UniPrefillConfig.dense(),
    "default": UniPrefillConfig(),
    # The published rule and the released code's ways, whatever this library's defaults become.
    "authors": UniPrefillConfig(
        top_p=0.99,
        dropped_tokens="discard",
        sliding_window="kept",
        cut="crossing",
        score="mean",
        score_memory=0.0,
        top_p_over="all",
    ),
    "carry": UniPrefillConfig(dropped_tokens="carry"),
}


@dataclass(frozen=True)
class Setting:
    """A configuration or a method, under the name that results call it by."""

    name: str
    config: UniPrefillConfig | Method

    @property
    def method(self) -> str:
        """The names of its parts without their fields, as in "dense" or "uniprefill+snapkv"."""
        return "+".join(part.partition(":")[0] for part in Method.of(self.config).name.split("+"))


def parse_setting(text: str, extra: dict[str, UniPrefillConfig] | None = None) -> Setting:
    """One `--config`: a name (`NAMED`, or of `extra`), fields, or both, as in `carry,top_p=0.9`; drop layers as 7+11.

    Raises:
        InputError, ConfigError: an unknown name or field, or a value that it cannot have.
    """
    named = NAMED | (extra or {})
    name, *rest = text.split(",")
    base = named.get(name.strip())
    parts = rest if base is not None else [name, *rest]
    values: dict[str, Any] = {} if base is None else asdict(base)
    kinds = get_type_hints(UniPrefillConfig)
    known = [field.name for field in fields(UniPrefillConfig)]
    for part in parts:
        field, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or field not in known:
            raise InputError(
                f"--config {text!r}: {part!r} is neither one of {', '.join(named)} nor a field with its value such as "
                f"top_p=0.9; fields are {', '.join(known)}"
            )
        values[field] = _value(text, field, value, kinds[field])
    return Setting(text.strip(), UniPrefillConfig(**values))


def parse_settings(
    texts: list[str], extra: dict[str, UniPrefillConfig] | None = None, methods: Sequence[str] = ()
) -> list[Setting]:
    """Every `--config`, then every `--method`, dense first: the others are compared with it.

    Raises:
        InputError: two of one name; see `parse_setting` and `Method.parse` as well.
    """
    settings = [parse_setting(text, extra) for text in texts]
    settings += [Setting(method.name, method) for method in map(Method.parse, methods)]
    settings = [Setting(DENSE, NAMED[DENSE]), *(setting for setting in settings if setting.name != DENSE)]
    names = [setting.name for setting in settings]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{twice!r} is given twice as --config or --method; leave one out")
    return settings


def _value(text: str, field: str, value: str, kind: Any) -> Any:
    if field == "drop_layers":
        if value in ("auto", "none"):
            return value if value == "auto" else ()
        try:
            return tuple(int(layer) for layer in value.split("+"))
        except ValueError:
            raise InputError(f'--config {text!r}: drop_layers is {value!r}; use "auto", "none" or 7+11+15') from None
    if kind not in (int, float):
        return value  # a word, which the configuration checks
    try:
        return kind(value)
    except ValueError:
        raise InputError(f"--config {text!r}: {field} is {value!r}; use a number") from None
