"""Extracts what `lily doctor` needs of the golden data; python tests/doctor_golden.py writes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from lily.doctor.golden import GOLDEN

SOURCE = Path(__file__).parent / "golden"


def extract() -> str:
    """The content of the file: one text a line."""
    info = json.loads((SOURCE / "golden.json").read_text(encoding="utf-8"))
    lines = []
    with np.load(SOURCE / "golden.npz") as data:
        for p, prompt in enumerate(info["prompts"]):
            logits = data[f"p{p}_top_logit"]
            text = {
                "name": prompt["name"],
                "ids": data[f"p{p}_ids"].tolist(),
                "top1": data[f"p{p}_top_id"][:, 0].tolist(),
                "margin": [round(float(m), 3) for m in logits[:, 0] - logits[:, 1]],
                "nll": [round(float(x), 4) for x in data[f"p{p}_nll"]],
            }
            lines.append(json.dumps(text, separators=(",", ":")))
    return '{"texts":[\n' + ",\n".join(lines) + "\n]}\n"


if __name__ == "__main__":
    GOLDEN.write_text(extract(), encoding="utf-8")
