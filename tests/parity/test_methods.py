"""Whole models under the methods that UniPrefill is compared with: dense, batches, decoding."""

from dataclasses import replace

import numpy as np
import pytest

import uniprefill_jax as up
from tests.oracle.small_models import SMALL_MODELS, make_prompt
from tests.parity.compare import greedy, relative_error
from tests.parity.plain_model import PlainModel
from tests.sparsify.plain_methods import snapkv
from tests.sparsify.rule import Rule

LENGTHS = (700, 130, 333)
EVERYTHING = {
    "llama-scaled": ("minference:vertical=30:slash=9999", "flexprefill:gamma=1", "xattention:threshold=1"),
    "gemma-irregular": ("proxyattn:gamma=1",),
    "qwen3-irregular": ("xattention:threshold=1",),
}
PART = {
    "llama-scaled": "minference:vertical=40:slash=60:dense_below=200+snapkv:capacity=150",
    "gemma-irregular": "xattention:threshold=0.3:stride=8:dense_below=200",
    "qwen3-irregular": "proxyattn:gamma=0.3:dense_below=200+streaming_llm:recent=120",
}


def prompts_of(name: str) -> list[list[int]]:
    return [make_prompt(SMALL_MODELS[name].config["vocab_size"], length, 31).tolist() for length in LENGTHS]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in EVERYTHING.items() for text in texts])
def test_with_everything_kept_a_method_is_dense(name: str, text: str, small_llm) -> None:
    llm, prompts = small_llm(name), prompts_of(name)
    dense = llm.prefill(prompts, up.UniPrefillConfig.dense())
    method = up.Method.parse(f"{text}:dense_below=0")
    for result, other in zip(llm.prefill(prompts, method), dense, strict=True):
        assert relative_error(result.logits, other.logits) <= 1e-5
        assert result.computed_attention and all(
            share == pytest.approx(1) for share in result.computed_attention.values()
        )
        assert result.flop_fraction == pytest.approx(1)


@pytest.mark.parametrize("name", list(PART))
def test_a_batch_gives_each_prompt_what_it_gets_alone(name: str, small_llm) -> None:
    """And short prompts what they get dense; sliding and recurrent layers are left alone."""
    llm, prompts, method = small_llm(name), prompts_of(name), up.Method.parse(PART[name])
    together = llm.generate(prompts, method, greedy(6))
    alone = llm.generate(prompts[2:], method, greedy(6))[0]
    assert relative_error(together[2].prefill.logits, alone.prefill.logits) <= 1e-5
    assert together[2].token_ids == alone.token_ids
    dense = llm.prefill(prompts, up.UniPrefillConfig.dense())
    errors = [relative_error(ours.prefill.logits, theirs.logits) for ours, theirs in zip(together, dense, strict=True)]
    assert errors[1] <= 1e-5 < 1e-3 < errors[0], "the short prompt is dense, the long one is not"
    found = together[0].prefill
    full = [layer for layer in llm.config.full_attention_layers if layer < llm.config.num_layers - 1]
    assert sorted(found.computed_attention) == full and max(found.computed_attention.values()) < 1
    assert found.flop_fraction < 1 == pytest.approx(together[1].prefill.flop_fraction)
    if method.compression is not None:
        most = method.compression.most_rows
        wanted = {"full": most, "sliding": 700, "linear": 0}
        assert found.kv_lengths.tolist() == [wanted[layer.mixer] for layer in llm.config.layers]


class AfterSnapKV(PlainModel):
    """The plain Llama whose generated tokens see, of the prompt, what SnapKV keeps for each layer and KV head."""

    options: dict[str, int]
    prompt_length: int

    def _attention(self, prefix: str, kind: str, rows: np.ndarray, positions: np.ndarray, rule: Rule):
        mixed, queries, keys, scale = super()._attention(prefix, kind, rows, positions, rule)
        count = int((positions < self.prompt_length).sum())
        values = self._linear(prefix + "v_proj", rows).reshape(keys.shape)
        group = queries.shape[1] // keys.shape[1]
        output = np.empty_like(queries[count:])
        for head in range(queries.shape[1]):
            heads = slice(head // group * group, head // group * group + group)
            key, value = keys[:, head // group], values[:, head // group]
            kept = snapkv(queries[:count, heads].swapaxes(0, 1), key[:count], scale, **self.options)
            for row in range(count, len(rows)):
                seen = [*kept, *range(count, row + 1)]
                weights = np.exp(scale * key[seen] @ queries[row, head])
                output[row - count, head] = weights / weights.sum() @ value[seen]
        mixed[count:] = self._linear(prefix + "o_proj", output.reshape(len(output), -1))
        return mixed, queries, keys, scale


@pytest.mark.parametrize("dropping", [{}, {"top_p": 0.9, "drop_layers": (1,)}])
def test_decoding_sees_what_snapkv_kept(dropping: dict, small_llm, small_folder) -> None:
    """Log-probabilities of given tokens after the prompt, alone and as the second step after UniPrefill."""
    name, options = "llama-scaled", {"capacity": 90, "window": 16, "kernel": 5}
    method = up.Method.parse("snapkv:" + ":".join(f"{field}={value}" for field, value in options.items()))
    method = replace(method, dropping=up.UniPrefillConfig(**dropping) if dropping else method.dropping)
    llm, prompt = small_llm(name), prompts_of(name)[0]
    given = make_prompt(llm.config.vocab_size, 12, 5).tolist()
    completion = llm.generate([prompt, prompt[:300]], method, greedy(1), continuations=[given, given])[0]
    assert completion.prefill.kv_lengths.tolist() == [90] * llm.config.num_layers
    model = AfterSnapKV(small_folder(name))
    model.options, model.prompt_length = options, len(prompt)
    trace = model.forward(np.asarray(prompt + given), len(prompt), Rule(**dropping))
    assert not dropping or len(trace.kept[1]) < len(prompt)
    logits = trace.logits[:-1] - trace.logits[:-1].max(axis=1, keepdims=True)
    wanted = logits[range(len(given)), given] - np.log(np.exp(logits).sum(axis=1))
    np.testing.assert_allclose(completion.continuation_logprobs, wanted, atol=2e-4)
