"""What a map costs by itself: bytes moved and time, written out naively, materialised, in place and absorbed.

    python benchmarks/map.py                 # the shape of SmolLM2-135M on a CPU, of Llama 3.1 8B on CUDA
    python benchmarks/map.py --tiny

The yardstick is a device-to-device copy of the same cache, timed in the same rounds. `bytes_moved` is what each
way must read and write at the least: the whole cache once each way for all but absorbed, which reads the map's
weights and one query and output per head and never sees the cache. Per kind of map: linear, ridge, quadratic,
RMS-normalised, RoPE-stripped; in place compiled as well with --compiled.
"""

import torch
from common import Clocked, interleave, machine, timing_row, write_table
from paths import NaiveMap
from shapes import Shape, chosen, random_maps, random_model, random_prefix, shape_options

from kvlib.attaching import compute_dtype
from kvlib.cache import PrefixCache
from kvlib.compiled import compiled_correction, why_not_compiled
from kvlib.geometry import rotary_of
from kvlib.maps import CacheMap


class AbsorbedMap:
    """What absorbing adds to one step: each layer's query through the key map, its output through the value map."""

    def __init__(self, cache_map: CacheMap, shape: Shape, device, dtype: torch.dtype):
        self.maps = [cache_map.affine(layer) for layer in range(shape.layers)]
        size = (1, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)  # (B, H, G, D)
        self.query = torch.randn(size, device=device, dtype=dtype)
        self.share = torch.ones(*size[:-1], 1, device=device, dtype=dtype)
        weights = sum(t.numel() * t.element_size() for t in cache_map.tensors().values())
        self.bytes_moved = weights + 4 * shape.layers * self.query.numel() * self.query.element_size()

    def __call__(self) -> None:
        for key_map, value_map in self.maps:
            key_map.transpose(self.query)
            if key_map.bias is not None:
                self.query @ key_map.bias.unsqueeze(-1)
            value_map.forward(self.query, self.share)


def copy_of(prefix: PrefixCache):
    """A function that copies the cache into memory that is there already."""
    pairs = [(torch.empty_like(t), t) for t in [*prefix.keys, *prefix.values]]

    def copy() -> None:
        for target, tensor in pairs:
            target.copy_(tensor)

    return copy


def calls_for(kind: str, cache_map: CacheMap, model, shape: Shape, prefix: PrefixCache, *, compiled: bool):
    """(label, bytes moved, `Clocked`) of each way to apply one map to a whole cache."""
    both_ways, dtype = 2 * prefix.bytes, compute_dtype(model)
    cache_map = cache_map.to(prefix.device, dtype)
    rotary = rotary_of(model) if cache_map.needs_rotary else None
    naive = NaiveMap(cache_map, model)

    def ways(label, moved, run, prepare=None, compile_seconds=None):
        by_compiler = compile_seconds is not None
        name = f"{kind} {label}{' compiled' if by_compiler else ''}"
        described = {"kind": kind, "way": label, "compiled": by_compiler, "bytes_moved": moved}
        described["compile_seconds"] = compile_seconds
        return described, Clocked(name, run, prepare)

    yield ways("naive", both_ways, lambda: naive.write_out(prefix))
    yield ways("materialised", both_ways, lambda: cache_map.materialise(prefix, rotary))
    yield ways("in_place", both_ways, lambda own: cache_map.apply_(own, rotary), prefix.clone)
    if compiled and why_not_compiled(cache_map) is None:
        correct_, seconds = compiled_correction(cache_map, prefix, cache_map.angles(rotary, prefix))

        def corrected(own: PrefixCache) -> None:
            for layer, (keys, values) in enumerate(zip(own.keys, own.values)):
                correct_(layer, keys, values)

        yield ways("in_place", both_ways, corrected, prefix.clone, compile_seconds=seconds)
    if cache_map.why_not_affine is None:
        absorbed = AbsorbedMap(cache_map, shape, prefix.device, dtype)
        yield ways("absorbed", absorbed.bytes_moved, absorbed)


def measure_maps(
    shape: Shape,
    tokens: int,
    *,
    device: str,
    dtype: torch.dtype,
    warmups: int,
    repetitions: int,
    compiled: bool,
    seed: int = 0,
) -> list[dict]:
    """One row per kind of map and way, and one for the copy; all in one interleaved run."""
    model = random_model(
        shape.with_layers(1), device=device, dtype=dtype
    )  # for its dtype and its rotary embedding
    prefix = random_prefix(shape.geometry, tokens, device=device, dtype=dtype, seed=seed)
    described = [
        (
            {
                "kind": None,
                "way": "copy",
                "compiled": False,
                "bytes_moved": 2 * prefix.bytes,
                "compile_seconds": None,
            },
            Clocked("copy", copy_of(prefix)),
        )
    ]
    for kind, cache_map in random_maps(shape.geometry, seed=seed).items():
        described += calls_for(kind, cache_map, model, shape, prefix, compiled=compiled)
    timings = interleave(
        [call for _, call in described], warmups=warmups, repetitions=repetitions, seed=seed, device=device
    )
    copy_ms = timing_row(timings["copy"])["p50_ms"]
    rows = []
    for label, call in described:
        times = timing_row(timings[call.name])
        rows.append(
            {
                "prefix_tokens": tokens + 1,
                **label,
                **times,
                "gb_s": label["bytes_moved"] / times["p50_ms"] / 1e6,
                "over_copy": times["p50_ms"] / copy_ms,
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> dict:
    parser = shape_options("map.py", __doc__)
    parser.add_argument("--prefix-tokens", type=int, help="8192, tiny: 64; the cache covers all but the last")
    parser.add_argument(
        "--compiled", action="store_true", help="in place compiled as well (a compiler is needed)"
    )
    given = parser.parse_args(arguments)
    shape, dtype = chosen(given)
    rows = measure_maps(
        shape, (given.prefix_tokens or (64 if given.tiny else 8192)) - 1, device=given.device,
        dtype=getattr(torch, dtype), warmups=given.warmups,
        repetitions=given.repetitions or (2 if given.tiny else 20), compiled=given.compiled,
    )  # fmt: skip
    here = machine(given.device, tiny=given.tiny)
    return write_table(given.out, "map", rows, machine=here, model=shape.name, dtype=dtype)


if __name__ == "__main__":
    main()
