#!/usr/bin/env python3
"""Golden data from two independent oracles: mlx_lm on the 4-bit checkpoint, transformers on its dequantised weights.

  python eval_oracle.py --hf HF_DIR --mlx MLX4_DIR --out OUT [--tok 192] [--new 64] [--heldout heldout.json] [--prompts FILE]

--prompts: JSON list of {"name", "text"} or {"name", "messages", "tools", "template"}; without it the six built-in prompts.

MLX runs with fp32 activations (all float parameters cast to fp32; packed uint32 weights unchanged), because the
CPU back-end's quantized_matmul accumulates in bf16 when activations are bf16 (1.8 % rms error at K=256, 5 % at
K=2048), which no GPU does.  --bf16 adds a bf16 pass for information.
Writes OUT/golden.json (meta, prompts, greedy tokens, perplexities) and OUT/golden.npz:
  p{i}_ids [T] i32; p{i}_top_id [T,20] i32; p{i}_top_logit [T,20] f32; p{i}_lse [T] f32 (logprob = logit - lse);
  p{i}_nll [T-1] f32 (teacher-forced); p{i}_greedy [64] i32; p{i}_margin [64] f32 (top1-top2 at each greedy step);
  hf_top_id / hf_top_logit / hf_lse the same from transformers; p0_hidden [L+1,16,H] f32 residual stream from transformers.
"""
import argparse, json, os, time, math
from pathlib import Path
import numpy as np, torch, mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import load_model
from transformers import PreTrainedTokenizerFast, DynamicCache
from common import mlx_to_hf_sd, hf_model, save_hf
from safetensors.torch import load_file
ap = argparse.ArgumentParser(); A = ap.add_argument
A("--hf", required=True); A("--mlx", required=True); A("--out", required=True); A("--tok", type=int, default=192); A("--new", type=int, default=64)
A("--heldout", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "out", "heldout.json")); A("--ppl_windows", type=int, default=24); A("--ppl_len", type=int, default=256); A("--bf16", type=int, default=1); A("--prompts", default="")
a = ap.parse_args(); os.makedirs(a.out, exist_ok=True)
tk = PreTrainedTokenizerFast.from_pretrained(a.mlx)
ho = json.load(open(a.heldout)); by = {}
for n, d in ho: by.setdefault(n, []).append(d)
chat = lambda msgs, **k: tk.apply_chat_template(msgs, tokenize=False, **k)
W = [{"type": "function", "function": {"name": "get_weather", "description": "Get the weather in a city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
P = [("chat_story", chat([{"role": "user", "content": "Tell me a story about a fox named Tim."}], add_generation_prompt=True, enable_thinking=False)),
     ("chat_think", chat([{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True)),
     ("chat_tool", chat([{"role": "user", "content": "What is the weather in Paris?"}], tools=W, add_generation_prompt=True, enable_thinking=False)),
     ("austen", by["austen"][0][200:]), ("python_docs", by["python_docs"][1]), ("unicode", "Ünïcödé — 日本語 и русский 😀 \\n\n\n    def f(x):\n        return x*12345\n" + by["web_bible"][0][:300])]
if a.prompts: P = [(p["name"], p["text"] if "text" in p else chat(p["messages"], tools=p.get("tools"), add_generation_prompt=True, **p.get("template", {}))) for p in json.load(open(a.prompts))]
m, cfg = load_model(Path(a.mlx)); tc = cfg["text_config"]
f32 = lambda m: m.update(tree_map(lambda v: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v, m.parameters()))
f32(m)
sd, _ = mlx_to_hf_sd(a.mlx); hf = hf_model(tc, sd)
EOS = set(cfg.get("eos_token_id") or [tc.get("eos_token_id")]) if not isinstance(cfg.get("eos_token_id"), int) else {cfg["eos_token_id"]}
def mlx_logits(m, ids, chunk=64):
    c = m.make_cache(); o = []
    for i in range(0, len(ids), chunk):
        l = m(mx.array(ids[i:i + chunk])[None], cache=c)[0].astype(mx.float32); mx.eval(l); o.append(np.array(l))
    return np.concatenate(o), c
def greedy(m, ids, n):
    """n tokens, not stopping at EOS (the stop position is reported)."""
    l, c = mlx_logits(m, ids); l = l[-1]; out, mg = [], []
    for _ in range(n):
        s = np.sort(l)[-2:]; t = int(l.argmax()); out.append(t); mg.append(float(s[1] - s[0]))
        l = np.array(m(mx.array([[t]]), cache=c)[0, -1].astype(mx.float32))
    return out, mg
def lse(l): x = l.astype(np.float64); mxx = x.max(-1); return mxx + np.log(np.exp(x - mxx[..., None]).sum(-1))
G, J = {}, dict(prompts=[], versions={})
import importlib.metadata as im
J["versions"] = {k: im.version(k) for k in ("mlx", "mlx-lm", "transformers", "torch", "tokenizers")}
mb = None
if a.bf16: mb, _ = load_model(Path(a.mlx))
for i, (name, text) in enumerate(P):
    pid = tk(text, add_special_tokens=False).input_ids[: a.tok]
    t0 = time.time(); g, mg = greedy(m, pid if len(pid) < a.tok else pid[: a.tok // 2], a.new); dt = time.time() - t0
    ids = (pid + g + [t for d in by["stories"] for t in tk("<|endoftext|>" + d).input_ids])[: a.tok] if len(pid) < a.tok else pid   # teacher-forced sequence
    L, _ = mlx_logits(m, ids)
    with torch.no_grad():
        o = hf(torch.tensor(ids)[None], output_hidden_states=(i == 0)); H = o.logits[0].float().numpy()
        if i == 0: G["p0_hidden"] = torch.stack([h[0, :16] for h in o.hidden_states]).float().numpy()
    top = np.argsort(-L, -1)[:, :20]; ht = np.argsort(-H, -1)[:, :20]
    gen_ids = pid if len(pid) < a.tok else pid[: a.tok // 2]
    z = lse(L); nll = z[:-1] - L[np.arange(len(ids) - 1), ids[1:]]
    G.update({f"p{i}_ids": np.array(ids, np.int32), f"p{i}_top_id": top.astype(np.int32), f"p{i}_top_logit": np.take_along_axis(L, top, -1).astype(np.float32), f"p{i}_lse": z.astype(np.float32), f"p{i}_nll": nll.astype(np.float32),
              f"p{i}_hf_top_id": ht.astype(np.int32), f"p{i}_hf_top_logit": np.take_along_axis(H, ht, -1).astype(np.float32), f"p{i}_hf_lse": lse(H).astype(np.float32), f"p{i}_greedy": np.array(g, np.int32), f"p{i}_margin": np.array(mg, np.float32)})
    d = np.abs(L - H); r = dict(name=name, text=text if len(pid) < a.tok else tk.decode(gen_ids), prompt_ids=[int(x) for x in gen_ids], greedy_ids=g, greedy_text=tk.decode(g), min_margin=min(mg), stop_at=next((j for j, t in enumerate(g) if t in EOS), None),
             mlx_vs_hf=dict(max=float(d.max()), mean=float(d.mean()), top1=float((L.argmax(-1) == H.argmax(-1)).mean()), nll_mlx=float(nll.mean())), greedy_tok_s=a.new / dt)
    if mb is not None:
        B, _ = mlx_logits(mb, ids); d = np.abs(B - L); r["mlx_bf16_vs_fp32"] = dict(max=float(d.max()), mean=float(d.mean()), top1=float((B.argmax(-1) == L.argmax(-1)).mean()))
    J["prompts"].append(r); print(name, json.dumps(r["mlx_vs_hf"]), r.get("mlx_bf16_vs_fp32"), "min margin %.4f" % r["min_margin"]); print("   ", repr(r["greedy_text"][:300]), flush=True)
# perplexity on held-out text
raw = {}
for f in sorted(os.listdir(a.hf)):
    if f.endswith(".safetensors"): raw.update(load_file(os.path.join(a.hf, f)))
ref = hf_model(tc, {k.replace("model.language_model.", "model.", 1): v.float() for k, v in raw.items() if not k.startswith(("mtp.", "model.visual"))})
kinds = sorted(by); win = []
for j in range(a.ppl_windows):
    n = kinds[j % len(kinds)]; d = by[n][(j // len(kinds)) % len(by[n])]
    t = tk("".join(by[n][:4]) if len(d) < 4000 else d, add_special_tokens=False).input_ids[: a.ppl_len]
    if len(t) > 32: win.append((n, t))
acc = {}
for n, t in win:
    L, _ = mlx_logits(m, t, 128); ix = np.arange(len(t) - 1)
    with torch.no_grad(): H = hf(torch.tensor(t)[None]).logits[0].double().numpy(); R = ref(torch.tensor(t)[None]).logits[0].double().numpy()
    e = [lse(x)[:-1] - x[ix, t[1:]] for x in (L, H, R)]
    for k in (n, "ALL"):
        s = acc.setdefault(k, [0, 0.0, 0.0, 0.0]); s[0] += len(ix)
        for q in range(3): s[q + 1] += float(e[q].sum())
J["perplexity"] = {k: dict(tokens=s[0], mlx_4bit=math.exp(s[1] / s[0]), hf_dequantised=math.exp(s[2] / s[0]), hf_bf16_unquantised=math.exp(s[3] / s[0])) for k, s in acc.items()}
json.dump(dict(windows=[dict(kind=n, ids=t) for n, t in win]), open(os.path.join(a.out, "ppl_windows.json"), "w"))
for k, v in J["perplexity"].items(): print(f"{k:18s}", v)
np.savez_compressed(os.path.join(a.out, "golden.npz"), **G); json.dump(J, open(os.path.join(a.out, "golden.json"), "w"), indent=1, ensure_ascii=False)
print("written", a.out, {f: os.path.getsize(os.path.join(a.out, f)) for f in os.listdir(a.out)})
