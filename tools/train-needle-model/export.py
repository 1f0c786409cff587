"""export.py TRAIN_OUT DATA_DIR MODEL_DIR EVAL_DIR: HuggingFace directory, golden logits (transformers, fp32, CPU)."""

import gzip
import json
import os
import shutil
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch
from tokenizers import Tokenizer


def main():
    src, data, out, ev = sys.argv[1:5]
    os.makedirs(out, exist_ok=True)
    meta = json.load(open(os.path.join(src, "train_meta.json")))
    shutil.copy(os.path.join(src, "model.safetensors"), os.path.join(out, "model.safetensors"))
    os.chmod(os.path.join(out, "model.safetensors"), 0o644)
    shutil.copy(os.path.join(data, "tokenizer.json"), os.path.join(out, "tokenizer.json"))
    cfg = meta["hf"]
    json.dump(cfg, open(os.path.join(out, "config.json"), "w"), indent=2)
    json.dump(
        dict(
            _from_model_config=True,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
            do_sample=False,
            max_new_tokens=64,
        ),
        open(os.path.join(out, "generation_config.json"), "w"),
        indent=2,
    )
    json.dump(
        dict(
            tokenizer_class="PreTrainedTokenizerFast",
            bos_token="<|bos|>",
            eos_token="<|eos|>",
            pad_token="<|pad|>",
            add_bos_token=True,
            clean_up_tokenization_spaces=False,
            model_max_length=cfg["max_position_embeddings"],
        ),
        open(os.path.join(out, "tokenizer_config.json"), "w"),
        indent=2,
    )
    json.dump(
        dict(bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>"),
        open(os.path.join(out, "special_tokens_map.json"), "w"),
        indent=2,
    )

    from transformers import LlamaForCausalLM

    m = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    tok = Tokenizer.from_file(os.path.join(out, "tokenizer.json"))
    rows = [json.loads(x) for x in gzip.open(os.path.join(ev, "eval.jsonl.gz"), "rt")]
    ppl = [json.loads(x) for x in gzip.open(os.path.join(ev, "ppl.jsonl.gz"), "rt")]
    pr = [
        ("code-short", "import os\n\n\ndef read_lines(path):\n    with open(path) as f:\n"),
        ("english-short", "The old farmer watched the quiet river in the morning. The"),
    ]
    for t, L in (
        ("passkey", 1024),
        ("needle4", 1024),
        ("kv", 1024),
        ("multiquery3of8", 1024),
        ("trace2", 1024),
        ("passkey", 4096),
        ("kv", 4096),
    ):
        e = next(r for r in rows if r["task"] == t and r["length"] == L)
        pr.append((e["id"], e["prompt"]))
    pr.append(
        (
            "code-2048:" + ppl[0]["source"] + "/" + ppl[0]["path"],
            tok.decode(tok.encode(ppl[0]["text"]).ids[1:2048]),
        )
    )
    G = []
    for name, text in pr:
        ids = tok.encode(text).ids
        x = torch.tensor([ids])
        with torch.no_grad():
            lg = m(x).logits[0].float()
            new = m.generate(x, max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
        v, i = lg[-1].topk(20)
        ce = torch.nn.functional.cross_entropy(lg[:-1], x[0, 1:]).item()
        d = lg.double()
        G.append(
            dict(
                name=name,
                text=text,
                ids=ids,
                n=len(ids),
                last_top20_ids=i.tolist(),
                last_top20_logits=[float(t) for t in v],
                sum=float(d.sum()),
                abs_sum=float(d.abs().sum()),
                last_sum=float(d[-1].sum()),
                last_abs_sum=float(d[-1].abs().sum()),
                per_position_argmax_head=lg[:32].argmax(-1).tolist(),
                mean_ce=ce,
                greedy_new_ids=new,
                greedy_new_text=tok.decode(new, skip_special_tokens=False),
            )
        )
        print(name, len(ids), "ce %.4f" % ce, repr(G[-1]["greedy_new_text"][:60]))
    import transformers

    json.dump(
        dict(
            note="transformers LlamaForCausalLM, weights bf16 upcast to fp32, fp32 arithmetic, eager attention, CPU",
            transformers=transformers.__version__,
            torch=torch.__version__,
            prompts=G,
        ),
        open(os.path.join(out, "golden.json"), "w"),
    )
    print("golden", os.path.getsize(os.path.join(out, "golden.json")))


if __name__ == "__main__":
    main()
