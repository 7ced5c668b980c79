"""The same map into the target by every other way than the one that a handoff chooses, as paths to be timed."""

from dataclasses import replace

from kvlib.latency import TargetPath
from kvlib.maps import CacheMap

WAYS = ("materialised", "in_place", "absorbed", "background", "compiled")
AFFINE_ONLY = ("absorbed", "background")
MARK = "@"


def mode_paths(
    name: str, cache_map: CacheMap, ways: list[str] | tuple[str, ...]
) -> tuple[list[TargetPath], list[dict]]:
    """A path NAME@WAY for each of `ways` that the map can take, and what was left out.

    Args:
        ways: of `WAYS`: "materialised" writes a corrected second cache, as the study's figures imply; "compiled" is the
            handoff's own choice, compiled.

    Returns: (paths, left out: {"path", "mode", "reason"} each).
    """
    obstacle, paths, left_out = cache_map.why_not_affine, [], []
    for way in ways:
        if way in AFFINE_ONLY and obstacle:
            left_out.append({"path": name, "mode": way, "reason": obstacle})
            continue
        mode = "auto" if way == "compiled" else way
        path = TargetPath(f"{name}{MARK}{way}", "handoff", cache_map, mode)
        paths.append(replace(path, compiled=True) if way == "compiled" else path)
    return paths, left_out


def split_name(path: str) -> tuple[str, str]:
    """("learned", "in_place") of "learned@in_place"; the second is empty for a path without a mark."""
    name, _, way = path.partition(MARK)
    return name, way
