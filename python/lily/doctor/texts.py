"""What a checkpoint makes of text, before its weights are loaded: the tokenizer and the chat template."""

from __future__ import annotations

from lily.doctor.checks import Check
from lily.tokenizer import Tokenizer

# English that any language model predicts far better than by chance.
PROSE = (
    "Once upon a time, there was an old man who lived in a small house by the sea. Every evening he lit the "
    "lamp, sat down at the table, and wrote in a blue book about the wind, the weather, and the ships that "
    "came to the harbour. One day a little girl knocked at the door. She was cold and wet from the rain. The "
    "old man gave her bread and warm milk, and she told him that she had lost her way home. "
    '"Do not be afraid," he said. "I will take you home in my boat." They walked down to the water together, '
    "and the sun came out.\n\n"
)
# And what else models read, so that many experts and unusual tokens have their turn.
SAMPLE = """\
def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

Question: A train leaves at 9:40 and arrives at 12:05. How long is the journey?
Answer: From 9:40 to 12:00 are 2 hours and 20 minutes; 5 minutes more make 2 hours and 25 minutes.

Die Katze schläft auf dem warmen Dach. Le pain était encore chaud. El río baja lleno después de la lluvia.
今日は天気がいいので、公園まで歩きました。 Сегодня мы читали старую книгу.

{"name": "Ada", "born": 1815, "languages": ["English", "French"], "ratio": 0.6180339887}
"""
LEAST_CHARACTERS = 2.0  # of English in a token; a vocabulary that lost its merges has 1
QUESTION = "What is the capital of France?"


def check_tokenizer(check: Check, tokenizer: Tokenizer) -> None:
    """Fills a check with whether text survives, and whether tokens are longer than letters."""
    text = PROSE + SAMPLE
    ids = tokenizer.encode(text)
    length = len(PROSE) / max(1, len(tokenizer.encode(PROSE)))
    check.data = {"vocab": tokenizer.vocab_size, "tokens": len(ids), "characters_per_token": length}
    check.text = f"{len(ids)} tokens of {len(text)} characters, in English {length:.1f} characters a token"
    if tokenizer.decode(ids) != text:
        check.reason = "text is not the same after it was turned into tokens and back"
    elif length < LEAST_CHARACTERS:
        check.reason = f"English has {length:.1f} characters a token: tokenizer.json has lost its merges"


def check_chat_template(check: Check, tokenizer: Tokenizer) -> None:
    """Fills a check with whether the template can write a conversation. To have none is no fault."""
    if not tokenizer.has_chat_template:
        check.text = "none"
        check.warnings.append("there is no chat template: generate() takes text or token ids, not messages")
        return
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])
    tokens = len(tokenizer.encode(prompt))
    check.data = {"tokens": tokens}
    check.text = f"a question of {len(tokenizer.encode(QUESTION))} tokens is a prompt of {tokens}"
    if QUESTION not in prompt:
        check.reason = "the prompt that it writes does not have the user's message"
