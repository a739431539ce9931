"""Which layers drop tokens: checked when given, derived from layer types and depth when "auto"."""

from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import ConfigError
from uniprefill_jax.models.config import ModelConfig


def resolve_drop_layers(config: UniPrefillConfig, model: ModelConfig) -> tuple[int, ...]:
    """The drop layers of a model under a setting; empty for a dense setting.

    Raises ConfigError for a layer that is not full attention or is the last layer, naming those that are possible.
    """
    if config.is_dense:
        return ()
    if config.drop_layers == "auto":
        return auto_drop_layers(model)
    possible = tuple(layer for layer in model.full_attention_layers if layer < model.num_layers - 1)
    for layer in config.drop_layers:
        if layer not in possible:
            raise ConfigError(
                f"drop_layers: layer {layer} cannot drop tokens in this {model.num_layers}-layer {model.family} model; "
                f"possible layers are {', '.join(map(str, possible)) or 'none'}"
            )
    return config.drop_layers


def auto_drop_layers(model: ModelConfig) -> tuple[int, ...]:
    """Published drop layers where the paper has them, the same spacing at other depths (notes: algorithm, Defaults).

    Llama (32 layers): every fourth layer from 7 to 27. Gemma-3-12B (48): the full-attention layers of the middle third
    of depth, 29, 35, 41. Qwen3-Next (48): every full-attention layer but the first and the last, 7 to 43.
    """
    full = model.full_attention_layers[:-1]
    if model.family == "llama":
        chosen = tuple(layer for layer in full if layer >= 7 and layer % 4 == 3)
        return chosen or full[len(full) // 2 : len(full) // 2 + 1]
    if model.family == "gemma3":
        # In a deep model the first half is left whole; a shallow one has too few full layers to wait that long.
        start = model.num_layers // 2 if len(full) >= 4 else 0
        chosen = tuple(layer for layer in full if layer >= start + (5 if start else 0))
        return chosen or full[-1:]
    return full[1:] or full


def segments_of_layers(model: ModelConfig, config: UniPrefillConfig, drop_layers: tuple[int, ...]) -> tuple[int, ...]:
    """Which segment's rows enter each layer: 0 before and at the first drop layer, then one more per drop.

    In `carry` mode every drop layer sees all rows, segment 0, again.
    """
    segments = []
    for layer in range(model.num_layers):
        carried = config.dropped_tokens == "carry" and layer in drop_layers
        segments.append(0 if carried else sum(drop < layer for drop in drop_layers))
    return tuple(segments)
