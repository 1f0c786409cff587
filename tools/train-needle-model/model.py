"""Llama architecture (RMSNorm, RoPE with rotate-half, GQA, SwiGLU, tied head), written for training speed: all tokens of a
batch are one (T, d) matrix of constant size, so that compiled code is shared by all layers and all sequence lengths; only the
attention call sees (B, L)."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Cfg:
    vocab: int = 4096
    d: int = 256
    layers: int = 8
    hq: int = 8
    hkv: int = 2
    hd: int = 64
    ff: int = 704
    theta: float = 500000.0
    eps: float = 1e-5
    maxpos: int = 16384


CD = torch.bfloat16  # compute type of the matrix products


def rms(x, w, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def rope(x, cos, sin):  # x (T, H, D) float; cos, sin (T, D/2)
    h = x.shape[-1] // 2
    a, b = x[..., :h], x[..., h:]
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def pre(x, n1, wqkv, cos, sin, hq, hkv, hd, eps):
    h = rms(x, n1, eps).to(CD)
    qkv = F.linear(h, wqkv.to(CD))
    q, k, v = qkv.split((hq * hd, hkv * hd, hkv * hd), -1)
    T = x.shape[0]
    q = rope(q.view(T, hq, hd).float(), cos, sin).to(CD)
    k = rope(k.view(T, hkv, hd).float(), cos, sin).to(CD)
    return q, k, v.reshape(T, hkv, hd).contiguous()


def post(x, o, wo, n2, wgu, wd, eps):
    x = x + F.linear(o, wo.to(CD)).float()
    h = rms(x, n2, eps).to(CD)
    g, u = F.linear(h, wgu.to(CD)).chunk(2, -1)
    return x + F.linear((F.silu(g.float()) * u.float()).to(CD), wd.to(CD)).float()


def head(x, nf, emb, tgt, w, eps):
    """-> per-token loss and whether the top logit is the target"""
    lg = F.linear(rms(x, nf, eps).to(CD), emb.to(CD)).float()
    ce = F.cross_entropy(lg, tgt, reduction="none")
    with torch.no_grad():
        hit = lg.argmax(-1) == tgt
    lm = (w > 0).float()
    an = (-w).clamp_min(0)
    loss_lm = (ce * lm).sum() / lm.sum().clamp_min(1)
    loss_an = (ce * an).sum() / an.sum().clamp_min(1)
    return loss_lm, loss_an, hit, ce


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        s = 0.6 / math.sqrt(c.d)
        self.n1 = nn.Parameter(torch.ones(c.d))
        self.n2 = nn.Parameter(torch.ones(c.d))
        self.wqkv = nn.Parameter(torch.randn((c.hq + 2 * c.hkv) * c.hd, c.d) * s)
        self.wo = nn.Parameter(torch.zeros(c.d, c.hq * c.hd))
        self.wgu = nn.Parameter(torch.randn(2 * c.ff, c.d) * s)
        self.wd = nn.Parameter(torch.zeros(c.d, c.ff))


class Llama(nn.Module):
    def __init__(self, c, compile=False):
        super().__init__()
        self.c = c
        self.emb = nn.Parameter(torch.randn(c.vocab, c.d) * 0.02)
        self.nf = nn.Parameter(torch.ones(c.d))
        self.ls = nn.ModuleList([Layer(c) for _ in range(c.layers)])
        inv = 1.0 / (c.theta ** (torch.arange(0, c.hd, 2, dtype=torch.float64) / c.hd))
        t = torch.arange(c.maxpos, dtype=torch.float64)[:, None] * inv
        self.register_buffer("cos", t.cos().float(), persistent=False)
        self.register_buffer("sin", t.sin().float(), persistent=False)
        comp = (lambda f: torch.compile(f, dynamic=False)) if compile else (lambda f: f)
        self.pre, self.post, self.head_ = comp(pre), comp(post), comp(head)
        self.backend = {}

    def attn(self, q, k, v, B, L):
        c = self.c
        q, k, v = (t.view(B, L, -1, c.hd).transpose(1, 2) for t in (q, k, v))
        be = self.backend.get(L)
        if be is None:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            with torch.nn.attention.sdpa_kernel(be):
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o.transpose(1, 2).reshape(B * L, c.hq * c.hd)

    def hidden(self, ids):
        """ids (B, L) -> (B*L, d)"""
        c = self.c
        B, L = ids.shape
        cos = self.cos[:L].repeat(B, 1)
        sin = self.sin[:L].repeat(B, 1)
        x = F.embedding(ids.reshape(-1), self.emb).float()
        for l in self.ls:
            q, k, v = self.pre(x, l.n1, l.wqkv, cos, sin, c.hq, c.hkv, c.hd, c.eps)
            x = self.post(x, self.attn(q, k, v, B, L), l.wo, l.n2, l.wgu, l.wd, c.eps)
        return x

    def forward(self, ids, tgt, w):
        return self.head_(self.hidden(ids), self.nf, self.emb, tgt.reshape(-1), w.reshape(-1), self.c.eps)

    # ---- HF layout ------------------------------------------------------------------------------
    def hf_state(self, dtype=torch.bfloat16):
        c = self.c
        d = {"model.embed_tokens.weight": self.emb, "model.norm.weight": self.nf}
        for i, l in enumerate(self.ls):
            p = f"model.layers.{i}."
            q, k, v = l.wqkv.split((c.hq * c.hd, c.hkv * c.hd, c.hkv * c.hd), 0)
            g, u = l.wgu.chunk(2, 0)
            d.update(
                {
                    p + "input_layernorm.weight": l.n1,
                    p + "post_attention_layernorm.weight": l.n2,
                    p + "self_attn.q_proj.weight": q,
                    p + "self_attn.k_proj.weight": k,
                    p + "self_attn.v_proj.weight": v,
                    p + "self_attn.o_proj.weight": l.wo,
                    p + "mlp.gate_proj.weight": g,
                    p + "mlp.up_proj.weight": u,
                    p + "mlp.down_proj.weight": l.wd,
                }
            )
        return {k: v.detach().to(dtype).contiguous().cpu() for k, v in d.items()}

    @torch.no_grad()
    def load_hf(self, d):
        self.emb.copy_(d["model.embed_tokens.weight"])
        self.nf.copy_(d["model.norm.weight"])
        for i, l in enumerate(self.ls):
            p = f"model.layers.{i}."
            l.n1.copy_(d[p + "input_layernorm.weight"])
            l.n2.copy_(d[p + "post_attention_layernorm.weight"])
            l.wqkv.copy_(torch.cat([d[p + f"self_attn.{x}_proj.weight"].float() for x in "qkv"]))
            l.wo.copy_(d[p + "self_attn.o_proj.weight"])
            l.wgu.copy_(
                torch.cat([d[p + "mlp.gate_proj.weight"].float(), d[p + "mlp.up_proj.weight"].float()])
            )
            l.wd.copy_(d[p + "mlp.down_proj.weight"])


def hf_config(c, ctx):
    return dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        attention_bias=False,
        attention_dropout=0.0,
        mlp_bias=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        hidden_act="silu",
        hidden_size=c.d,
        head_dim=c.hd,
        initializer_range=0.02,
        intermediate_size=c.ff,
        max_position_embeddings=ctx,
        num_attention_heads=c.hq,
        num_hidden_layers=c.layers,
        num_key_value_heads=c.hkv,
        pretraining_tp=1,
        rms_norm_eps=c.eps,
        rope_scaling=None,
        rope_theta=c.theta,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        use_cache=True,
        vocab_size=c.vocab,
    )
