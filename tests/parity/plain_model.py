"""An independent model: the three families and the whole of UniPrefill in float64 numpy, slow and plain.

One request, no cache, no batching, no bucketing. The hidden states of all tokens sit in one array; `active` lists the
tokens that take part in a layer, with their original positions. Generated tokens may follow the prompt (teacher
forcing): they are never scored or dropped, so one forward pass gives what decoding after a shortened prefill must give.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.sparsify.rule import Choice, Rule, block_scores, choose


@dataclass
class Trace:
    """What a forward pass gives.

    logits [1 + generated, vocab]: those of the last prompt token and of every generated token. Per drop layer: the
    rule's choice, the original positions that it keeps, and each block's attention mass. kv_lengths: per layer, the
    number of prompt tokens that its attention saw; 0 for recurrent layers.
    """

    logits: np.ndarray
    kv_lengths: list[int] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)
    kept: dict[int, np.ndarray] = field(default_factory=dict)
    mass: dict[int, np.ndarray] = field(default_factory=dict)


class PlainModel:
    """Weights and config.json of a Hugging Face folder."""

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())
        arrays = {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}
        self.weights = {name: array.astype(np.float64) for name, array in arrays.items()}
        self.family = {"llama": "llama", "gemma3_text": "gemma", "qwen3_next": "qwen"}[self.config["model_type"]]
        self.layer_types = self.config.get("layer_types") or ["full_attention"] * self.config["num_hidden_layers"]

    def forward(
        self, tokens: np.ndarray, prompt_length: int, rule: Rule, kept: dict[int, np.ndarray] | None = None
    ) -> Trace:
        """Run the prompt, `tokens[:prompt_length]`, and what was generated after it.

        kept: original positions to keep at each drop layer instead of the rule's own choice (which is still computed).
        """
        hidden = self.weights["model.embed_tokens.weight"][tokens]
        if self.family == "gemma":
            hidden = hidden * float(np.float32(math.sqrt(self.config["hidden_size"])))
        active = np.arange(len(tokens))
        trace = Trace(np.empty(0))
        memory = None
        for layer, kind in enumerate(self.layer_types):
            drops = layer in rule.drop_layers
            if drops and rule.dropped_tokens == "carry":
                active = np.arange(len(tokens))
            prefix = f"model.layers.{layer}."
            trace.kv_lengths.append(int((active < prompt_length).sum()) if kind != "linear_attention" else 0)
            rows = hidden[active]
            normed = self._norm(prefix + "input_layernorm", rows)
            if kind == "linear_attention":
                mixed = self._gated_delta_net(prefix + "linear_attn.", normed)
            else:
                mixed, queries, keys, scale = self._attention(prefix + "self_attn.", kind, normed, active, rule)
            if self.family == "gemma":
                mixed = self._norm(prefix + "post_attention_layernorm", mixed)
            rows = rows + mixed
            hidden[active] = rows
            if drops:
                assert kind == "full_attention"
                own = active[active < prompt_length]
                scored = queries[: len(own)][-rule.window_tokens :]
                mass, peak = block_scores(scored, keys[: len(own)], scale, rule.block_size)
                combined = mass if rule.score == "mean" else peak
                starts = np.arange(0, len(own), rule.block_size)
                if memory is not None and rule.score_memory:
                    carried = np.array([memory[own[start : start + rule.block_size]].mean() for start in starts])
                    combined = (1 - rule.score_memory) * combined + rule.score_memory * carried
                memory = np.zeros(len(tokens)) if memory is None else memory
                memory[own] = np.repeat(combined, rule.block_size)[: len(own)]
                choice = choose(combined, len(own), rule)
                stay = own[choice.kept] if kept is None else kept[layer]
                trace.choices[layer], trace.kept[layer], trace.mass[layer] = choice, own[choice.kept], mass
                active = np.concatenate([stay, np.arange(prompt_length, len(tokens))])
                rows = hidden[active]
            before = "pre_feedforward_layernorm" if self.family == "gemma" else "post_attention_layernorm"
            fed = self._feed_forward(layer, prefix + "mlp.", self._norm(prefix + before, rows))
            if self.family == "gemma":
                fed = self._norm(prefix + "post_feedforward_layernorm", fed)
            hidden[active] = rows + fed
        last = self._norm("model.norm", hidden[prompt_length - 1 :])
        head = "model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        trace.logits = last @ self.weights[head].T
        return trace

    def _linear(self, name: str, rows: np.ndarray) -> np.ndarray:
        result = rows @ self.weights[name + ".weight"].T
        bias = self.weights.get(name + ".bias")
        return result if bias is None else result + bias

    def _norm(self, name: str, rows: np.ndarray) -> np.ndarray:
        offset = 0.0 if self.family == "llama" else 1.0
        scaled = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return scaled * (offset + self.weights[name + ".weight"])

    def _attention(self, prefix: str, kind: str, rows: np.ndarray, positions: np.ndarray, rule: Rule):
        """(output, rotated queries, rotated keys, scale) of tokens at rising original positions."""
        count, size = len(rows), self.config["head_dim"]
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        queries = self._linear(prefix + "q_proj", rows)
        gate = None
        if self.family == "qwen":
            both = queries.reshape(count, heads, 2 * size)
            queries, gate = both[..., :size], both[..., size:]
        queries = queries.reshape(count, heads, size)
        keys = self._linear(prefix + "k_proj", rows).reshape(count, kv_heads, size)
        values = self._linear(prefix + "v_proj", rows).reshape(count, kv_heads, size)
        if self.family != "llama":
            queries, keys = self._norm(prefix + "q_norm", queries), self._norm(prefix + "k_norm", keys)
        queries, keys = self._rotate(queries, positions, kind), self._rotate(keys, positions, kind)
        scale = (self.config["query_pre_attn_scalar"] if self.family == "gemma" else size) ** -0.5

        index = np.arange(count)
        allowed = index[None] <= index[:, None]
        if kind == "sliding_attention":
            place = positions if rule.sliding_window == "position" else index
            allowed &= place[None] > place[:, None] - self.config["sliding_window"]
        output = np.empty_like(queries)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            logits = np.where(allowed, scale * queries[:, head] @ keys[:, kv_head].T, -np.inf)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            output[:, head] = weights / weights.sum(axis=1, keepdims=True) @ values[:, kv_head]
        if gate is not None:
            output = output * _sigmoid(gate)
        return self._linear(prefix + "o_proj", output.reshape(count, -1)), queries, keys, scale

    def _rotate(self, heads: np.ndarray, positions: np.ndarray, kind: str) -> np.ndarray:
        """Rotary embedding; angles are rounded to float32 as every implementation does."""
        settings = self.config["rope_parameters"]
        settings = settings.get(kind, settings)
        turned = int(heads.shape[-1] * settings.get("partial_rotary_factor", 1.0))
        exponent = np.arange(0, turned, 2, dtype=np.float32) / np.float32(turned)
        power = np.power(settings["rope_theta"], exponent.astype(np.float64)).astype(np.float32)
        frequency = np.float32(1) / power
        if settings["rope_type"] == "linear":
            frequency = frequency / np.float32(settings["factor"])
        elif settings["rope_type"] == "llama3":
            frequency = np.array([_llama3_frequency(value, settings) for value in frequency], np.float32)
        angle = (positions[:, None].astype(np.float32) * frequency).astype(np.float64)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        first, second = heads[..., : turned // 2], heads[..., turned // 2 : turned]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, heads[..., turned:]], axis=-1)

    def _feed_forward(self, layer: int, prefix: str, rows: np.ndarray) -> np.ndarray:
        if prefix + "gate.weight" not in self.weights:
            return self._gated_mlp(prefix, rows)
        logits = self._linear(prefix + "gate", rows)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        output = _sigmoid(self._linear(prefix + "shared_expert_gate", rows)) * self._gated_mlp(
            prefix + "shared_expert.", rows
        )
        for row in range(len(rows)):
            chosen = np.argsort(-weights[row], kind="stable")[: self.config["num_experts_per_tok"]]
            share = weights[row, chosen]
            if self.config["norm_topk_prob"]:
                share = share / share.sum()
            for expert, part in zip(chosen, share, strict=True):
                output[row] += part * self._gated_mlp(f"{prefix}experts.{expert}.", rows[row])
        return output

    def _gated_mlp(self, prefix: str, rows: np.ndarray) -> np.ndarray:
        gate = self._linear(prefix + "gate_proj", rows)
        if self.family == "gemma":
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            activated = 0.5 * gate * (1 + np.tanh(inner))
        else:
            activated = gate * _sigmoid(gate)
        return self._linear(prefix + "down_proj", activated * self._linear(prefix + "up_proj", rows))

    def _gated_delta_net(self, prefix: str, rows: np.ndarray) -> np.ndarray:
        """The recurrence, token by token, over the tokens that take part."""
        config = self.config
        key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        key_size, value_size = config["linear_key_head_dim"], config["linear_value_head_dim"]
        group = value_heads // key_heads
        count = len(rows)
        # The file interleaves per key head: q, k, then the group's v and z; and the group's b and a.
        qkvz = self._linear(prefix + "in_proj_qkvz", rows).reshape(count, key_heads, -1)
        query, key, value, z = np.split(qkvz, np.cumsum([key_size, key_size, group * value_size]), axis=2)
        ba = self._linear(prefix + "in_proj_ba", rows).reshape(count, key_heads, 2 * group)
        b, a = ba[..., :group].reshape(count, -1), ba[..., group:].reshape(count, -1)
        z = z.reshape(count, value_heads, value_size)

        mixed = np.concatenate([part.reshape(count, -1) for part in (query, key, value)], axis=1)
        filters = self.weights[prefix + "conv1d.weight"][:, 0]
        width = filters.shape[1]
        padded = np.concatenate([np.zeros((width - 1, mixed.shape[1])), mixed])
        mixed = sum(padded[tap : tap + count] * filters[:, tap] for tap in range(width))
        mixed = mixed * _sigmoid(mixed)
        query, key, value = np.split(mixed, np.cumsum([key_heads * key_size] * 2), axis=1)
        query = query.reshape(count, key_heads, key_size).repeat(group, axis=1)
        key = key.reshape(count, key_heads, key_size).repeat(group, axis=1)
        value = value.reshape(count, value_heads, value_size)
        query = query / np.sqrt((query**2).sum(-1, keepdims=True) + 1e-6) * key_size**-0.5
        key = key / np.sqrt((key**2).sum(-1, keepdims=True) + 1e-6)

        beta = _sigmoid(b)
        decay = np.exp(-np.exp(self.weights[prefix + "A_log"]) * np.logaddexp(0, a + self.weights[prefix + "dt_bias"]))
        state = np.zeros((value_heads, key_size, value_size))
        output = np.empty((count, value_heads, value_size))
        for row in range(count):
            state = state * decay[row, :, None, None]
            remembered = np.einsum("hkv,hk->hv", state, key[row])
            change = (value[row] - remembered) * beta[row, :, None]
            state = state + key[row, :, :, None] * change[:, None, :]
            output[row] = np.einsum("hkv,hk->hv", state, query[row])
        output = output / np.sqrt((output**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
        output = output * self.weights[prefix + "norm.weight"] * (z * _sigmoid(z))
        return self._linear(prefix + "out_proj", output.reshape(count, -1))


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def _llama3_frequency(value: np.float32, settings: dict) -> float:
    """One frequency under llama3 scaling: long waves are slowed by the factor, short ones kept, a ramp between."""
    context, factor = settings["original_max_position_embeddings"], settings["factor"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    wave = 2 * math.pi / float(value)
    if wave < context / high:
        return float(value)
    if wave > context / low:
        return float(value) / factor
    smooth = (context / wave - low) / (high - low)
    return (1 - smooth) * float(value) / factor + smooth * float(value)
