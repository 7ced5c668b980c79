"""A Ray to work on: this machine's own, or a cluster that is running. Quiet; nothing is reported to anyone."""

import contextlib
import functools
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from kvlib.errors import KvlibError
from kvlib.study.executors import Settings
from kvlib.study.run import ROOT

OBJECT_STORE_BYTES = 80 * 2**20  # what comes back is tables; Ray takes no less
CONNECT_S = 10
LONGEST_TEMPORARY = 30  # Ray's sockets lie below it, and their paths may have 107 characters
THREADS_AT_MOST = 4  # by default: models that train on a processor gain little from more
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a worker without a GPU sees what its machine has, as `local` does
}


def require_ray() -> None:
    """Raises KvlibError, with what to install, where there is no Ray."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)  # advice on packages that would make its outputs in notebooks richer
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise KvlibError(
            f"executor ray given, expected the package ray, which cannot be imported ({error}): install it with "
            "`pip install -r requirements-ray.txt -c requirements.lock`, or leave the executor out"
        ) from error
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class Room:
    """What every worker gets, and how many of them there is room for."""

    threads: int
    gpus: float
    workers: int


@contextlib.contextmanager
def connected(settings: Settings, device: str) -> Iterator[None]:
    """Ray, while the block runs. One that this process has started or joined before is used as it is, and stays."""
    import ray

    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    with _environment(QUIET), _sigterm_kept():
        if settings.address is not None:
            join(settings.address, **quiet)
            try:
                yield
            finally:
                ray.shutdown()
            return
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"RAY_AUTH_TOKEN": _token(), "PYTHONPATH": paths}
        with _environment(own), _short_folder() as folder:
            try:
                ray.init(address="local", **quiet, **_own(settings, device), _temp_dir=folder)
                yield
            finally:
                ray.shutdown()


def _own(settings: Settings, device: str) -> dict:
    """Arguments for a Ray of this machine alone."""
    threads = settings.threads_per_unit or _threads(cores())
    return {
        "num_cpus": max(cores(), threads * (settings.workers or 1)),
        "num_gpus": 0 if device == "cpu" else None,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_system_config": {"enable_metrics_collection": False},
    }


@contextlib.contextmanager
def _short_folder() -> Iterator[str]:
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="kvlib-", dir=parent if len(parent) <= LONGEST_TEMPORARY else "/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _token() -> str:
    """Keeps other users of this machine out; Ray would write one into the home folder.

    One per process, since Ray reads it once.
    """
    return secrets.token_hex(32)


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself: give it back to whom it belonged."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


def join(address: str, **quiet) -> None:
    """Connect to a cluster that is running. Raises KvlibError, one sentence, where there is none at the address."""
    import ray

    if address.startswith("ray://"):
        raise KvlibError(
            f"address {address} given, expected HOST:PORT of a cluster that this machine is a node of: run the command on a "
            "node of the cluster and give it the address that `ray start` printed there, or `auto`"
        )
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal():  # Ray would try for minutes to reach a cluster that is not there
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address=address, **quiet)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise KvlibError(
            f"address {address} given, expected a running Ray cluster that this machine is a node of ({reason.rstrip('.')}): "
            "start Ray with `ray start`, or leave the address out to use this machine alone"
        ) from error


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads(cpus: float) -> int:
    return max(1, min(THREADS_AT_MOST, int(cpus) // 2))


def room(settings: Settings, device: str) -> Room:
    """What the nodes that Ray knows leave room for.

    device: the profile's; `auto` takes GPUs where there are any. Raises KvlibError where no node has what a unit asks for.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    with_gpu = [node for node in nodes if node.get("GPU", 0)] if device != "cpu" else []
    if device == "cuda" and not with_gpu:
        raise KvlibError(
            f"the run's device is cuda, and none of Ray's {len(nodes)} nodes has a GPU: start a node with one, or set device to cpu"
        )
    nodes, gpus = with_gpu or nodes, settings.gpus_per_unit if with_gpu else 0.0
    threads = settings.threads_per_unit or min(_threads(node.get("CPU", 0)) for node in nodes)
    fits = sum(
        min(int(node.get("CPU", 0) // threads), int(node["GPU"] // gpus) if gpus else sys.maxsize)
        for node in nodes
    )
    if not fits:
        raise KvlibError(
            f"a unit asks for {threads} processor threads{f' and {gpus:g} GPU' if gpus else ''}, and no node of Ray's "
            f"{len(nodes)} has as many: give a smaller --threads-per-unit or --gpus-per-unit, or start a larger node"
        )
    return Room(threads, gpus, min(fits, settings.workers or fits))


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
