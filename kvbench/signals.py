"""The signals that end a run: which they are, and what each makes of the exit code.

The first asks for an end in order. The second is taken for its echo, since a terminal and whoever supervises the process may
both send one; the third ends the process where it stands. No KeyboardInterrupt is ever raised: it could break off anything.
"""

import asyncio
import signal
from collections.abc import Callable

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
ECHOES = 1  # signals after the first that change nothing


class SignalError(Exception):
    """A signal came before there was anything to report."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"interrupted by {number.name} before the run began")
        self.code = CODES[number]


class Ear:
    """Hears signals and calls `first` at the first of them. `number` is that one, None as long as there was none."""

    def __init__(self, first: Callable[[signal.Signals], object]) -> None:
        self.number: signal.Signals | None = None
        self._first, self._more = first, 0

    def hear(self, number: int, _: object = None) -> None:
        """Called by the loop, or by the interpreter, which hands in a frame."""
        if self.number is None:
            self.number = signal.Signals(number)
            self._first(self.number)
            return
        self._more += 1
        if self._more > ECHOES:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def listening(loop: asyncio.AbstractEventLoop, first: Callable[[signal.Signals], object]) -> Ear:
    """An ear on this loop for every signal that ends a run. A later one takes its place."""
    ear = Ear(first)
    for number in ending():
        loop.add_signal_handler(number, ear.hear, number)
    return ear


def unwinding() -> None:
    """From here on a signal leaves by SystemExit, through every `finally`: for a verb whose children and temporary files are all
    that it could leave behind."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(CODES[signal.Signals(number)])

    for number in ending():
        signal.signal(number, leave)


def ending() -> list[signal.Signals]:
    """The signals to listen for. A process that was started to outlive its terminal (nohup) is left to do so."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in CODES if not (ignored and number is signal.SIGHUP)]
