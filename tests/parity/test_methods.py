"""Whole models under the methods that UniPrefill is compared with: dense, batches, decoding."""

from dataclasses import replace
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
import pytest

import uniprefill_jax as up
from tests.oracle.small_models import SMALL_MODELS, make_prompt
from tests.parity.compare import greedy, relative_error
from tests.parity.plain_model import PlainModel
from tests.sparsify.plain_methods import snapkv
from tests.sparsify.rule import Rule
from uniprefill_jax.prefill_plan import PrefillPlan

LENGTHS = (420, 70, 150)
# A few layers of the small models: every kind of layer, and full attention twice or more.
LAYERS = {
    "llama-scaled": {"num_hidden_layers": 3},
    "gemma-irregular": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "qwen3-irregular": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
    },
}
EVERYTHING = [
    ("llama-scaled", "minference:vertical=30:slash=419"),
    ("gemma-irregular", "proxyattn:gamma=1"),
    ("qwen3-irregular", "xattention:threshold=1"),
    pytest.param("llama-scaled", "flexprefill:gamma=1:min_budget=64", marks=pytest.mark.slow),
    pytest.param("llama-scaled", "xattention:threshold=1", marks=pytest.mark.slow),
    pytest.param("gemma-irregular", "minference:vertical=30:slash=419", marks=pytest.mark.slow),
    pytest.param("qwen3-irregular", "flexprefill:gamma=1:min_budget=64", marks=pytest.mark.slow),
]
PART = [
    ("llama-scaled", "minference:vertical=40:slash=60:dense_below=100+snapkv:capacity=110"),
    pytest.param("gemma-irregular", "xattention:threshold=0.3:stride=8:dense_below=100", marks=pytest.mark.slow),
    pytest.param(
        "qwen3-irregular", "proxyattn:gamma=0.3:dense_below=100+streaming_llm:recent=110", marks=pytest.mark.slow
    ),
    pytest.param("llama-scaled", "flexprefill:gamma=0.3:min_budget=64:dense_below=100", marks=pytest.mark.slow),
]


@lru_cache
def shallow(name: str) -> up.LLM:
    model = SMALL_MODELS[name]
    return up.LLM.from_config(model.config | LAYERS[name], dtype="float32", seed=model.seed)


def prompts_of(name: str) -> list[list[int]]:
    return [make_prompt(SMALL_MODELS[name].config["vocab_size"], length, 31).tolist() for length in LENGTHS]


@lru_cache
def dense_logits(name: str) -> list[np.ndarray]:
    return [result.logits for result in shallow(name).prefill(prompts_of(name), up.UniPrefillConfig.dense())]


@pytest.mark.parametrize(("name", "text"), EVERYTHING)
def test_with_everything_kept_a_method_is_dense(name: str, text: str) -> None:
    method = up.Method.parse(f"{text}:dense_below=0")
    results = shallow(name).prefill(prompts_of(name), method)
    for result, logits in zip(results, dense_logits(name), strict=True):
        assert relative_error(result.logits, logits) <= 1e-5
        assert result.computed_attention
        assert all(share == pytest.approx(1) for share in result.computed_attention.values())
        assert result.flop_fraction == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama-scaled", "lazyllm:drop_layers=0_1"),
        pytest.param("gemma-irregular", "sliminfer:drop_layers=0", marks=pytest.mark.slow),
        pytest.param("qwen3-irregular", "lazyllm:drop_layers=0", marks=pytest.mark.slow),
    ],
)
def test_with_all_tokens_kept_a_method_is_dense(name: str, text: str) -> None:
    method = up.Method.parse(f"{text}:first_keep=1:last_keep=1:dense_below=0")
    results = shallow(name).prefill(prompts_of(name), method)
    for result, logits, length in zip(results, dense_logits(name), LENGTHS, strict=True):
        assert relative_error(result.logits, logits) <= 1e-5
        assert result.kept_positions and all(len(kept) == length for kept in result.kept_positions.values())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama-scaled", "lazyllm:drop_layers=1_3"),
        ("qwen3-irregular", "sliminfer:queries=16:drop_layers=0_5"),
        pytest.param("gemma-irregular", "lazyllm:drop_layers=1_4", marks=pytest.mark.slow),
        pytest.param("llama-scaled", "sliminfer:queries=16:drop_layers=1_3", marks=pytest.mark.slow),
    ],
)
def test_tokens_leave_a_batch_as_they_leave_alone(name: str, text: str, small_llm, plain_model) -> None:
    """And as they leave the plain model; the short prompt is dense."""
    method = up.Method.parse(f"{text}:first_keep=0.6:last_keep=0.3:dense_below=100")
    llm, prompts = small_llm(name), prompts_of(name)
    together, alone = llm.prefill(prompts, method), llm.prefill(prompts[2:], method)[0]
    assert relative_error(together[2].logits, alone.logits) <= 1e-5
    layers = tuple(together[2].kept_positions)
    assert all((together[2].kept_positions[layer] == alone.kept_positions[layer]).all() for layer in layers)
    assert all(len(kept) == LENGTHS[1] for kept in together[1].kept_positions.values())
    assert min(len(kept) for kept in together[2].kept_positions.values()) < LENGTHS[2]
    for result, prompt in zip(together, prompts, strict=True):
        # The plain model's own choice is UniPrefill's; it is told which tokens stay.
        rule = Rule(drop_layers=layers)
        trace = plain_model(name).forward(np.asarray(prompt), len(prompt), rule, kept=result.kept_positions)
        assert relative_error(result.logits, trace.logits[0]) <= 2e-5
    for layer, share in zip(layers, (0.6, 0.3), strict=True):
        kept = len(together[0].kept_positions[layer])
        assert LENGTHS[0] * share <= kept <= LENGTHS[0] * share + 64
    assert together[0].flop_fraction < 1


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("minference", 2048),
        ("minference:vertical=3000", 3000),
        ("minference:slash=50:vertical=30", 256),
        ("flexprefill", 1024),
        ("flexprefill:min_budget=64", 256),
        ("xattention", 256),
        ("proxyattn", 256),
    ],
)
def test_from_which_length_on_a_method_chooses(text: str, budget: int) -> None:
    """One prompt of a batch that is longer is enough: the others are dense in the same program."""
    method, model = up.Method.parse(text), shallow("llama-scaled").config
    for lengths, chooses in (([budget], False), ([budget, 1], False), ([budget + 1], True), ([1, budget + 1], True)):
        plan = PrefillPlan.for_batch(model, method, (), lengths, jnp.float32)
        assert (plan.attention is not None) == chooses


@pytest.mark.parametrize("text", ["minference", "flexprefill", "minference:vertical=420:slash=50:dense_below=0"])
def test_a_prompt_that_the_budget_covers_runs_the_dense_program(text: str) -> None:
    """Without choosing, which would cost time and change nothing."""
    llm, method = shallow("llama-scaled"), up.Method.parse(text)
    dense_logits("llama-scaled")
    programs = len(llm.programs.compiled)
    results = llm.prefill(prompts_of("llama-scaled"), method)
    assert len(llm.programs.compiled) == programs
    for result, logits in zip(results, dense_logits("llama-scaled"), strict=True):
        assert (result.logits == logits).all() and not result.computed_attention


@pytest.mark.parametrize(("name", "text"), PART)
def test_a_batch_gives_each_prompt_what_it_gets_alone(name: str, text: str) -> None:
    """And short prompts what they get dense; sliding and recurrent layers are left alone."""
    llm, prompts, method = shallow(name), prompts_of(name), up.Method.parse(text)
    together, alone = llm.prefill(prompts, method), llm.prefill(prompts[2:], method)[0]
    assert relative_error(together[2].logits, alone.logits) <= 1e-5
    pairs = zip(together, dense_logits(name), strict=True)
    errors = [relative_error(result.logits, logits) for result, logits in pairs]
    assert errors[1] <= 1e-5 < 1e-4 < errors[0], "the short prompt is dense, the long one is not"
    found = together[0]
    full = [layer for layer in llm.config.full_attention_layers if layer < llm.config.num_layers - 1]
    assert sorted(found.computed_attention) == full and max(found.computed_attention.values()) < 1
    assert found.flop_fraction < 1 == pytest.approx(together[1].flop_fraction)
    most = method.compression.most_rows if method.compression is not None else LENGTHS[0]
    rows = {"full": most, "sliding": LENGTHS[0], "linear": 0}
    assert found.kv_lengths.tolist() == [rows[layer.mixer] for layer in llm.config.layers]


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


@pytest.mark.parametrize("dropping", [pytest.param({}, marks=pytest.mark.slow), {"top_p": 0.4, "drop_layers": (1,)}])
def test_decoding_sees_what_snapkv_kept(dropping: dict, small_llm, small_folder) -> None:
    """Log-probabilities of given tokens after the prompt, alone and as the second step after UniPrefill."""
    name, options = "llama-scaled", {"capacity": 90, "window": 16, "kernel": 5}
    method = up.Method.parse("snapkv:" + ":".join(f"{field}={value}" for field, value in options.items()))
    method = replace(method, dropping=up.UniPrefillConfig(**dropping) if dropping else method.dropping)
    llm, prompt = small_llm(name), prompts_of(name)[0]
    given = make_prompt(llm.config.vocab_size, 12, 5).tolist()
    completion = llm.generate([prompt, prompt[:80]], method, greedy(1), continuations=[given, given])[0]
    assert completion.prefill.kv_lengths.tolist() == [90] * llm.config.num_layers
    model = AfterSnapKV(small_folder(name))
    model.options, model.prompt_length = options, len(prompt)
    trace = model.forward(np.asarray(prompt + given), len(prompt), Rule(**dropping))
    assert not dropping or len(trace.kept[1]) < len(prompt)
    logits = trace.logits[:-1] - trace.logits[:-1].max(axis=1, keepdims=True)
    wanted = logits[range(len(given)), given] - np.log(np.exp(logits).sum(axis=1))
    np.testing.assert_allclose(completion.continuation_logprobs, wanted, atol=2e-4)
