"""The study's own figures beside a run's: one table, and sentences that say where the run falls short."""

import math
from pathlib import Path

import pandas as pd

from kvlib.report.summaries import headline, median_times, prefix_lengths, read_shipped
from kvlib.report.wording import join

PUBLISHED = Path(__file__).resolve().parents[2] / "data" / "published.yaml"
DOWN, UP, NEITHER = "lower", "higher", ""


def read_published(path: Path = PUBLISHED) -> dict:
    return read_shipped(path, "the study's own figures")


def compare(published: dict, records: dict[str, dict]) -> pd.DataFrame:
    """One row per quantity: "what", "study", "this run", "better" (lower, higher or neither), "verdict".

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
                    DOWN,
                )
            )
    for path in ("learned", "direct", "ridge"):
        if path in found["paths"]:
            rows.append(
                (
                    f"top-1 agreement of {path} (share)",
                    quality[path]["top1"],
                    found["paths"][path]["top1"],
                    UP,
                )
            )
    ours, theirs = found["paired"]["learned-direct"], published["paired"]["learned-direct"]
    prompts = found["paths"]["native"]["prompts"]
    rows += [
        ("mean of learned − direct (nats)", theirs["mean"], ours["mean"], DOWN),
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
    ]
    table = pd.DataFrame(
        [(*row, _verdict(*row[1:])) for row in rows],
        columns=["what", "study", "this run", "better", "verdict"],
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
            DOWN,
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


def _verdict(study: float, ours: float | None, better: str) -> str:
    if ours is None:
        return "not measured"
    if better == NEITHER:
        return "same" if ours == study else "differs"
    if f"{ours:.4g}" == f"{study:.4g}":  # as they are shown: no digit that a reader sees differs
        return "same"
    return "better" if (ours < study) == (better == DOWN) else "worse"


def summary_sentence(table: pd.DataFrame) -> str:
    """Which quantities came out worse than the study's, named; the good ones are counted."""
    judged = table[table.better != NEITHER]
    worse = [name.split(" (")[0] for name in judged[judged.verdict == "worse"].what]
    better = int((judged.verdict == "better").sum())
    missing = [name.split(" (")[0] for name in judged[judged.verdict == "not measured"].what]
    text = f"Of the {len(judged)} quantities with a good and a bad direction, {better} came out better "
    text += "than in the study"
    text += f" and {len(worse)} worse: {join(worse, comma='; ')}." if worse else " and none came out worse."
    return text + (f" This run has no value for {join(missing, comma='; ')}." if missing else "")


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
