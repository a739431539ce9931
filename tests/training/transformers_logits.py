"""Run by the oracle's interpreter: logits of a saved model for token ids, from transformers' own Qwen3-Next.

python transformers_logits.py FOLDER IDS.npy LOGITS.npy
"""

import sys

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3NextForCausalLM

folder, ids, output = sys.argv[1:]
model = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
with torch.no_grad():
    np.save(output, model(torch.as_tensor(np.load(ids))).logits.numpy())
assert AutoTokenizer.from_pretrained(folder).decode(AutoTokenizer.from_pretrained(folder)(" 1234567")["input_ids"]) == (
    " 1234567"
)
