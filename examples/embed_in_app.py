"""An application around the engine: a worker thread answers, the user may cancel, errors are typed."""

import queue
import sys
import threading

from lily import Chunk, ContextFullError, Engine, LilyError, OutOfMemoryError, Stream


class Assistant:
    """Answers in a thread of its own and hands out pieces of text through a queue; None ends an answer."""

    def __init__(self, model: str) -> None:
        """Load the model."""
        self._engine = Engine(model, context=2048)
        self._chunks: Stream[Chunk] | None = None

    def ask(self, question: str, pieces: "queue.Queue[str | None]") -> threading.Thread:
        """Start answering a question; raises ContextFullError if it is too long."""
        messages = [{"role": "user", "content": question}]
        self._chunks = self._engine.generate(messages, enable_thinking=False, seed=1)
        thread = threading.Thread(target=self._answer, args=(self._chunks, pieces))
        thread.start()
        return thread

    def cancel(self) -> None:
        """Stop the answer after the token, or the chunk of a prompt, in work."""
        if self._chunks is not None:
            self._chunks.close()

    def close(self) -> None:
        """Give the memory back."""
        self._engine.close()

    def _answer(self, chunks: Stream[Chunk], pieces: "queue.Queue[str | None]") -> None:
        try:
            for chunk in chunks:
                pieces.put(chunk.text)
        except LilyError as error:
            pieces.put(f"(failed: {error})")
        finally:
            pieces.put(None)


def main() -> None:
    """Ask for a story and cancel it after 30 pieces."""
    try:
        assistant = Assistant(sys.argv[1] if len(sys.argv) > 1 else "demo")
    except OutOfMemoryError as error:
        sys.exit(f"not enough memory: {error}")
    pieces: queue.Queue[str | None] = queue.Queue()
    try:
        thread = assistant.ask("Tell me a story about a fox named Tim.", pieces)
    except ContextFullError as error:
        sys.exit(f"the question is too long: {error}")
    for count, piece in enumerate(iter(pieces.get, None)):
        print(piece, end="", flush=True)
        if count == 30:
            assistant.cancel()
    thread.join()
    print()
    assistant.close()


if __name__ == "__main__":
    main()
