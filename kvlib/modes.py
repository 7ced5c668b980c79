"""The same map into the target by every other way than the one that a handoff chooses, as paths to be timed."""

from kvlib.compiled import why_not_compiled
from kvlib.latency import TargetPath
from kvlib.maps import CacheMap
from kvlib.ways import WAYS as WAYS

AFFINE_ONLY = ("absorbed", "background")
MARK = "@"
ITSELF = "that is how this path itself is handed over"


def mode_paths(
    name: str,
    cache_map: CacheMap,
    ways: list[str] | tuple[str, ...],
    no_compiler: str | None = None,
    chosen_compiled: bool = False,
) -> tuple[list[TargetPath], list[dict]]:
    """A path NAME@WAY for each of `ways` that the map can take, and what was left out.

    Args:
        ways: of `WAYS`: "materialised" writes a corrected second cache, as the study's figures imply; "compiled" is in
            place, by a compiled pass: its first run, which compiles, should be a warm-up.
        no_compiler: why nothing can be compiled here, see `kvlib.compiled.no_compiler`.
        chosen_compiled: whether the path NAME itself is handed over in place by the compiled pass: not timed a second time.

    Returns: (paths, left out: {"path", "mode", "reason"} each).
    """
    obstacles = dict.fromkeys(AFFINE_ONLY, cache_map.why_not_affine) | {
        "compiled": why_not_compiled(cache_map) or no_compiler or (ITSELF if chosen_compiled else None)
    }
    paths, left_out = [], []
    for way in ways:
        compiled = way == "compiled"
        if obstacles.get(way):
            left_out.append({"path": name, "mode": way, "reason": obstacles[way]})
        else:
            mode = "in_place" if compiled else way
            paths.append(TargetPath(f"{name}{MARK}{way}", "handoff", cache_map, mode, compiled))
    return paths, left_out


def split_name(path: str) -> tuple[str, str]:
    """("learned", "in_place") of "learned@in_place"; the second is empty for a path without a mark."""
    name, _, way = path.partition(MARK)
    return name, way
