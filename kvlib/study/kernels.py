"""The kernel that runs a notebook: of this very Python, one at a time in a run, and what it said when it died."""

import contextlib
import fcntl
import logging
import os
import sys
import time
from pathlib import Path

from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec

from kvlib.errors import KvlibError
from kvlib.study.names import ROOT
from kvlib.study.progress import VARIABLE

KERNEL_WAIT_S = 15  # a killed command's kernel notices within a second or two
QUIET = {  # for kernels: progress bars flood a page, advice is not for readers
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}


def kernel_manager(state: Path, log, lock: int, environment: dict) -> type[AsyncKernelManager]:
    """A kernel of this very Python, whatever is registered; it holds the kernel lock while it lives."""

    class OwnKernel(AsyncKernelManager):
        @property
        def kernel_spec(self) -> KernelSpec:
            argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=argv, display_name="Python 3", language="python")

        async def start_kernel(self, **kwargs):
            path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            env = {**os.environ, **QUIET, **environment, "PYTHONPATH": path, VARIABLE: str(state)}
            return await super().start_kernel(**kwargs, env=env, stdout=log, stderr=log, pass_fds=(lock,))

    return OwnKernel


@contextlib.contextmanager
def kernel_lock(folder: Path):
    """A lock that kernels inherit: one whose command was killed is waited for before the next may write."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / ".kernel.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + KERNEL_WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise KvlibError(
                        f"a notebook of an earlier command still runs in {folder}, expected none: end that "
                        "process, then run again"
                    ) from error
                time.sleep(0.2)
        yield handle
    finally:
        os.close(handle)


def last_words(log: str) -> str:
    """The last line that a kernel left of what its notebook did, or nothing: what every kernel says is no reason to die."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next(
        (line for line in reversed(lines) if not line.startswith(("[IPKernelApp]", "NOTE: When"))), ""
    )


@contextlib.contextmanager
def without_its_obituary():
    """nbclient logs that a kernel died before it raises that: the sentence that comes of it says it once."""

    def other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Kernel died")

    logs = [logging.getLogger(name) for name in ("papermill", "traitlets")]
    for log in logs:
        log.addFilter(other)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(other)
