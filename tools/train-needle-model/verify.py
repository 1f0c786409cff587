"""verify.py MODEL_DIR: loads the directory with transformers and compares logits with model.py (fp32 on CPU)."""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import model


def own(dir_, ids):
    model.CD = torch.float32
    c = json.load(open(os.path.join(dir_, "config.json")))
    m = model.Llama(
        model.Cfg(
            vocab=c["vocab_size"],
            d=c["hidden_size"],
            layers=c["num_hidden_layers"],
            hq=c["num_attention_heads"],
            hkv=c["num_key_value_heads"],
            hd=c["head_dim"],
            ff=c["intermediate_size"],
            theta=c["rope_theta"],
            eps=c["rms_norm_eps"],
            maxpos=c["max_position_embeddings"],
        )
    )
    m.load_hf({k: v.float() for k, v in load_file(os.path.join(dir_, "model.safetensors")).items()})
    with torch.no_grad():
        x = m.hidden(ids)
        return (model.rms(x, m.nf, m.c.eps) @ m.emb.T).view(*ids.shape, -1)


if __name__ == "__main__":
    d = sys.argv[1]
    hf = LlamaForCausalLM.from_pretrained(d, dtype=torch.float32, attn_implementation="sdpa").eval()
    print(
        type(hf).__name__,
        sum(p.numel() for p in hf.parameters()),
        hf.config.rope_parameters if hasattr(hf.config, "rope_parameters") else hf.config.rope_theta,
    )
    torch.manual_seed(0)
    ids = torch.randint(3, hf.config.vocab_size, (2, 700))
    ids[:, 0] = 0
    with torch.no_grad():
        a = hf(ids).logits
    b = own(d, ids)
    print("max abs diff of logits", (a - b).abs().max().item(), "max abs logit", a.abs().max().item())
