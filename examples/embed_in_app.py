"""An application around the engine: a worker thread answers, the user may cancel, errors are typed."""

import queue
import sys
import threading

from lily import ContextFullError, Engine, LilyError, OutOfMemoryError


class Assistant:
    """Answers in a thread of its own and hands out pieces of text through a queue; None ends an answer."""

    def __init__(self, model: str) -> None:
        """Load the model."""
        self._engine = Engine(model, context=2048)
        self._cancelled = threading.Event()

    def ask(self, question: str, pieces: "queue.Queue[str | None]") -> threading.Thread:
        """Start answering a question."""
        self._cancelled.clear()
        thread = threading.Thread(target=self._answer, args=(question, pieces))
        thread.start()
        return thread

    def cancel(self) -> None:
        """Stop the answer after the token in work."""
        self._cancelled.set()

    def close(self) -> None:
        """Give the memory back."""
        self._engine.close()

    def _answer(self, question: str, pieces: "queue.Queue[str | None]") -> None:
        messages = [{"role": "user", "content": question}]
        try:
            for chunk in self._engine.generate(messages, enable_thinking=False, seed=1):
                if self._cancelled.is_set():
                    break
                pieces.put(chunk.text)
        except ContextFullError:
            pieces.put("(the question is too long)")
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
    thread = assistant.ask("Tell me a story about a fox named Tim.", pieces)
    for count, piece in enumerate(iter(pieces.get, None)):
        print(piece, end="", flush=True)
        if count == 30:
            assistant.cancel()
    thread.join()
    print()
    assistant.close()


if __name__ == "__main__":
    main()
