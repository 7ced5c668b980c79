"""What a worker process is: `python -m` this file with an errand's file, then a line of JSON for every unit.

It ends when its standard input does, which is when the process that started it ends, however that ended.
"""

import json
import os
import pkgutil
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TextIO

from kvlib.study.executors.worker import Job, Worker
from kvlib.study.profile import Profile
from kvlib.study.run import Run
from kvlib.study.units import Unit


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    worker = _worker(json.loads(Path(sys.argv[1]).read_text()))
    _say(answers, {"ready": True})
    while True:
        asked = json.loads(lines.get())
        _say(answers, _done(worker, Unit.of(asked["unit"]), Path(asked["report"])))


def _listen(lines: queue.Queue) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # nobody is left to work for


def _say(answers: TextIO, what: dict) -> None:
    answers.write(json.dumps(what) + "\n")


def _worker(errand: dict) -> Worker:
    profile = Profile.model_validate(errand["profile"])
    run = Run(profile, errand["name"], Path(errand["folder"]), errand["overrides"], errand["source"])
    opened = pkgutil.resolve_name(errand["open_bench"])
    return Worker(Job(run, errand["stage"], errand["pair"], errand["threads"], None, {}, opened))


def _done(worker: Worker, unit: Unit, report: Path) -> dict:
    """Do a unit. What it found is in the records; what is said is that it is there, or why it is not."""
    try:
        how, value, counted = worker.call("do", (unit,), report, False)
    except Exception as error:
        return {"error": _described(error)}
    return {"how": how, "sentence": value if how == "refused" else None, "counted": counted}


def _described(error: Exception) -> dict:
    known = isinstance(error, OSError) and error.errno is not None
    place = [] if not known or error.filename is None else [str(error.filename)]
    return {
        "text": f"{type(error).__name__}: {error}",
        "os": [error.errno, error.strerror, *place] if known else None,
        "trace": "".join(traceback.format_exception(error)),
    }


if __name__ == "__main__":
    main()
