"""The levels below generate(): read a prompt in chunks, look at the logits, choose tokens one by one."""

import sys

import numpy as np

from lily import Engine

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
with Engine(model) as engine, engine.session() as session:
    for progress in session.prefill("Once upon a time, there was a little"):
        print(f"{progress.processed} of {progress.total} tokens read", file=sys.stderr)
    for index in np.argsort(-session.logits)[:5]:
        print(f"{engine.tokenizer.decode([index])!r} has logit {session.logits[index]:.2f}")
    for token in session.step(max_tokens=40, temperature=0.8, top_p=0.95, seed=1):
        print(token.text, end="", flush=True)
    print()
