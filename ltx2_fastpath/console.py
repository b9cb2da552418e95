"""What is written to a terminal: one line that says what is being done, and aligned columns."""

import sys
import time


class Progress:
    """Call it with what is done now. On a terminal the line is rewritten, elsewhere every step has its own."""

    def __init__(self, stream=None):
        self._stream = sys.stderr if stream is None else stream
        self._rewrite = self._stream.isatty()
        self._start = time.monotonic()

    def __call__(self, text: str) -> None:
        line = f"{time.monotonic() - self._start:5.0f} s  {text}"
        self._stream.write(f"\r\x1b[K{line}" if self._rewrite else f"{line}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Take the line away, for what is printed next."""
        if self._rewrite:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def align(rows: list[list[str]], left: int = 1) -> str:
    """`rows` in columns two spaces apart; the first `left` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows)]

    def line(row):
        cells = (cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))
