"""Computes the truth with transformers: run by the oracle's own interpreter, one process for everything that is asked.

    python run.py JOBS.json

JOBS.json: {"output": folder, "small": [names], "rotary": {name: config.json values}, "real": {name: {"gguf": path,
"ids": [token ids of one text], "lengths": [int]}}}. Writes one <name>.npz per model (and a safetensors folder per small
model). All in float32 on the CPU, greedy decoding with transformers' own cache.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.oracle.small_models import NEW_TOKENS, SMALL_MODELS, small_prompts  # noqa: E402

# transformers reads a GGUF file's vocabulary, and the table of tensor names, several times over: once is enough. Slices
# of a memory map are slow to make, and the reader makes millions: give it a plain array.
gguf.gguf_reader.np = SimpleNamespace(**(vars(np) | {"memmap": lambda path, mode: np.fromfile(path, np.uint8)}))
gguf.GGUFReader = functools.lru_cache(gguf.GGUFReader)
gguf.get_tensor_name_map = functools.lru_cache(gguf.get_tensor_name_map)


def main(jobs_file: str) -> None:
    """Run every job of the file."""
    jobs = json.loads(Path(jobs_file).read_text())
    output = Path(jobs["output"])
    for name in jobs.get("small", []):
        timed(name, lambda name=name: small_model(name, output))
    if jobs.get("rotary"):
        timed("rotary tables", lambda: rotary_tables(jobs["rotary"], output))
    for name, job in jobs.get("real", {}).items():
        timed(name, lambda name=name, job=job: real_model(name, job, output))


def timed(name: str, work) -> None:
    """Run one job and say on stderr how long it took."""
    start = time.perf_counter()
    work()
    print(f"oracle: {name} {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def small_model(name: str, output: Path) -> None:
    """Random weights, saved as safetensors; logits at all prompt positions, and a greedy continuation per prompt."""
    small = SMALL_MODELS[name]
    values = dict(small.config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    model = model.float().eval()
    randomise(model, small.seed)
    model.save_pretrained(output / name)
    torch.set_num_threads(1)  # more threads only wait for each other on matrices this small
    arrays = {}
    for number, prompt in enumerate(small_prompts(name)):
        logits, tokens, margins = greedy(model, prompt, all_positions=True)
        arrays |= {f"logits_{number}": logits, f"tokens_{number}": tokens, f"margins_{number}": margins}
    np.savez(output / f"{name}.npz", **arrays)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights that make mistakes visible: norms and biases off their neutral value, attention peaked enough to drop by.

    Matrices have standard deviation gain / sqrt(fan in); embeddings share a common direction, through which some
    tokens attract most queries, as sinks and keywords do in trained models.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(shape, deviation):
        return torch.randn(shape, generator=generator) * deviation

    gains = dict(q_proj=2.0, k_proj=2.0, o_proj=2.0, down_proj=3.0, lm_head=3.0, gate=2.0, out_proj=2.0)
    common = torch.sign(normal((model.config.hidden_size,), 1.0)) * 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            owner = name.split(".")[-2] if name.endswith((".weight", ".bias")) else ""
            if "embed_tokens" in name:
                # Small where the head is tied, or else every token predicts itself.
                scale = 0.2 if model.config.tie_word_embeddings else 1.0
                scale *= model.config.hidden_size**-0.5 if model.config.model_type == "gemma3_text" else 1.0
                parameter.copy_((normal(parameter.shape, 1.0) + common) * scale)
            elif owner in ("q_norm", "k_norm"):
                parameter.copy_(0.5 + normal(parameter.shape, 0.3))
            elif "norm" in owner:
                # Off 1 for plain norms and off 0 for those that add 1: each way of reading it is wrong for the other.
                centre = 1.0 if parameter.mean() > 0.5 else 0.0
                parameter.copy_(centre + normal(parameter.shape, 0.3))
            elif name.endswith("A_log"):
                # Decays from a few tokens to a few hundred, as in trained models.
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 5.0 - 4.0)
            elif name.endswith("dt_bias"):
                parameter.copy_(normal(parameter.shape, 0.5) - 2.0)
            elif name.endswith(".bias"):
                parameter.copy_(normal(parameter.shape, 0.3))
            else:
                fan_in = parameter[0].numel() if "conv1d" in name else parameter.shape[-1]
                parameter.copy_(normal(parameter.shape, gains.get(owner, 1.0) * fan_in**-0.5))


@torch.no_grad()
def greedy(model, prompt, all_positions: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(prompt logits, NEW_TOKENS greedy token ids, top-1 minus top-2 logit before each of them)."""
    keep = {} if all_positions else {"logits_to_keep": 1}
    result = model(torch.as_tensor(prompt)[None], use_cache=True, **keep)
    prompt_logits = result.logits[0].float().numpy()
    tokens, margins = [], []
    for _ in range(NEW_TOKENS):
        best = torch.topk(result.logits[0, -1], 2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        result = model(best.indices[None, :1], past_key_values=result.past_key_values, use_cache=True)
    return prompt_logits, np.array(tokens), np.array(margins, np.float32)


def real_model(name: str, job: dict, output: Path) -> None:
    """A GGUF model, dequantised to float32: last-position logits and greedy continuations of cuts of one text."""
    folder, file = str(Path(job["gguf"]).parent), Path(job["gguf"]).name
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    ids = np.asarray(job["ids"])
    arrays = {"ids": ids}
    for length in job["lengths"]:
        if length > len(ids):
            raise SystemExit(f"{name}: there are {len(ids)} token ids, a prompt of {length} was asked for")
        logits, tokens, margins = greedy(model, ids[:length], all_positions=False)
        arrays |= {f"logits_{length}": logits[-1], f"tokens_{length}": tokens, f"margins_{length}": margins}
    np.savez(output / f"{name}.npz", **arrays)


def rotary_tables(configs: dict[str, dict], output: Path) -> None:
    """cos and sin of published models' rotary embeddings, from transformers' own classes, at `positions`."""
    positions = np.unique(np.r_[0:20, np.arange(0, 131_072, 997), 8_191, 8_192, 32_767, 32_768, 131_071])
    ids = torch.as_tensor(positions)[None]
    arrays = {"positions": positions}
    probe = torch.zeros(1)
    for name, values in configs.items():
        values = dict(values.get("text_config", values))
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        if config.model_type == "gemma3_text":
            rotary = Gemma3RotaryEmbedding(config)
            for kind in ("full_attention", "sliding_attention"):
                arrays |= table(f"{name}/{kind}", rotary(probe, ids, kind))
        elif config.model_type == "llama":
            arrays |= table(f"{name}/full_attention", LlamaRotaryEmbedding(config)(probe, ids))
        else:
            arrays |= table(f"{name}/full_attention", Qwen3NextRotaryEmbedding(config)(probe, ids))
    np.savez(output / "rotary.npz", **arrays)


def table(name: str, values: tuple[torch.Tensor, torch.Tensor]) -> dict[str, np.ndarray]:
    """cos and sin under one name."""
    return {f"{name}/cos": values[0][0].numpy(), f"{name}/sin": values[1][0].numpy()}


if __name__ == "__main__":
    main(sys.argv[1])
