"""A conversation of two turns. The messages are the whole conversation each time, as in OpenAI's API."""

import sys

from lily import Engine

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
messages = [{"role": "system", "content": "You are a helpful assistant."}]
with Engine(model) as engine:
    for question in ("What is the capital of France?", "What is the capital of Japan?"):
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        parts = {"text": "", "reasoning": ""}
        for chunk in engine.generate(messages, temperature=0, max_tokens=200):
            parts[chunk.kind] += chunk.text
            if chunk.kind == "text":
                print(chunk.text, end="", flush=True)
        print()
        messages.append(
            {"role": "assistant", "content": parts["text"], "reasoning_content": parts["reasoning"]}
        )
