"""Progress of profiling and planning: a line per phase, and on a terminal a bar that moves with the clock.

Lines go to the log, or to stderr where the program has not configured logging.
"""

from __future__ import annotations

import logging
import sys
import threading
import time

logger = logging.getLogger(__name__)

_BAR = 20
"""Characters of the bar."""
_REDRAWN_S = 0.5


def tell(line: str, logger: logging.Logger) -> None:
    """Log a line as information; write it to stderr if nobody handles the log."""
    if logger.hasHandlers():
        logger.info(line)
    else:
        print(f"mdcs: {line}", file=sys.stderr, flush=True)


class Progress:
    """The present phase, shown until the next one begins. A phase may say how many seconds it will take.

    Writes nothing unless ``shown``.
    """

    def __init__(self, shown: bool) -> None:
        self._shown, self._began, self._ended = shown, time.monotonic(), threading.Event()
        self._drawing: threading.Thread | None = None

    def begin(self, phase: str, seconds: float | None) -> None:
        """Show a phase. ``seconds``: the seconds that it will take; None: not known, so it has no bar."""
        if not self._shown:
            return
        self.end()
        limit = "" if seconds is None else f", about {max(1.0, seconds):.0f} s"
        tell(f"{phase}{limit} (after {time.monotonic() - self._began:.0f} s)", logger)
        if seconds is not None and sys.stderr.isatty() and not logger.hasHandlers():
            self._ended = threading.Event()
            self._drawing = threading.Thread(target=self._draw, args=(seconds, self._ended), daemon=True)
            self._drawing.start()

    def end(self) -> None:
        """End the present phase, and its bar."""
        if self._drawing is not None:
            self._ended.set()
            self._drawing.join()
            self._drawing = None

    @staticmethod
    def _draw(seconds: float, ended: threading.Event) -> None:
        began = time.monotonic()
        while not ended.wait(_REDRAWN_S):
            part = min(1.0, (time.monotonic() - began) / seconds)
            full = round(_BAR * part)
            print(f"\rmdcs: [{'#' * full}{'.' * (_BAR - full)}]", end="", file=sys.stderr, flush=True)
        print("\r\033[K", end="", file=sys.stderr, flush=True)  # the next line takes the place of the bar
