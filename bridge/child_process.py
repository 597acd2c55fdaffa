"""What a child process in Python does: it answers one request per line of standard input with one line each.

`bridge.child` starts it and asks. A request is ``{"call": name, "with": {...}}``; the answer is an object with `result`
or with `error`. The first answer comes unasked, when the process is ready.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Answer", "serve"]

Answer = dict[str, Any]


def serve(
    load: Callable[[], Answer],
    answer: Callable[[str, Answer], Answer],
    failure: Callable[[Exception], Answer],
    folder: Path,
) -> None:
    """Answer requests until standard input ends, which ends the process and removes `folder`, in whatever it may do.

    `load` gives the first answer; `answer` that to a call with its arguments; `failure` gives the "error" that is sent
    for an exception in either, whose traceback goes to standard error.
    """
    # Ctrl-C is for the parent, which then closes this process. A stopped process whose parent dies is sent SIGHUP and
    # SIGCONT: it must outlive the first to find that standard input has ended, and clean up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    requests, answers = _take_over_standard_streams()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, lines, folder), daemon=True).start()

    def guarded(work: Callable[..., Answer], *arguments: Any) -> Answer:
        try:
            return work(*arguments)
        except Exception as error:
            traceback.print_exc()
            return {"error": failure(error)}

    try:
        _send(answers, guarded(load))
        while True:
            request = json.loads(lines.get())
            _send(answers, guarded(answer, request["call"], request["with"]))
    except BrokenPipeError:
        _end(folder)


def _take_over_standard_streams() -> tuple[TextIO, TextIO]:
    """Keep the protocol's two pipes to itself: what a library prints goes to standard error, and it has no input."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _read(requests: TextIO, lines: queue.SimpleQueue[str], folder: Path) -> None:
    """Pass requests on. When the parent closes the pipe or dies, end everything, in the middle of an epoch too."""
    for line in requests:
        lines.put(line)
    _end(folder)


def _end(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # with whatever processes a framework has started
    os._exit(0)


def _send(answers: TextIO, answer: Answer) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
