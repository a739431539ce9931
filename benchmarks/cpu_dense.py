"""Dense prefill of SmolLM2-135M on this CPU against transformers on the same CPU, in turns, float32.

    python -m benchmarks.cpu_dense --oracle-python .venv/oracle/bin/python [--tokens 2048] [--json PATH]

Both load the same packaged GGUF file (dequantised) and compute the logits of the last prompt token with a cache. Fresh
random tokens in every run; medians; loading and compilation apart. Prints the ratio: below 1 this library is faster.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from checkpoints_convert import find_packaged
from uniprefill_jax import LLM, UniPrefillConfig
from uniprefill_jax.result_file import write_result

ORACLE = """
import sys, time, torch, transformers
folder, file = sys.argv[1].rsplit("/", 1)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
print("ready", torch.__version__, transformers.__version__, model.config._attn_implementation, flush=True)
with torch.no_grad():
    for line in sys.stdin:
        ids = torch.tensor([[int(token) for token in line.split()]])
        start = time.perf_counter()
        model(ids, logits_to_keep=1, use_cache=True)
        print(time.perf_counter() - start, flush=True)
"""


def main() -> None:
    """Measure, print the ratio and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oracle-python", required=True, help="interpreter with torch, transformers and accelerate")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = find_packaged("smollm2-135m")
    assert path is not None
    llm = LLM.load(path, dtype="float32")
    oracle = subprocess.Popen(
        [options.oracle_python, "-c", ORACLE, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert oracle.stdin is not None and oracle.stdout is not None
    _, torch_version, transformers_version, attention = oracle.stdout.readline().split()
    random = np.random.default_rng()
    ours, theirs = [], []
    for repeat in range(options.runs + 1):
        ids = random.integers(0, llm.config.vocab_size, options.tokens).tolist()
        result = llm.prefill([ids], UniPrefillConfig.dense())[0]
        oracle.stdin.write(" ".join(map(str, ids)) + "\n")
        oracle.stdin.flush()
        seconds = float(oracle.stdout.readline())
        print(f"run {repeat}: uniprefill-jax {result.seconds:.2f} s, transformers {seconds:.2f} s", flush=True)
        if repeat:  # the first one warms both up
            ours.append(result.seconds)
            theirs.append(seconds)
    oracle.stdin.close()
    oracle.wait()
    # Each run is set against its neighbour in time, so that a machine that slows down for a while slows both.
    ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    ratio = statistics.median(ratios)
    print(f"median {statistics.median(ours):.2f} s / {statistics.median(theirs):.2f} s, ratio {ratio:.2f}")
    if options.json is not None:
        row = {
            "arch": "smollm2-135m",
            "n": options.tokens,
            "batch": 1,
            "dtype": "float32",
            "method": "dense",
            "ttft_ms": round(statistics.median(ours) * 1e3, 1),
            "hf_ttft_ms": round(statistics.median(theirs) * 1e3, 1),
            "ratio": round(ratio, 3),
            "ratio_min": round(ratios[0], 3),
            "ratio_max": round(ratios[-1], 3),
            "runs": options.runs,
            "hf_attention": attention,
            "hf_versions": f"torch {torch_version}, transformers {transformers_version}",
            "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_result(options.json, " ".join(["python -m benchmarks.cpu_dense", *sys.argv[1:]]), [row])


if __name__ == "__main__":
    main()
