"""Tables of chapters 03 and 04 and of the front page: fidelity, time, memory."""

import pandas as pd

from kvlib.report import agreement, summaries, wording
from kvlib.report.palette import PATHS, path_label
from kvlib.report.speed import way_of


def paths(final: dict) -> pd.DataFrame:
    rows = []
    for forcing, found in final["forcing"].items():
        for path in (path for path in PATHS if path in found["paths"]):
            result = found["paths"][path]
            kl = result["kl32"]
            rows.append(
                {
                    "forcing": forcing,
                    "path": path_label(path),
                    "KL32 (nats)": kl["mean"],
                    "± se": kl["se"],
                    "± se, by article": kl.get("se_clustered"),
                    "median": kl.get("median"),
                    "10 % below": kl.get("q10"),
                    "90 % below": kl.get("q90"),
                    "top-1": result["top1"],
                    "prompts": result["prompts"],
                }
            )
    return pd.DataFrame(rows)


def paired(final: dict) -> pd.DataFrame:
    """The paired statistics as they were computed, one column per comparison and forcing."""
    rows = []
    for forcing, found in final["forcing"].items():
        for name, p in found["paired"].items():
            (low, high), (bca_low, bca_high) = (p.get(k) or (None, None) for k in ("ci95", "bca95"))
            rows.append(
                {
                    "forcing": forcing,
                    "comparison": name.replace("-", " − "),
                    "mean (nats)": p["mean"],
                    "± se": p["se"],
                    "95 % from": low,
                    "to": high,
                    "BCa from": bca_low,
                    "BCa to": bca_high,
                    "se, clustered by article": p.get("se_clustered"),
                    "lower on": p["wins"],
                    "of prompts": p["prompts"],
                    "worse on": p.get("losses"),
                    "Wilcoxon p": p.get("wilcoxon_p"),
                    "… after Holm": p.get("wilcoxon_p_holm"),
                    "sign test p": p.get("sign_p"),
                    "sign p after Holm": p.get("sign_p_holm"),
                }
            )
    return pd.DataFrame(rows)


def top1_text(found: dict) -> str:
    """A paired difference of shares in percentage points, with its interval."""
    if found["mean"] is None:
        return wording.UNKNOWN
    mean = f"{wording.signed(100 * found['mean'], 2)} points"
    ci = found.get("ci95")
    return f"{mean} ({wording.signed_interval([100 * end for end in ci], 2)})" if ci else mean


def top1(prompts: pd.DataFrame, forcings: list[str]) -> pd.DataFrame:
    """Top-1 agreement, path minus direct reuse, by prompt. prompts: `frozen_evaluation/prompts.parquet`."""
    rows = []
    for forcing in forcings:
        for path in (p for p in ("learned", "ridge") if p in set(prompts.path)):
            found = agreement.paired_top1(prompts, forcing, path)
            low, high = found.get("ci95") or (None, None)
            by_article = agreement.clustered_interval(found) or (None, None)
            rows.append(
                {
                    "forcing": forcing,
                    "comparison": f"{path} − direct",
                    "mean (share of steps)": found["mean"],
                    "± se": found["se"],
                    "± se, by article": found.get("se_clustered"),
                    "95 % from": low,
                    "to": high,
                    "by article from": by_article[0],
                    "by article to": by_article[1],
                    "higher on": found["wins"],
                    "lower on": found["losses"],
                    "equal on": found["ties"],
                    "Wilcoxon p": found["wilcoxon_p"],
                }
            )
    return pd.DataFrame(rows)


def first_tokens(raw: pd.DataFrame) -> pd.DataFrame:
    """On how many timed prompts a path's first token is native's, by length. raw: `latency/raw.parquet`."""
    found = agreement.first_tokens(raw)
    table = found.assign(said=[f"{a} of {n}" for a, n in zip(found.agree, found.prompts, strict=True)])
    wide = table.pivot(index="prefix_tokens", columns="path", values="said").reset_index()
    order = [path for path in PATHS if path in wide]
    names = {"prefix_tokens": "prefix (tokens)"} | {path: path_label(path) for path in order}
    return wide[["prefix_tokens", *order]].rename_axis(columns=None).rename(columns=names)


def prompts(table: pd.DataFrame, forcing: str) -> pd.DataFrame:
    wide = (
        table[table.forcing == forcing]
        .pivot(index=["prompt", "article"], columns="path", values="kl32")
        .reset_index()
    )
    kept = [path for path in ("direct", "ridge", "learned") if path in wide]
    wide = wide[["prompt", "article", *kept]].rename_axis(columns=None)
    if {"learned", "direct"} <= set(kept):
        wide["learned − direct"] = wide.learned - wide.direct
        wide = wide.sort_values("learned − direct")
    return wide.rename(columns={path: f"{path} KL32" for path in kept})


def steps(table: pd.DataFrame) -> pd.DataFrame:
    found = table[table.path != "native"].groupby(["forcing", "path", "step"], sort=False)
    means = found.agg(
        **{"KL (nats)": ("kl", "mean"), "± se": ("kl", "sem"), "top-1": ("agree", "mean")}
    ).reset_index()
    return means.assign(path=means.path.map(path_label))


def latency(summary: dict) -> pd.DataFrame:
    rows = [
        {
            "prefix (tokens)": r["prefix_tokens"],
            "source cache": r["residency"],
            "path": path_label(r["path"]),
            "p50 (ms)": r["p50_ms"],
            "p95 (ms)": r["p95_ms"],
            "after the source's prefill (ms, p50)": r["handoff_p50_ms"],
            "repetitions": r["repetitions"],
            "mode": way_of(r),
        }
        for r in summary["rows"]
    ]
    return pd.DataFrame(rows).astype(object).pipe(lambda t: t.where(t.notna(), None))


def memory(table: pd.DataFrame) -> pd.DataFrame:
    mib = (
        table.assign(mib=table.peak_extra_bytes / 2**20)
        .pivot(index="prefix_tokens", columns="path", values="mib")
        .reset_index()
    )
    order = [path for path in ("native", "direct", "direct_stock", "ridge", "learned") if path in mib]
    mib = mib[["prefix_tokens", *order]].rename_axis(columns=None)
    return mib.rename(
        columns={"prefix_tokens": "prefix (tokens)"} | {path: f"{path_label(path)} (MiB)" for path in order}
    )


def frontier(final: dict, latency: dict) -> pd.DataFrame:
    """The front page's chart in numbers: per prefix length and path, fidelity and both times."""
    paths = summaries.headline(final)["paths"]
    times = {length: summaries.median_times(latency, length) for length in summaries.prefix_lengths(latency)}
    rows = [
        {
            "prefix (tokens)": length,
            "path": path_label(path),
            "KL32 (nats)": paths[path]["kl32"]["mean"],
            "± se": paths[path]["kl32"]["se"],
            "top-1": paths[path]["top1"],
            "TTFT resident (ms)": medians.get((path, "resident")),
            "TTFT cold (ms)": medians.get((path, "cold")),
        }
        for length, medians in times.items()
        for path in PATHS
        if path in paths
    ]
    return pd.DataFrame(rows).astype(object).pipe(lambda t: t.where(t.notna(), None))


def headline(final: dict, latency: dict, prompts: pd.DataFrame) -> pd.DataFrame:
    """The four paths in one small table for the front page. prompts: `frozen_evaluation/prompts.parquet`."""
    found, longest = summaries.headline(final), summaries.prefix_lengths(latency)[-1]
    times = summaries.median_times(latency, longest)
    rows = []
    for path in (path for path in PATHS if path in found["paths"]):
        kl, paired_with = found["paths"][path]["kl32"], found["paired"].get(f"{path}-direct")
        reference = {"native": "the reference", "direct": "the baseline"}.get(path)
        against = reference or (
            f"{wording.signed(paired_with['mean'])} ({wording.signed_interval(paired_with.get('ci95'))})"
            if paired_with
            else None
        )
        lower = (
            f"{paired_with['wins']} of {paired_with['prompts']}" if paired_with and not reference else None
        )
        rows.append(
            {
                "path": path_label(path),
                "KL32 (nats)": kl["mean"],
                "against direct (95 % interval)": against,
                "… errors by article": wording.signed_interval(agreement.clustered_interval(paired_with))
                if paired_with and not reference
                else None,
                "lower on": lower,
                "top-1 agreement": wording.percent(found["paths"][path]["top1"], 1),
                "top-1 against direct (95 % interval)": None
                if reference
                else top1_text(agreement.paired_top1(prompts, summaries.main_forcing(final), path)),
                f"first token at {longest:,} tokens": wording.milliseconds(times.get((path, "resident"))),
                "… source included": wording.milliseconds(times.get((path, "cold"))),
            }
        )
    return pd.DataFrame(rows)
