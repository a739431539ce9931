"""Methods by name, and as users write them: `NAME[:FIELD=VALUE ...]`, parts of a method joined by `+`."""

from dataclasses import fields, replace
from typing import Any, get_type_hints

from uniprefill_jax.config import UniPrefillConfig, config_of
from uniprefill_jax.errors import InputError
from uniprefill_jax.sparsify.methods.flexprefill import FlexPrefill
from uniprefill_jax.sparsify.methods.lazyllm import LazyLLM
from uniprefill_jax.sparsify.methods.minference import MInference
from uniprefill_jax.sparsify.methods.protocol import DENSE, CacheCompression, Method, SparseAttention
from uniprefill_jax.sparsify.methods.proxyattn import ProxyAttn
from uniprefill_jax.sparsify.methods.sliminfer import SlimInfer
from uniprefill_jax.sparsify.methods.snapkv import SnapKV
from uniprefill_jax.sparsify.methods.streaming_llm import StreamingLLM
from uniprefill_jax.sparsify.methods.token_choice import TokenChoice
from uniprefill_jax.sparsify.methods.xattention import XAttention

Part = UniPrefillConfig | TokenChoice | SparseAttention | CacheCompression
PARTS: dict[str, type[Part]] = {
    "uniprefill": UniPrefillConfig,
    **{
        part.name: part
        for part in (MInference, FlexPrefill, XAttention, ProxyAttn, LazyLLM, SlimInfer, StreamingLLM, SnapKV)
    },
}
NAMES = (DENSE, *PARTS)


def parse_method(text: str) -> Method:
    """See `Method.parse`."""
    method = Method(text.strip())
    for part in method.name.split("+"):
        name, *assignments = (piece.strip() for piece in part.split(":"))
        if name == DENSE and not assignments:
            continue
        if name not in PARTS:
            raise InputError(
                f"--method names {name!r}; use some of {', '.join(NAMES)}, joined by + where they go together"
            )
        roles = _roles(PARTS[name](**_values(name, assignments)))
        role = next(iter(roles))
        if getattr(method, role) != getattr(Method(), role):
            raise InputError(f"--method {text!r}: {name} and a part before it do the same ({role}); leave one out")
        method = replace(method, **roles)
    return method


def setting_of(definition: dict[str, Any], source: str) -> UniPrefillConfig | Method:
    """The configuration or method with this `definition`, found in `source`.

    Raises:
        ConfigError, InputError: a field or a part that there is not.
    """
    if "method" not in definition:
        return config_of(definition, source)
    name = definition["method"]
    method = parse_method(name)
    if method.definition != definition:
        raise InputError(f"{source}: {name!r} is {definition}, and now means {method.definition}; begin anew")
    return method


def _roles(part: Part) -> dict[str, Any]:
    """The fields of a method that a part fills; what it is for comes first."""
    if isinstance(part, SparseAttention):
        return {"attention": part}
    if isinstance(part, CacheCompression):
        return {"compression": part}
    if isinstance(part, TokenChoice):
        return {"dropping": part.dropping, "tokens": part}
    return {"dropping": part}


def _values(name: str, assignments: list[str]) -> dict[str, Any]:
    part = PARTS[name]
    kinds = get_type_hints(part)
    known = [field.name for field in fields(part)]
    values: dict[str, Any] = {}
    for assignment in assignments:
        field, equals, value = (piece.strip() for piece in assignment.partition("="))
        if not equals or field not in known:
            raise InputError(f"--method {name}: {assignment!r} sets no field; fields are {', '.join(known)}")
        values[field] = _value(name, field, value, kinds[field])
    return values


def _value(name: str, field: str, value: str, kind: Any) -> Any:
    if field == "drop_layers":
        return value if value == "auto" else _number(name, field, value, lambda text: tuple(map(int, text.split("_"))))
    return _number(name, field, value, kind) if kind in (int, float) else value


def _number(name: str, field: str, value: str, read: Any) -> Any:
    try:
        return read(value)
    except ValueError:
        example = " (layers joined by _, such as 7_11)" if field == "drop_layers" else ""
        raise InputError(f"--method {name}: {field} is {value!r}; use a number{example}") from None
