"""Child processes that answer JSON lines and never outlive their parent."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from logitless.bench.errors import BenchError


class ChildFailed(Exception):
    """A child that died, ran over its time or refused: `str(error)` says which, in one line."""


class Child:
    """A Python module in a process of its own: one JSON line in, one JSON line out.

    Args:
        module: what `python -m` runs.
        arguments: its command line.

    Use it as a context: leaving it ends the process, however it is left.
    """

    def __init__(self, module: str, arguments: Sequence[str] = ()) -> None:
        # A file and not a pipe, which would fill up and block a child that warns a lot.
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            # The last line of a traceback is then the exception and not JAX's note about hidden frames, and a GPU
            # that JAX shares with torch is not taken whole.
            env=os.environ | {"JAX_TRACEBACK_FILTERING": "off", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            # Ctrl-C reaches the parent alone, which then ends its children quietly.
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, message: Any, timeout_s: float) -> dict[str, Any]:
        """Sends one message and waits for its answer.

        Raises:
            ChildFailed: the child died, answered with an error, or did not answer in time; it is ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it died: what it says on stderr comes below
        return self.wait(timeout_s)

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Waits for the next answer, as `ask` does."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            raise ChildFailed(f"no answer within {timeout_s:g} s (timeout_s)") from None
        if line is None:
            raise ChildFailed(self._obituary())
        answer = json.loads(line)
        if "error" in answer:
            raise ChildFailed(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process and waits for it."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # an unsent message to a dead child

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _obituary(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr if line.strip()]
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        hint = " (out of memory?)" if code == -9 else ""
        return f"its process died, {how}{hint}" + (f": {lines[-1][:300]}" if lines else "")


def private_stdout() -> TextIO:
    """The child's stdout for answers alone; whatever else prints goes to stderr from here on."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve(handle: Callable[[Any], dict[str, Any]]) -> None:
    """Answers the parent's messages until it closes the pipe or dies; then ends at once, in mid-computation too."""
    answers = private_stdout()
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            messages.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            answer = handle(json.loads(messages.get()))
        except BenchError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")


def now_ms() -> float:
    return time.perf_counter() * 1e3
