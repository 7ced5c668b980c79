"""In-place corrections as one compiled pass over the cache.

Step by step, torch writes the low-rank product of every position between two passes over the cache; compiled, a
position is read, corrected and written while it is in registers; on a processor within the attention that reads it, where
that reads for one token. On a processor that is a C source of the package's own,
through the system's C compiler (`kvlib.kernels`); on a GPU torch.compile, through Triton. A processor could have
torch.compile as well, but its code for this sums every rank of every position across a vector, and takes several times
what reading the cache does.
"""

import functools
import importlib.util
import time
from collections.abc import Callable

import torch

from kvlib.errors import KvlibError
from kvlib.kernels import attend, compiler
from kvlib.kernels.correct import c_correction
from kvlib.maps.residual import ResidualMap, angle_norm, half_turn

NO_COMPILER = "no compiler here: a C compiler with OpenMP for a processor, Triton for a GPU"
# torch compiles on so many positions: from a small sample it concludes that little parallelism will do.
SAMPLE_TOKENS = 4096


def made_of_c(device: torch.device) -> bool:
    """Whether C is what is compiled for this device; elsewhere torch.compile makes the code."""
    return device.type == "cpu"


def no_compiler(device: torch.device) -> str | None:
    """None when there is what it takes to make code for this device, else the reason in a few words."""
    found = compiler.why_not() is None if made_of_c(device) else importlib.util.find_spec("triton")
    return None if found else NO_COMPILER


def compiled_by(device: torch.device) -> str:
    """What compiles for this device, by name."""
    return f"the C compiler {compiler.command()[0]}" if made_of_c(device) else "torch.compile"


def why_not_compiled(cache_map) -> str | None:
    """None when the map's correction can be compiled, else the reason in a few words."""
    if not isinstance(cache_map, ResidualMap):
        return f"a {cache_map.kind} map is one dense product, which a compiler does not make faster"
    if not cache_map.in_one_pass:
        return "a ridge base, or a quadratic residual of RoPE-stripped features, takes more than one pass"
    return None


def why_not_by_itself(cache_map, device: torch.device) -> str | None:
    """None when a handoff that chooses for itself has the in-place correction compiled, else the reason in a few words."""
    if not made_of_c(device):
        return "compiling for a GPU takes most of a minute: ask for it with compiled=True"
    why_not = why_not_compiled(cache_map) or no_compiler(device)
    return why_not or _refusals().get(_kind(cache_map))


def add_residual(x, rows, squares, right, turned, turned_right, cos, sin, normalise: bool) -> None:
    """x (B, H, T, D) += the low-rank residual, written out rank by rank for the compiler; float32 inside.

    rows, squares, right: as from `ResidualMap.low_rank`. turned, turned_right: their half turns, cos, sin
    (B, 1, T, D): for RoPE-stripped keys, else None.
    """
    wide = x.to(rows.dtype)
    weight = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-12) if normalise else 1.0
    first = wide if cos is None else wide * cos
    second = None if cos is None else wide * sin
    delta = turned_delta = 0.0
    for i in range(rows.shape[1]):
        product = first * rows[:, i, None, :]
        if squares is not None:
            product = product + weight * wide * wide * squares[:, i, None, :]
        if second is not None:
            product = product + second * turned[:, i, None, :]
        z = product.sum(-1, keepdim=True)
        delta = delta + z * right[:, i, None, :]
        if second is not None:
            turned_delta = turned_delta + z * turned_right[:, i, None, :]
    if normalise:
        delta = delta * weight
    if cos is not None:
        delta = delta * cos + turned_delta * sin
    x.add_(delta)


@functools.cache
def _refusals() -> dict[tuple, str]:
    """What the process's C compilers refused: only who asks for it by name has it tried again, on no clock of others."""
    return {}


def _kind(cache_map: ResidualMap) -> tuple:
    weight = cache_map.key_left
    made_from = (cache_map.residual, cache_map.features, cache_map.rank, cache_map.geometry.head_dim)
    return (*compiler.command(), *made_from, weight.dtype)


@functools.cache
def _compiled() -> Callable:
    return torch.compile(add_residual)


@functools.cache
def _ready() -> set:
    """What the process has compiled for already: a sample is run once, and not on the clock of every handoff."""
    return set()


def compiled_correction(
    cache_map: ResidualMap, prefix, angles, keys_only: bool = False, queries: int | None = None
) -> tuple[Callable, float]:
    """`CacheMap.correct_` of this map, compiled for any number of positions, and the seconds that compiling took.

    keys_only: on a processor, leave the values as they are. queries: of the target for each KV head, where the attention of
    one token is to be there as well that corrects what it reads.

    torch.compile does so once per process, kind of map, batch and dtype; C is compiled once per kind of map, rank,
    head_dim and dtype, and kept in the user's cache folder. Later calls find it done.

    Raises: KvlibError where there is no compiler.
    """
    started = time.perf_counter()
    try:
        if made_of_c(prefix.device):
            correct_ = c_correction(cache_map, prefix, angles, keys_only=keys_only)
            if queries is not None:
                attend.prepare(queries, correct_)
        else:
            correct_ = torch_correction(cache_map, prefix, angles)
    except KvlibError as error:
        reason = str(error).partition(", expected")[0]
        if made_of_c(prefix.device):
            _refusals()[_kind(cache_map)] = reason
        raise KvlibError(
            f"compiled=True given, expected a C compiler with OpenMP, or Triton on a GPU ({reason}): install it, or leave "
            "compiled out"
        ) from error
    return correct_, time.perf_counter() - started


def torch_correction(cache_map: ResidualMap, prefix, angles) -> Callable:
    """`CacheMap.correct_` of this map through torch.compile, ready for any number of positions."""
    turns = (None, None) if angles[0] is None else tuple(t.unsqueeze(1) for t in angles)

    def correct_(layer, keys, values, _angles=None, run=None):
        for x, is_value in ((keys, False), (values, True)):
            # contiguous: a strided row cannot be loaded as a vector
            rows, squares, right = (
                None if w is None else w.contiguous() for w in cache_map.low_rank(layer, is_value)
            )
            turned, turned_right, cos, sin = None, None, None, None
            if turns[0] is not None and not is_value:
                right = right / angle_norm(angles)
                turned, turned_right = half_turn(rows), half_turn(right)
                cos, sin = (t[:, :, : x.shape[2]] for t in turns)
            arguments = (x, rows, squares, right, turned, turned_right, cos, sin)
            (run or _compiled())(*arguments, cache_map.features == "rms")

    like = prefix.keys[0]
    kind = (cache_map.residual, cache_map.features, cache_map.rank, cache_map.key_left.dtype)
    kind = (*kind, like.dtype, like.device, like.shape[0], like.shape[1], like.shape[3])

    def any_length(*arguments):
        for tensor in arguments[0], *arguments[6:8]:
            if tensor is not None and tensor.shape[2] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 2)
        _compiled()(*arguments)

    try:
        if (_compiled(), kind) not in _ready():
            size = (like.shape[0], like.shape[1], min(SAMPLE_TOKENS, like.shape[2]), like.shape[3])
            correct_(0, like.new_zeros(size), like.new_zeros(size), run=any_length)
            _ready().add((_compiled(), kind))
    except Exception as error:  # whatever is missing, torch raises as something of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise KvlibError(f"torch.compile refuses, {reason}") from error
    return correct_
