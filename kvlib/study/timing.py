"""The latency stage's measuring part: every length timed and broken down, memory probed, each once and kept."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pandas as pd
import torch

from kvlib.breakdown import breakdown
from kvlib.compiled import why_not_by_itself
from kvlib.errors import KvlibError
from kvlib.latency import MadeCaches, Round, Sample, TargetPath, measure, schedule, standard_paths
from kvlib.maps import CacheMap
from kvlib.modes import mode_paths
from kvlib.study.latency_weights import (
    BREAKDOWN_REPETITIONS,
    BROKEN_DOWN,
    breakdown_units,
    caches_units,
    has_pipeline,
    length_units,
    pipeline_units,
    probe_units,
    units,
)
from kvlib.study.pipelining import PIPELINE_COLUMNS, time_pipeline
from kvlib.study.probing import measure_memory
from kvlib.study.profile import Latency
from kvlib.study.progress import Progress
from kvlib.study.records import read_table, write_table

MODES_OF = "learned"  # the path whose other ways are timed too
BREAKDOWN_COLUMNS = ("prefix_tokens", "path", "part", "ms")


@dataclass(frozen=True, eq=False)
class Measured:
    """Tables of all lengths, each field the name of a file in the stage's folder.

    raw: one row per repetition, the fields of `kvlib.latency.Sample`. memory: `MEMORY_COLUMNS`. breakdown:
    `BREAKDOWN_COLUMNS`. pipeline: `PIPELINE_COLUMNS`.
    """

    raw: pd.DataFrame
    memory: pd.DataFrame
    breakdown: pd.DataFrame
    pipeline: pd.DataFrame


def other_ways(
    config: Latency, maps: dict[str, CacheMap], no_compiler: str | None, chosen_compiled: bool = False
) -> tuple[list[TargetPath], list[dict]]:
    """(paths of the learned map's other ways that are timed, those left out and why); arguments as for `mode_paths`."""
    return mode_paths(MODES_OF, maps[MODES_OF], config.modes, no_compiler, chosen_compiled)


def learned_is_compiled(maps: dict[str, CacheMap], device: torch.device) -> bool:
    """Whether the learned path, which goes as a handoff chooses, is corrected in place by the compiled pass here."""
    learned = maps[MODES_OF]
    return learned.why_not_affine is not None and why_not_by_itself(learned, device) is None


def probed(paths: list[TargetPath]) -> list[TargetPath]:
    """Those whose memory is measured: not what is compiled by name, where on a GPU a probe would see the compiler at work."""
    return [path for path in paths if not path.compiled]


def native_repetitions(config: Latency) -> list[int]:
    """How often native prefill is timed at each length."""
    return config.native_repetitions or config.repetitions


def broken_down(config: Latency) -> list[int]:
    """The lengths whose step is broken down: the shortest and the longest."""
    return sorted({config.prefix_tokens[0], config.prefix_tokens[-1]}) if config.breakdown else []


def times_the_source(config: Latency) -> bool:
    """Whether a clock runs while the source reads: then it has to be in memory beside the target."""
    return any(config.cold_repetitions) or any(config.pipeline_repetitions)


def latency_units(
    config: Latency, maps: dict[str, CacheMap], modes: list[TargetPath], prefixes: int
) -> float:
    """What `measure_latency` will count on its `Progress` in all. modes: from `other_ways`. prefixes: how many there are."""
    paths = standard_paths(maps)
    total = sum(breakdown_units(tokens) for tokens in broken_down(config)) + caches_units(config, prefixes)
    for index, tokens in enumerate(config.prefix_tokens):
        total += length_units(_rounds(config, index, paths, modes, prefixes, seed=0), tokens)
        total += pipeline_units(config, index)
        if config.memory:
            total += sum(probe_units(path.name, tokens) for path in probed([*paths, *modes]))
    return total


def measure_latency(
    target,
    source,
    maps: dict[str, CacheMap],
    modes: list[TargetPath],
    prefixes: torch.Tensor,
    config: Latency,
    folder: Path,
    *,
    seed: int,
    key: str,
    progress: Progress,
    target_folder: str | Path,
    map_files: dict[str, Path],
) -> Measured:
    """Time all paths at every length and probe their memory; what an earlier call with this key did is kept.

    Args:
        source: a model, or `MadeCaches` of the prefixes where nothing `times_the_source`.
        maps: those of `ridge` and `learned`, by these names. modes: from `other_ways`. prefixes: real tokens (N, the longest or more).
        folder: where each length is kept as soon as it is measured, and each probe as soon as it is taken.
        key: stands for everything that the times depend on. progress: made for `latency_units`.
        target_folder, map_files: what the process that probes memory loads.
    """
    longest = max(config.prefix_tokens)
    if prefixes.ndim != 2 or len(prefixes) == 0 or prefixes.shape[1] < longest:
        raise KvlibError(
            f"prefixes {tuple(prefixes.shape)} given, expected (N, {longest} or more): give longer ones, or "
            "shorten latency.prefix_tokens"
        )
    paths = standard_paths(maps)
    named = {path.name: path for path in paths}
    raw, parts, pipelines = [], [], []
    files = [part_file(folder, key, f"{tokens:05d}") for tokens in config.prefix_tokens]
    caches = source if isinstance(source, MadeCaches) else None
    if caches is None and not all(file.exists() for file in files):
        # once for all lengths: the cache of a shorter prefix is the longer one's beginning
        caches = MadeCaches.of(source, prefixes[:, :longest])
        progress.advance(caches_units(config, len(prefixes)), "the source's caches")
    else:
        progress.skip(caches_units(config, len(prefixes)))
    for index, tokens in enumerate(config.prefix_tokens):
        file, parts_file = (part_file(folder, key, f"{name}{tokens:05d}") for name in ("", "breakdown-"))
        rounds = _rounds(config, index, paths, modes, len(prefixes), seed=f"{seed}/{tokens}")
        taken_apart = tokens in broken_down(config)
        if file.exists():
            progress.skip(length_units(rounds, tokens) + taken_apart * breakdown_units(tokens))
        else:

            def take_apart(prompt, prefix, tokens=tokens, place=parts_file):
                write_table(place, _break_down(target, named, prompt, prefix, tokens))
                progress.advance(breakdown_units(tokens), f"{tokens} tokens, where the time goes")

            samples = measure(
                target, source, rounds, prefixes[:, :tokens], _reporter(progress, tokens),
                take_apart if taken_apart else None, caches,
            )  # fmt: skip
            columns = [field.name for field in fields(Sample)]
            write_table(file, pd.DataFrame([asdict(sample) for sample in samples], columns=columns))
        raw.append(read_table(file))
        if taken_apart:
            parts.append(read_table(parts_file))
        if has_pipeline(config, index):
            pipelines.append(
                _pipeline(target, source, paths, prefixes, config, index, folder, key, seed, progress)
            )
    memory = measure_memory(
        target,
        probed([*paths, *modes]),
        config,
        part_file(folder, key, "memory"),
        progress,
        target_folder,
        map_files,
    )
    return Measured(
        pd.concat(raw, ignore_index=True),
        memory,
        together(parts, BREAKDOWN_COLUMNS),
        together(pipelines, PIPELINE_COLUMNS),
    )


def together(tables: list[pd.DataFrame], columns: tuple[str, ...]) -> pd.DataFrame:
    """The tables one after the other; none of them: an empty table with these columns."""
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def _break_down(target, named: dict[str, TargetPath], prompt, prefix, tokens: int) -> pd.DataFrame:
    rows = [
        {"prefix_tokens": tokens, "path": name, **part}
        for name in BROKEN_DOWN
        for part in breakdown(target, named[name], prompt, prefix, BREAKDOWN_REPETITIONS)
    ]
    return pd.DataFrame(rows, columns=BREAKDOWN_COLUMNS)


def _pipeline(target, source, paths, prefixes, config, index, folder, key, seed, progress) -> pd.DataFrame:
    tokens, repetitions = config.prefix_tokens[index], config.pipeline_repetitions[index]
    file = part_file(folder, key, f"pipeline-{tokens:05d}")
    if file.exists():
        progress.skip(pipeline_units(config, index))
    else:
        rows = time_pipeline(target, source, paths, prefixes[:, :tokens], repetitions, f"{seed}/{tokens}")
        write_table(file, pd.DataFrame(rows, columns=PIPELINE_COLUMNS))
        progress.advance(pipeline_units(config, index), f"{tokens} tokens, pipeline")
    return read_table(file)


def part_file(folder: Path, key: str, name: str) -> Path:
    """Where a length (five digits, its breakdown and pipeline before them), or all memory, is kept once it is measured."""
    return Path(folder) / "parts" / f"{name}-{key[:16]}.parquet"


def _rounds(
    config: Latency,
    index: int,
    paths: list[TargetPath],
    modes: list[TargetPath],
    prefixes: int,
    seed: int | str,
) -> list[Round]:
    counts = {name: getattr(config, name)[index] for name in ("warmups", "repetitions", "cold_repetitions")}
    counts["native_repetitions"] = native_repetitions(config)[index]
    if index == len(config.prefix_tokens) - 1:
        # one of them is the gate's: it has read a prompt of this length with the target, in this process
        counts["native_warmups"] = max(counts["warmups"] - 1, 0)
    return schedule(paths, prefixes, **counts, seed=seed, resident_only=modes)


def _reporter(progress: Progress, tokens: int) -> Callable[[str, str], None]:
    def report(name: str, residency: str) -> None:
        if name != "source":  # its caches were made before
            progress.advance(units(name, residency, tokens), f"{tokens} tokens, {name}")

    return report
