"""The study's own figures beside a run's: one table, and sentences that say where the run falls short.

Two pairs on two texts and two machines share no scale: an absolute figure of one is never better than the other's. Judged are
the order of the paths and ratios that are paired within one run. A ratio of times may come out worse, never better: what a
slower machine adds to it is no merit.
"""

import math
from pathlib import Path

import pandas as pd

from kvlib.report.agreement import RawTables, paired_top1, side
from kvlib.report.summaries import headline, main_forcing, median_times, prefix_lengths, read_shipped
from kvlib.report.wording import join

PUBLISHED = Path(__file__).resolve().parents[2] / "data" / "published.yaml"
DOWN, UP, NEITHER = "lower", "higher", ""
TIMES = "first token: "  # how the names of ratios of times begin
BETTER, WORSE, SAME, OPEN = "better", "worse", "same", "not distinguishable from zero"
MACHINE, LISTED, MISSING = "another machine", "", "not measured"


def read_published(path: Path = PUBLISHED) -> dict:
    return read_shipped(path, "the study's own figures")


def compare(published: dict, records: dict[str, dict], raw: RawTables) -> pd.DataFrame:
    """One row per quantity: "what", "study", "this run", "good" (lower, higher or neither), "verdict".

    Args:
        records: the stages' summaries by stage.
    """
    screening, confirmation = records["screening"], records["confirmation"]
    final, latency = records["frozen_evaluation"], records["latency"]
    found = headline(final)
    quality, rows = published["quality"], []
    for path in ("learned", "direct", "ridge"):
        if path in found["paths"]:
            rows.append(
                (
                    f"KL32 of {path} (nats per token)",
                    quality[path]["kl32"],
                    found["paths"][path]["kl32"]["mean"],
                    NEITHER,
                )
            )
    for path in ("learned", "direct", "ridge"):
        if path in found["paths"]:
            rows.append(
                (
                    f"top-1 agreement of {path} (share)",
                    quality[path]["top1"],
                    found["paths"][path]["top1"],
                    NEITHER,
                )
            )
    ours, theirs = found["paired"]["learned-direct"], published["paired"]["learned-direct"]
    prompts = found["paths"]["native"]["prompts"]
    rows += [
        ("mean of learned − direct (nats)", theirs["mean"], ours["mean"], NEITHER),
        ("standard error of learned − direct (nats)", theirs["se"], ours["se"], NEITHER),
        (
            "95 % interval of learned − direct: from (nats)",
            theirs["ci95"][0],
            (ours.get("ci95") or [None, None])[0],
            NEITHER,
        ),
        (
            "95 % interval of learned − direct: to (nats)",
            theirs["ci95"][1],
            (ours.get("ci95") or [None, None])[1],
            NEITHER,
        ),
        ("learned − direct relative to direct (share)", theirs["relative"], ours.get("relative"), DOWN),
        (
            "prompts on which learned is lower (share)",
            theirs["wins"] / theirs["prompts"],
            _share(ours["wins"], ours["prompts"]),
            UP,
        ),
    ]
    top1 = paired_top1(raw.prompts, main_forcing(final))
    rows.append(
        (
            "top-1 agreement: learned − direct (share)",
            quality["learned"]["top1"] - quality["direct"]["top1"],
            top1["mean"],
            UP,
        )
    )
    ridge = found["paired"].get("ridge-direct")
    if ridge:
        losses = published["paired"]["ridge-direct"]
        lost = ridge.get("losses", None if ridge["wins"] is None else ridge["prompts"] - ridge["wins"])
        rows.append(
            (
                "prompts on which ridge is not lower (share)",
                losses["losses"] / losses["prompts"],
                _share(lost, ridge["prompts"]),
                NEITHER,
            )
        )
    rows += _latency_rows(published["latency"], latency)
    rows += _memory_rows(published, latency)
    residual, frozen, protocol = published["residual"], confirmation["frozen"], published["protocol"]
    arm = {a["id"]: a for a in screening["arms"]}[frozen["arm"]]
    rows += [
        ("frozen arm: residual", residual["form"], arm["residual"], NEITHER),
        ("frozen arm: features", residual["features"], arm["features"].replace("_", " "), NEITHER),
        ("frozen arm: rank", residual["rank"], arm["rank"], NEITHER),
        ("frozen arm: residual scale", residual["scale"], frozen["scale"], NEITHER),
        ("frozen arm: warm-up (steps)", residual["warmup_steps"], arm["warmup_steps"], NEITHER),
        ("frozen arm: learned parameters", residual["parameters"], frozen["parameters"], NEITHER),
        (
            "frozen arm: checkpoint (MiB; the study's would hold the optimiser's state too)",
            residual["checkpoint_mib"],
            frozen["checkpoint_bytes"] / 2**20,
            NEITHER,
        ),
        ("arms screened", protocol["screen_arms"], len(screening["arms"]), NEITHER),
        (
            "arms taken to checkpoints and scales",
            protocol["selected_for_scale"],
            len(screening["selected"]),
            NEITHER,
        ),
        ("arms confirmed", protocol["confirmed"], len(confirmation["arms"]), NEITHER),
        (
            "seeds per confirmed arm",
            protocol["seeds"],
            max(len(a["runs"]) for a in confirmation["arms"]),
            NEITHER,
        ),
        ("final prompts", protocol["final_prompts"], prompts, NEITHER),
        (
            "prefix lengths timed",
            protocol["prefix_lengths"],
            len(prefix_lengths(latency)),
            NEITHER,
        ),
        *_timing_rows(protocol, latency),
    ]
    open_ = {"top-1 agreement: learned − direct (share)"} if side(top1) == 0 else set()
    if side(ours) == 0:
        open_.add("learned − direct relative to direct (share)")
    table = pd.DataFrame(
        [(*row, OPEN if row[0] in open_ else _verdict(*row)) for row in rows],
        columns=["what", "study", "this run", "good", "verdict"],
    )
    return table.astype(object).pipe(lambda t: t.where(t.notna(), None))


def _latency_rows(published: dict, latency: dict) -> list[tuple]:
    """Ratios are judged, milliseconds only listed: an H100 and a laptop have no second in common."""
    longest = prefix_lengths(latency)[-1]
    studied = max(published["native"])
    rows = [("longest prefix timed: the next rows hold there (tokens)", studied, longest, NEITHER)]
    times = median_times(latency, longest)
    native = times["native", "resident"]
    theirs = {
        p: found[studied] for p, found in published.items() if isinstance(found, dict) and studied in found
    }
    return rows + [
        (
            "first token: native ÷ learned with the source cache resident (ratio)",
            theirs["native"] / theirs["learned"],
            _share(native, times.get(("learned", "resident"))),
            UP,
        ),
        (
            "first token: native ÷ learned cold (ratio)",
            theirs["native"] / theirs["learned_cold"],
            _share(native, times.get(("learned", "cold"))),
            UP,
        ),
        (
            "first token: learned ÷ direct with the source cache resident (ratio)",
            theirs["learned"] / theirs["direct"],
            _share(times.get(("learned", "resident")), times.get(("direct", "resident"))),
            DOWN,
        ),
        (
            "prefix from which learned is ahead of native, cache resident (tokens; ours is at most this where it is the shortest)",
            published["crossover_tokens"],
            _crossover(latency),
            NEITHER,
        ),
        ("first token: native (ms)", theirs["native"], native, NEITHER),
        (
            "first token: direct with the source cache resident (ms)",
            theirs["direct"],
            times.get(("direct", "resident")),
            NEITHER,
        ),
        (
            "first token: learned with the source cache resident (ms)",
            theirs["learned"],
            times.get(("learned", "resident")),
            NEITHER,
        ),
        ("first token: learned cold (ms)", theirs["learned_cold"], times.get(("learned", "cold")), NEITHER),
    ]


def _crossover(latency: dict) -> float:
    """Tokens: infinite where learned is never ahead; the shortest length, a bound, where it always is."""
    found = latency["crossover"].get("resident") or {}
    return prefix_lengths(latency)[0] if found.get("below") else found.get("learned") or math.inf


def _memory_rows(published: dict, latency: dict) -> list[tuple]:
    longest = prefix_lengths(latency)[-1]
    peaks = {
        r["path"]: r["peak_extra_bytes"]
        for r in latency["rows"]
        if r["prefix_tokens"] == longest and r["residency"] == "resident"
    }
    theirs = published["incremental_vram_gib_at_8192"]
    ours = _share(peaks.get("learned"), peaks.get("native"))
    return [
        ("peak extra memory: learned ÷ native (ratio)", theirs["learned"] / theirs["native"], ours, NEITHER)
    ]


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _timing_rows(protocol: dict, latency: dict) -> list[tuple]:
    """How often was timed at the longest length, where the ratios of times come from."""
    longest = prefix_lengths(latency)[-1]
    counts = {
        (r["path"], r["residency"]): r["repetitions"]
        for r in latency["rows"]
        if r["prefix_tokens"] == longest
    }
    rows = [
        ("warm-ups at the longest prefix", protocol["warmups"], latency["warmups"][str(longest)], NEITHER)
    ]
    for what, key in (
        ("resident", ("learned", "resident")),
        ("of native prefill", ("native", "resident")),
        ("cold", ("learned", "cold")),
    ):
        rows.append(
            (f"repetitions at the longest prefix, {what}", protocol["repetitions"], counts.get(key), NEITHER)
        )
    return rows


def _verdict(what: str, study, ours, better: str) -> str:
    if ours is None:
        return MISSING
    if better == NEITHER:
        return LISTED
    if f"{ours:.4g}" == f"{study:.4g}":  # as they are shown: no digit that a reader sees differs
        return SAME
    if (ours < study) == (better == DOWN):
        return MACHINE if what.startswith(TIMES) else BETTER
    return WORSE


def summary_sentence(table: pd.DataFrame) -> str:
    """Which ratios came out worse than the study's, first of all; then better ones, and what cannot be told."""
    judged = table[table.good != NEITHER]

    def named(verdict: str) -> list[str]:
        rows = judged[judged.verdict == verdict]
        return [
            f"{row[0].rsplit(' (', 1)[0]} ({_short(row[2])} against {_short(row[1])})"
            for row in rows.itertuples(index=False)
        ]

    text = "Of the ratios within one run, worse than in the study: " + (join(named(WORSE), comma="; ") + ".")
    if named(BETTER):
        text += f" Better: {join(named(BETTER), comma='; ')}."
    if named(OPEN):
        text += f" Not distinguishable from zero: {join(named(OPEN), comma='; ')}."
    if named(MACHINE):
        text += f" More favourable, but on another machine, which is no merit of the map: {join(named(MACHINE), comma='; ')}."
    missing = [name.rsplit(" (", 1)[0] for name in judged[judged.verdict == MISSING].what]
    return text + (f" This run has no value for {join(missing, comma='; ')}." if missing else "")


def _short(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")


def ordering_sentence(final: dict) -> str:
    """Whether the three handoffs stand in the study's order."""
    paths = headline(final)["paths"]
    order = sorted(
        (p for p in ("learned", "direct", "ridge") if p in paths), key=lambda p: paths[p]["kl32"]["mean"]
    )
    said = join(order)
    if order == ["learned", "direct", "ridge"]:
        return f"From the lowest KL32 to the highest the handoffs stand as in the study: {said}."
    found = f"From the lowest KL32 to the highest the handoffs stand as {said}"
    return f"{found}; the study has learned, direct and ridge."
