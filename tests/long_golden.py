"""What mlx-lm in fp32 says about long prompts; python tests/long_golden.py writes tests/golden/long.npz.

Their text is the held-out windows and the golden prompts one after the other, from the start again up to
8,192 tokens. It is one prompt, or several shorter ones: the change of perplexity over 8,192 tokens has a
standard error of 0.04 %, over fewer it says little.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
LONG = GOLDEN / "long.npz"
TOTAL = 8192
LENGTHS = (2048, TOTAL)
STEP = 512  # tokens of one call of mlx-lm


def prompts(length: int) -> list[list[int]]:
    """The text in prompts of `length` tokens."""
    windows = json.loads((GOLDEN / "ppl_windows.json").read_text(encoding="utf-8"))["windows"]
    texts = [window["ids"] for window in windows]
    with np.load(GOLDEN / "golden.npz") as data:
        texts += [data[name].tolist() for name in sorted(data.files) if name.endswith("_ids")]
    text = list(itertools.islice(itertools.cycle(itertools.chain(*texts)), TOTAL))
    return [text[first : first + length] for first in range(0, TOTAL, length)]


def predictions(model: Any, ids: Sequence[int]) -> dict[str, np.ndarray]:
    """Top-1 tokens [n], their margins [n], and log probabilities of token 1, 2, ... [n - 1] of a prompt."""
    import mlx.core as mx

    from test_mlx import log_softmax

    cache = model.make_cache()
    top1, margin, logprobs = [], [], []
    for first in range(0, len(ids), STEP):
        logits = model(mx.array(list(ids[first : first + STEP]))[None], cache=cache)[0].astype(mx.float32)
        mx.eval(logits)
        expected = log_softmax(np.array(logits))
        order = np.sort(expected, -1)
        top1.append(expected.argmax(-1).astype(np.uint16))
        margin.append((order[:, -1] - order[:, -2]).astype(np.float32))
        targets = ids[first + 1 : first + STEP + 1]
        logprobs.append(expected[np.arange(len(targets)), targets].astype(np.float32))
        print(f"{first + STEP} of {len(ids)} tokens", flush=True)
    parts = {"top1": top1, "margin": margin, "logprobs": logprobs}
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def main() -> None:
    """Run mlx-lm and write what it predicts: arrays LENGTH_PROMPT_NAME."""
    from lily.checkpoint import DEMO
    from test_mlx import mlx_model

    model = mlx_model(DEMO)
    made: dict[str, Any] = {}
    for length in LENGTHS:
        for prompt, ids in enumerate(prompts(length)):
            for name, array in predictions(model, ids).items():
                made[f"{length}_{prompt}_{name}"] = array
    np.savez_compressed(LONG, **made)


if __name__ == "__main__":
    main()
