"""Where one step's time goes: a path to the first token under torch's profiler, shared out among its parts.

An operator's own time (without the operators that it calls) goes to the part whose module or function it runs in;
what is left of the wall clock is Python, the launching of operators and the profiler's own work. So the parts add up
to the wall time of the profiled runs, and nothing is rescaled. The profiler makes a run longer: compare the sum with
the same path's time without it. Scopes and hooks exist only while this function runs.
"""

import contextlib
import functools
import os

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from kvlib import attaching, latency
from kvlib.attention import Affine
from kvlib.cache import PrefixCache
from kvlib.clocks import clock
from kvlib.folding import Folding
from kvlib.kernels.correct import Correction
from kvlib.latency import TargetPath, first_token
from kvlib.maps import CacheMap
from kvlib.reading import Handoff

WEIGHTS, HEAD, ATTENTION = "weights' matrix products", "output head", "attention over the prefix"
MAP, BODY, ATTACHING = "the map", "norms, rotary, activations", "attaching and leaving"
ARGMAX, PYTHON = "argmax and copy to the host", "Python and launching"
PARTS = (WEIGHTS, HEAD, ATTENTION, MAP, BODY, ATTACHING, ARGMAX, PYTHON)
SCOPE = "kvlib: "  # before a part's name, so that no operator is taken for a scope
STEP = "kvlib, the whole step"
# Outside of the model, of the handoff and of every scope: the choice of the token.
CHOOSING = ("aten::argmax", "aten::item", "aten::_local_scalar_dense")
# Where each part of a handoff is computed. In these parts Python counts as well as operators: the profiler takes compiled
# code for Python.
FUNCTIONS = {
    MAP: [
        (Affine, "forward"),
        (Affine, "transpose"),
        (CacheMap, "materialise"),
        (Folding, "_fold"),
        (Correction, "__call__"),
    ],
    ATTENTION: [(attaching, "two_segment_attention")],
    ATTACHING: [(latency, "handoff"), (Handoff, "__enter__"), (Handoff, "__exit__")],
}
WHOLE = (WEIGHTS, HEAD, ATTACHING, ATTENTION, MAP)


@torch.no_grad()
def breakdown(
    target, path: TargetPath, prompt: torch.Tensor, prefix: PrefixCache | None, repetitions: int = 3
) -> list[dict]:
    """The parts of one step: of the repetition whose wall time is the median, the lower one of the middle two.

    Args:
        prompt: (1, T). prefix: the source's cache over T − 1, None for native; a path that consumes it gets copies.

    Returns: {"part", "ms"} for each of `PARTS`. On a CPU an operator counts with its time on the calling thread, which
        waits for the others; on CUDA with its kernels' time, and the rest of the wall clock is "Python and launching". Compiled
        attention applies an absorbed map in its own pass, and corrects a cache in place in it: that counts as attention.
    """
    found = []
    for repetition in range(repetitions + 1):
        own = prefix.clone() if path.consumes_prefix else prefix
        with _scopes(target, path):
            parts = _profiled(target, path, prompt, own)
        if repetition:  # the first one warms the profiler up
            found.append(parts)
    middle = sorted(found, key=lambda parts: sum(parts.values()))[(len(found) - 1) // 2]
    return [{"part": part, "ms": ms} for part, ms in middle.items()]


def _profiled(target, path, prompt, prefix) -> dict[str, float]:
    cuda = prompt.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with _quiet_profiler(), profile(activities=activities) as profiler, clock(prompt.device) as read:
        with record_function(STEP):
            first_token(target, path, prompt, prefix)
        wall_ms = read()
    parts = dict.fromkeys(PARTS, 0.0)
    for event in profiler.events():
        part = _part(event)
        if part is not None:
            parts[part] += (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3
    return parts | {PYTHON: wall_ms - sum(parts.values())}


@contextlib.contextmanager
def _quiet_profiler():
    """Without the two lines that the profiler's own library writes to the terminal for each profile."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ[name] = before or "99"  # above every level that it has
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _part(event) -> str | None:
    """The part that an event's own time belongs to; None where it belongs to what is left of the wall clock."""
    if event.device_type != DeviceType.CPU:
        return None  # kernels count with the operators that launched them
    if event.name == STEP:
        return None
    if event.name.startswith(SCOPE):
        part = event.name.removeprefix(SCOPE)
        return part if part in WHOLE else None
    around = event.cpu_parent
    while around is not None:
        if around.name == STEP:
            return ARGMAX if event.name in CHOOSING else ATTACHING
        if around.name.startswith(SCOPE):
            return around.name.removeprefix(SCOPE)
        around = around.cpu_parent
    return None  # before or after the step


@contextlib.contextmanager
def _scopes(target, path: TargetPath):
    """Names for the profiler around the modules and functions that make up each part, taken away on leaving."""
    head, body = target.get_output_embeddings(), target.base_model
    modules = [(head, HEAD), (body, BODY)]
    modules += [(m, WEIGHTS) for m in body.modules() if isinstance(m, torch.nn.Linear)]
    if path.way != "handoff":  # transformers' own attention has no function of its own to name
        modules += [(m, ATTENTION) for m in body.modules() if hasattr(m, "k_proj")]
    with contextlib.ExitStack() as stack:
        for module, part in modules:
            stack.enter_context(_around_module(module, part))
        for part, places in FUNCTIONS.items():
            for owner, name in places:
                function = getattr(owner, name)
                stack.callback(setattr, owner, name, function)
                setattr(owner, name, _named(function, part))
        yield


@contextlib.contextmanager
def _around_module(module, part: str):
    open_scopes = []

    def enter(*_):
        open_scopes.append(record_function(SCOPE + part))
        open_scopes[-1].__enter__()

    def leave(*_):
        open_scopes.pop().__exit__(None, None, None)

    hooks = module.register_forward_pre_hook(enter), module.register_forward_hook(leave)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _named(function, part: str):
    @functools.wraps(function)
    def named(*arguments, **options):
        with record_function(SCOPE + part):
            return function(*arguments, **options)

    return named
