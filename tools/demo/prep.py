"""corpus/ -> out/tokenizer/ + out/device_pack/tokens.npz (uint16 train and val) + out/heldout.json; run in this folder after build_sources.py"""
import json, glob, os, random, re, sys, time
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, decoders, normalizers, trainers, processors, Regex
import synth
VOCAB = 4096
random.seed(7); synth.R.seed(99)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
NOT_SPECIAL = set(SPECIAL[3:])          # as in Qwen: visible when decoding with skip_special_tokens
wn = [e for e in json.load(open("corpus/wordnet.json")) if len(e["g"]) < 110 and len(e["w"][0]) < 14 and not e["w"][0][0].isupper() and " " not in e["w"][0]]
train, val = [], []           # strings
stat = {}
books = []
for f in sorted(glob.glob("corpus/*.jsonl")):
    n = os.path.basename(f)[:-6]; docs = [json.loads(l)["d"] for l in open(f)]
    if n == "wordnet": docs = docs[:4000]
    if n in ("austen", "mobydick", "canterbury", "botchan", "web_bible", "python_docs"): books += [(n, d) for i, d in enumerate(docs) if i % 40 != 7]
    va = [d for i, d in enumerate(docs) if i % 40 == 7]; tr = [d for i, d in enumerate(docs) if i % 40 != 7]
    stat[n] = sum(map(len, tr)); train += tr; val += [(n, d) for d in va[:12]]
st = [synth.story() for _ in range(14000)]; stat["synthetic stories"] = sum(map(len, st)); train += st
val += [("stories", synth.story()) for _ in range(60)]
cv = [synth.render(synth.conv(wn)) for _ in range(52000)]
cb = json.load(open("corpus/chatterbot.json"))
for c in cb: cv += [synth.render(dict(messages=[dict(role=("user", "assistant")[i % 2], content=x) for i, x in enumerate(c)]))] * 2
stat["synthetic + chatterbot chat"] = sum(map(len, cv)); train += cv
val += [("chat", synth.render(synth.conv(wn))) for _ in range(150)]
ct = []
for n, d in random.sample(books, min(1500, len(books))):
    ps = [p for p in d.split("\n\n") if 120 < len(p) < 1200]
    for _ in range(2):
        if len(ps) < 3: continue
        i = random.randrange(len(ps) - 1); ss = re.split(r"(?<=[.!?]) ", ps[i])
        if len(ss) < 2: continue
        k = max(1, len(ss) // 3); q = random.choice(["Continue this text:", "Continue the story:", "Please continue:", "What comes next?"])
        ct.append(synth.render(dict(messages=[dict(role="user", content=q + "\n\n" + " ".join(ss[:k])), dict(role="assistant", content=" ".join(ss[k:]) + "\n\n" + ps[i+1])])))
stat["continuation chat"] = sum(map(len, ct)); train += ct
for k, v in stat.items(): print(f"{k:30s} {v/1e6:7.2f} MB")
print("train MB", sum(map(len, train)) / 1e6, "val MB", sum(len(d) for _, d in val) / 1e6)
# ---- tokenizer ------------------------------------------------------------------------------
PAT = open("qwen_pat.txt").read().strip("\n")
tok = Tokenizer(models.BPE(byte_fallback=False)); tok.normalizer = normalizers.NFC()
tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PAT), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
tok.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False)
tok.post_processor = processors.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
sample = random.sample(train, 60000)
strip = re.compile("|".join(map(re.escape, SPECIAL)))
t0 = time.time()
tr = trainers.BpeTrainer(vocab_size=VOCAB - len(SPECIAL), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), special_tokens=[], show_progress=False, min_frequency=2)
tok.train_from_iterator((strip.sub(" ", s) for s in sample), tr)
from tokenizers import AddedToken
for s in SPECIAL: tok.add_tokens([AddedToken(s, special=False, normalized=False)]) if s in NOT_SPECIAL else tok.add_special_tokens([AddedToken(s, special=True, normalized=False)])
print("tokenizer", tok.get_vocab_size(), "in", time.time() - t0, "s", {s: tok.token_to_id(s) for s in SPECIAL})
assert tok.get_vocab_size() == VOCAB
D = "out/tokenizer"; os.makedirs(D, exist_ok=True); tok.save(D + "/tokenizer.json")
tmpl = open("../../python/lily/demo/chat_template.jinja").read()
added = {str(tok.token_to_id(s)): dict(content=s, lstrip=False, normalized=False, rstrip=False, single_word=False, special=s not in NOT_SPECIAL) for s in SPECIAL}
json.dump(dict(add_bos_token=False, add_prefix_space=False, added_tokens_decoder=added, additional_special_tokens=["<|im_start|>", "<|im_end|>"], bos_token=None, chat_template=tmpl, clean_up_tokenization_spaces=False,
               eos_token="<|im_end|>", errors="replace", model_max_length=4096, pad_token="<|endoftext|>", split_special_tokens=False, tokenizer_class="PreTrainedTokenizerFast", unk_token=None), open(D + "/tokenizer_config.json", "w"), indent=2)
json.dump(dict(eos_token_id=[tok.token_to_id("<|im_end|>"), tok.token_to_id("<|endoftext|>")], pad_token_id=tok.token_to_id("<|endoftext|>"), do_sample=True, temperature=0.7, top_k=20, top_p=0.95), open(D + "/generation_config.json", "w"), indent=2)
EOT = tok.token_to_id("<|endoftext|>")
def enc(docs):
    out = []
    for i in range(0, len(docs), 2000):
        for e in tok.encode_batch(docs[i:i+2000], add_special_tokens=False): out.append(np.array(e.ids + [EOT], dtype=np.uint16))
    return out
random.shuffle(train)
os.makedirs("out/device_pack", exist_ok=True)
a = np.concatenate(enc(train)); v = np.concatenate(enc([d for _, d in val]))
print("train tokens", len(a), "val tokens", len(v), "bytes/token", sum(len(t.encode()) for t in train) / len(a))
np.savez_compressed("out/device_pack/tokens.npz", train=a, val=v)
print("npz MB", os.path.getsize("out/device_pack/tokens.npz") / 1e6)
# held-out text for perplexity: per kind
json.dump([(n, d) for n, d in val], open("out/heldout.json", "w"))
# template check
from transformers import PreTrainedTokenizerFast
pt = PreTrainedTokenizerFast.from_pretrained(D); pt.chat_template = tmpl; bad = 0
for _ in range(500):
    x = synth.conv(wn); s = pt.apply_chat_template(x["messages"], tools=x.get("tools"), tokenize=False); r = synth.render(x)
    if s != r: bad += 1; print(repr(s)); print(repr(r)); break
print("template mismatches", bad)
