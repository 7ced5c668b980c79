"""What gpu.py measures, one function per part: times, memory, correctness, ratios.

Each takes the two models, the maps by kind and a length; none knows of the others or of the time that is left.
"""

import contextlib
from dataclasses import dataclass

import torch
from common import Timing, interleave, timing_row
from paths import DIRECT, STOCK, Entry, clocked, clocked_cold, entry, kind_of, standard_entries
from shapes import random_prefix

from kvlib.cache import Geometry, PrefixCache, forward, prefill
from kvlib.clocks import percentiles
from kvlib.compiled import why_not_compiled
from kvlib.handoff import handoff
from kvlib.maps import CacheMap
from kvlib.memory import PeakMemory

IN_PLACE_KINDS = ("linear", "quadratic", "rms", "rope_stripped")
AGAINST = ("absorbed", "in_place", "background")  # the materialised cache
FORCED_TOKENS = 16  # after the prefix: the held-back one and what is read on from there


@dataclass
class Models:
    """target and source on one device in one dtype, and one map of each kind."""

    target: object
    source: object
    maps: dict[str, CacheMap]

    @property
    def weight(self) -> torch.Tensor:
        return next(self.target.parameters())

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def tokens(self, length: int, seed: int = 0) -> torch.Tensor:
        """Random ids (1, length)."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(self.target.config.vocab_size, (1, length), generator=generator)
        return ids.to(self.device)

    def random_prefix(self, tokens: int) -> PrefixCache:
        weight = self.weight
        return random_prefix(
            Geometry.of(self.target), tokens, device=weight.device, dtype=weight.dtype, seed=tokens
        )


def resident_entries(models: Models) -> list[Entry]:
    """Every path and every mode that kvlib offers without compiling, and the naive way."""
    maps = models.maps
    entries = standard_entries(maps["ridge"], maps["linear"], models.device)
    entries += [entry("learned", maps[kind], "in_place") for kind in IN_PLACE_KINDS]
    return entries + [
        entry("learned", maps["linear"], mode) for mode in ("background", "materialised", "naive")
    ]


def compiled_entries(maps: dict[str, CacheMap]) -> list[Entry]:
    """Learned in place, compiled, for each kind of map that can be; beside direct and one that is not compiled."""
    able = [maps[kind] for kind in IN_PLACE_KINDS if why_not_compiled(maps[kind]) is None]
    return [
        DIRECT, entry("learned", maps["linear"], "in_place"),
        *(entry("learned", cache_map, "in_place", compiled=True) for cache_map in able),
    ]  # fmt: skip


def time_resident(models: Models, entries: list[Entry], tokens: int, **counts) -> dict[str, Timing]:
    """By entry's name; counts: as for `interleave`, the device left out."""
    prompt, prefix = models.tokens(tokens), models.random_prefix(tokens - 1)
    calls = [clocked(one, models.target, prompt, prefix) for one in entries]
    return interleave(calls, device=models.device, **counts)


def time_cold(models: Models, entries: list[Entry], tokens: int, **counts) -> dict[str, Timing]:
    """From the source's prefill on, for the entries that read a source's cache."""
    prompt = models.tokens(tokens)
    calls = [clocked_cold(one, models.target, models.source, prompt) for one in entries]
    return interleave(calls, device=models.device, **counts)


def latency_row(one: Entry, tokens: int, residency: str, timing: Timing) -> dict:
    """The columns of latency/summary.json, and those that tell modes apart; the peak is filled in later."""
    times = timing_row(timing)
    return {
        "prefix_tokens": tokens, "path": one.path, "residency": residency,
        "p50_ms": times["p50_ms"], "p95_ms": times["p95_ms"],
        "handoff_p50_ms": percentiles(timing.part_ms)[0] if timing.part_ms else None,
        "repetitions": times["repetitions"], "peak_extra_bytes": None,
        "mode": one.label["mode"], "compiled": one.compiled, "kind": one.kind,
    }  # fmt: skip


def peak_memory(models: Models, entries: list[Entry], tokens: int) -> list[dict]:
    """The allocator's peak above target, source and resident cache; null on a CPU, whose allocator keeps no count."""
    prompt, prefix, rows = models.tokens(tokens), models.random_prefix(tokens - 1), []
    for one in entries:
        call = clocked(one, models.target, prompt, prefix)
        given = () if call.prepare is None else (call.prepare(),)
        counts = models.device.type == "cuda"
        with PeakMemory(models.device) if counts else contextlib.nullcontext() as peak, torch.no_grad():
            result = call.run(*given)  # kept until the look: what decoding would go on with counts
            if counts:
                peak.sample()
        del result, given
        extra = peak.extra_bytes if counts else None
        rows.append({"prefix_tokens": tokens, **one.label, "peak_extra_bytes": extra})
    return rows


@torch.no_grad()
def forced_logits(model, prefix: PrefixCache, ids: torch.Tensor, cache_map, mode: str) -> torch.Tensor:
    """Logits (S, V) in float32 on the host, of ids (1, S) read after the prefix; mode "stock": transformers' attention."""
    if mode == "stock":
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0) + prefix.tokens
        logits = model.get_output_embeddings()(forward(model, ids, prefix.to_dynamic(), positions))
    else:
        given = prefix.clone() if mode in ("in_place", "background") else prefix
        # the background's work is done between calls of the model: one token each
        steps = ids.split(1, 1) if mode == "background" else [ids]
        with handoff(model, given, cache_map, mode, check=False) as active:
            logits = torch.cat([active.logits(step) for step in steps], 1)
    return logits[0].float().cpu()


def correctness(models: Models, tokens: int, *, reference: bool) -> list[dict]:
    """Absorbed, in place and in the background against the materialised cache, at S forced positions after a real source prefix.

    Two yardsticks for the difference: `noise`, what two attention kernels that compute the same differ by (direct
    here and in transformers); and, where `reference`, how far each is from the same thing in float32.
    """
    ids = models.tokens(tokens - 1 + FORCED_TOKENS)
    prefix, ids = prefill(models.source, ids[:, : tokens - 1]), ids[:, tokens - 1 :]
    target, direct = models.target, DIRECT.cache_map
    plain = forced_logits(target, prefix, ids, direct, "absorbed")
    noise = float((plain - forced_logits(target, prefix, ids, direct, "stock")).abs().max())
    found, rows = {}, []
    for kind, cache_map in models.maps.items():
        modes = ["in_place"] if cache_map.why_not_affine else AGAINST
        for mode in [*modes, "materialised"]:
            found[kind, mode] = forced_logits(target, prefix, ids, cache_map, mode)
    exact = _float32(models, prefix, ids) if reference else {}
    for kind, cache_map in models.maps.items():
        for mode in AGAINST:
            if (kind, mode) not in found:
                continue
            logits, wanted = found[kind, mode], found[kind, "materialised"]
            scale = float(wanted.abs().max())
            difference = float((logits - wanted).abs().max())
            sure = exact.get((kind, "materialised"))
            rows.append(
                {
                    "prefix_tokens": tokens,
                    "path": "ridge" if kind == "ridge" else "learned",
                    "kind": kind_of(cache_map),
                    "mode": mode,
                    "positions": FORCED_TOKENS,
                    "logit_scale": scale,
                    "map_effect": float((wanted - plain).abs().max()),
                    "noise": noise,
                    "max_difference": difference,
                    "relative_difference": difference / scale,
                    "argmax_agreement": _agreement(logits, wanted),
                    "error": None if sure is None else float((logits - sure).abs().max()),
                    "materialised_error": None if sure is None else float((wanted - sure).abs().max()),
                    "argmax_float32": None if sure is None else _agreement(logits, sure),
                    "materialised_argmax_float32": None if sure is None else _agreement(wanted, sure),
                    "float32_difference": _gap(exact.get((kind, mode)), sure),
                }
            )
    if not all(torch.isfinite(logits).all() for logits in found.values()):
        raise ArithmeticError(f"logits at {tokens} tokens are not finite")  # argmax of NaN agrees with itself
    return rows


def _agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.argmax(-1) == b.argmax(-1)).float().mean())


def _gap(a: torch.Tensor | None, b: torch.Tensor | None) -> float | None:
    return None if a is None or b is None else float((a - b).abs().max())


def _float32(models: Models, prefix: PrefixCache, ids: torch.Tensor) -> dict:
    """Logits of every affine map, absorbed and materialised, and of the others materialised, all in float32."""
    found, exact = {}, prefix.to(torch.float32)
    with in_float32(models.target):
        for kind, cache_map in models.maps.items():
            for mode in ("materialised",) if cache_map.why_not_affine else ("absorbed", "materialised"):
                found[kind, mode] = forced_logits(models.target, exact, ids, cache_map, mode)
    return found


@contextlib.contextmanager
def in_float32(model):
    """The model's weights in float32 within, as they were after: half precision comes back exactly.

    Weights only, one at a time: the rotary frequencies are float32 already and must not come back as bfloat16.
    """
    before = {name: p.dtype for name, p in model.named_parameters()}
    try:
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(before[name])


def room_for_float32(model) -> bool:
    weight = next(model.parameters())
    if weight.device.type != "cuda":
        return True
    grows = sum(p.numel() * (4 - p.element_size()) for p in model.parameters())
    free, _ = torch.cuda.mem_get_info(weight.device)
    unused = torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(weight.device)
    return grows + 2**32 < free + unused


def ratios(rows: list[dict], floors: list[dict]) -> list[dict]:
    """The issue's figures by length; null where a part of one was left out."""
    found = {
        (r["prefix_tokens"], r["residency"], r["path"], r["mode"], r["compiled"], r["kind"]): r for r in rows
    }

    def value(tokens, path, mode, kind, column="p50_ms", residency="resident"):
        row = found.get((tokens, residency, path, mode, False, kind))
        return None if row is None else row[column]

    def over(a, b):
        return a / b if a is not None and b else None

    table = []
    for floor in floors:
        n = floor["prefix_tokens"]
        native, direct = value(n, "native", "prefill", None), value(n, "direct", "absorbed", "direct")
        learned = value(n, "learned", "absorbed", "linear")
        peaks = [
            value(n, *what, "peak_extra_bytes")
            for what in (("native", "prefill", None), ("direct", "absorbed", "direct"), ("learned", "absorbed", "linear"))
        ]  # fmt: skip
        table.append(
            {
                "prefix_tokens": n,
                "learned_over_direct": over(learned, direct),
                "learned_over_stock": over(learned, value(n, STOCK.path, "materialised", "direct")),
                "in_place_over_direct": over(value(n, "learned", "in_place", "linear"), direct),
                "naive_over_direct": over(value(n, "learned", "naive", "linear"), direct),
                "native_over_learned": over(native, learned),
                "direct_over_floor": over(direct, floor["floor_ms"]),
                "cold_handoff_over_resident": over(
                    value(n, "learned", "absorbed", "linear", "handoff_p50_ms", "cold"), learned
                ),
                "learned_over_direct_peak": over(peaks[2], peaks[1]),
                "learned_over_native_peak": over(peaks[2], peaks[0]),
            }
        )
    return table
