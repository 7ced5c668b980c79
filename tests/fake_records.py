"""A complete, plausible run folder made of seeded random numbers: every stage's records, no model."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from kvlib.study.arms import all_arms, slices
from kvlib.study.profile import Profile, load_profile
from kvlib.study.records import append_line, hash_json, write_json, write_table
from kvlib.study.statistics import describe, paired

STEPS, PROMPTS, LAYERS = 32, 64, 30
PATHS = ("native", "direct", "ridge", "learned")
LEVEL = {"native": 0.0, "direct": 0.20, "ridge": 0.31, "learned": 0.165}
WORDS = [
    "the",
    "of",
    "river",
    "treaty",
    "was",
    "born",
    "in",
    "<small>",
    "a",
    "&",
    "during",
    "century",
    "band",
    "album",
    "where",
    "its",
    "first",
]


def write_fake_run(folder: Path, name: str = "laptop") -> Path:
    """Write all five stages under `folder` and return it. `name` is the profile's."""
    folder, rng = Path(folder), np.random.default_rng(7)
    profile = load_profile(name)
    head = {
        "profile": name,
        "label": profile.label,
        "run": folder.name,
        "key": hash_json(name),
        "created": "2026-01-02T03:04:05+00:00",
        "duration_s": 321.5,
    }
    _pair(folder / "pair", head, rng)
    chosen = _screening(folder / "screening", head, rng, profile)
    manifest = _confirmation(folder / "confirmation", head, rng, profile, chosen)
    _frozen_evaluation(folder / "frozen_evaluation", head, rng, manifest)
    _latency(folder / "latency", head, rng, profile)
    return folder


def _pair(folder: Path, head: dict, rng) -> None:
    model = {
        "layers": LAYERS,
        "query_heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "vocabulary": 49152,
        "max_positions": 8192,
        "parameters": 134515008,
        "body_parameters": 106203456,
        "dtype": "float32",
    }
    names = (
        "build",
        "screen_train",
        "screen_validate",
        "confirm_train",
        "confirm_validate",
        "final",
        "latency",
    )
    articles, items = (20, 14, 9, 14, 8, 22, 3), (24, 64, 27, 64, 24, 64, 3)
    kinds = ("windows", "windows", "prompts", "windows", "prompts", "prompts", "prefixes")
    partitions = {
        n: {
            "articles": a,
            "items": i,
            "tokens_each": 288 if k == "prompts" else 1024,
            "hash": hash_json(n),
            "kind": k,
        }
        for n, a, i, k in zip(names, articles, items, kinds, strict=True)
    }
    packages = {"torch": "2.13.0", "transformers": "5.24.0", "numpy": "2.4.6", "plotly": "7.1.0"}
    write_json(
        folder / "summary.json",
        head
        | {
            "target": model | {"name": "SmolLM2-135M-Instruct", "fingerprint": hash_json("target")},
            "source": model
            | {
                "name": "pruned 504 × 1152",
                "fingerprint": hash_json("source"),
                "hidden_size": 504,
                "intermediate_size": 1152,
                "body_parameters": 75404000,
            },
            "pruning": {
                "energy_kept": 0.93,
                "body_parameters_kept": 0.71,
                "head_error": 0.11,
                "calibration_tokens": 24576,
                "seconds": 212.0,
                "peak_bytes": 3_100_000_000,
            },
            "held_out_nll": {"target": 2.60, "source": 3.74, "tokens": 7776},
            "gate": {
                "max_abs_difference": {"materialised": 0.0, "in_place": 2e-6, "absorbed": 8e-4},
                "tolerance": 5e-3,
                "logit_scale": 19.5,
                "passed": True,
                "prefix_tokens": 256,
            },
            "partitions": partitions,
            "corpus": {
                "name": "English Wikipedia sample",
                "source": "gensim 4.4.0 test data",
                "licence": "CC BY-SA",
                "articles": 92,
                "characters": 3_400_000,
            },
            "environment": {
                "python": "3.11.2",
                "torch": "2.13.0",
                "transformers": "5.24.0",
                "platform": "Linux",
                "processor": "a processor",
                "cores": 2,
                "memory_gb": 23.5,
                "commit": "0123abc",
                "packages": packages,
            },
            "training_dtype": "bfloat16",
            "seed": 2026,
        },
    )
    layers = np.arange(LAYERS)
    error = 0.08 + 0.25 * layers / LAYERS + rng.normal(0, 0.01, LAYERS)
    kept = 0.9 - 0.1 * np.sin(layers / 5)
    write_table(
        folder / "layers.parquet",
        pd.DataFrame({"layer": layers, "residual_error": error, "mlp_energy_kept": kept}),
    )
    write_json(folder / "partitions.json", {"seed": 2026, "partitions": {}})


def _screening(folder: Path, head: dict, rng, profile: Profile) -> list[dict]:
    screening, arms, curves, validation = profile.screening, [], [], []
    for arm in all_arms(screening):
        kl = 0.17 + 0.1 * (arm.base == "ridge") + abs(np.log2(arm.rank / 8)) * 0.004
        kl += 0.006 * (arm.residual == "quadratic") + 0.004 * (arm.warmup_steps == 0) + rng.normal(0, 0.004)
        broken = arm.base == "ridge" and arm.learning_rate == max(screening.learning_rates)
        arms.append(
            arm.record()
            | {
                "parameters": LAYERS * 3 * 2 * 128 * arm.rank,
                "status": "not_finite" if broken else "finished",
                "reason": "the loss was not finite at step 31" if broken else None,
                "kl32": None if broken else kl,
                "se": None if broken else 0.02,
                "top1": None if broken else 0.82,
                "median_kl32": None if broken else kl * 0.8,
                "train_loss_last": None if broken else kl * 0.9,
                "seconds": 60.0,
            }
        )
        for step in range(1, (31 if broken else profile.training.steps) + 1):
            warm = step <= arm.warmup_steps
            loss = 1 / (1 + step) if warm else kl * (0.75 + 0.5 * np.exp(-step / 40)) + rng.normal(0, 0.02)
            curves.append({"arm": arm.id, "step": step, "phase": "warmup" if warm else "kl", "loss": loss})
        if not broken:
            for prompt in range(27):
                validation.append(
                    {"arm": arm.id, "prompt": prompt, "kl32": kl * rng.gamma(4, 0.25), "top1": 0.8}
                )
    finished = sorted((a for a in arms if a["kl32"] is not None), key=lambda a: a["kl32"])
    for order, arm in enumerate(finished, 1):
        arm["order"] = order
    selected = [a["id"] for a in finished[: screening.select]]
    grid = [
        {
            "arm": a,
            "checkpoint_step": c,
            "scale": s,
            "se": 0.02,
            "top1": 0.82,
            "kl32": 0.165 + 0.03 * (s - 0.75) ** 2 + 0.01 * (1 - c / 150) + rng.normal(0, 0.001),
        }
        for a in selected
        for c in screening.checkpoints
        for s in screening.scales
    ]
    chosen = sorted(
        (min((g for g in grid if g["arm"] == a), key=lambda g: g["kl32"]) for a in selected),
        key=lambda g: g["kl32"],
    )
    ids = {
        axis: {base: [a.id for a in found] for base, found in bases.items()}
        for axis, bases in slices(screening).items()
    }
    write_json(
        folder / "summary.json",
        head
        | {
            "arms": arms,
            "direct": {"kl32": 0.195, "se": 0.02, "top1": 0.806},
            "ridge": {"kl32": 0.283, "se": 0.03, "top1": 0.777},
            "prompts": 27,
            "steps": profile.training.steps,
            "prompts_per_step": 4,
            "slices": ids,
            "selected": selected,
            "grid": grid,
            "chosen": [
                {k: g[k] for k in ("arm", "checkpoint_step", "scale", "kl32", "top1")} for g in chosen
            ],
            "finalists": [g["arm"] for g in chosen[:2]],
        },
    )
    write_table(folder / "curves.parquet", pd.DataFrame(curves))
    write_table(folder / "validation.parquet", pd.DataFrame(validation))
    return chosen[:2]


def _confirmation(folder: Path, head: dict, rng, profile: Profile, chosen: list[dict]) -> str:
    arms = []
    for best in chosen:
        runs = [
            {
                "seed": s,
                "kl32": best["kl32"] + rng.normal(0, 0.002),
                "se": 0.02,
                "top1": 0.82,
                "status": "finished",
            }
            for s in profile.confirmation.seeds
        ]
        ordered = sorted(runs, key=lambda r: r["kl32"])
        arms.append(
            {
                "id": best["arm"],
                "checkpoint_step": best["checkpoint_step"],
                "scale": best["scale"],
                "parameters": 184320,
                "mean_kl32": float(np.mean([r["kl32"] for r in runs])),
                "median_seed": ordered[1]["seed"],
                "runs": runs,
            }
        )
    winner = min(arms, key=lambda a: a["mean_kl32"])
    frozen = {
        "arm": winner["id"],
        "seed": winner["median_seed"],
        "checkpoint_step": winner["checkpoint_step"],
        "scale": winner["scale"],
        "parameters": 184320,
        "checkpoint_bytes": 737280,
        "weights_sha256": hash_json("weights"),
        "why": "It has the lower mean KL32 over its seeds.",
    }
    manifest = {"frozen": frozen}
    write_json(folder / "manifest.json", manifest)
    write_json(
        folder / "summary.json",
        head
        | {
            "arms": arms,
            "direct": {"kl32": 0.196, "se": 0.02, "top1": 0.81},
            "ridge": {"kl32": 0.29, "se": 0.03, "top1": 0.77},
            "prompts": 24,
            "frozen": frozen,
            "manifest_hash": hash_json(manifest),
        },
    )
    return hash_json(manifest)


def _frozen_evaluation(folder: Path, head: dict, rng, manifest: str) -> None:
    prompts, steps, forcing = [], [], {}
    hardness, article = rng.gamma(2, 0.5, PROMPTS), [f"Article {p // 3}" for p in range(PROMPTS)]
    for name in ("oracle", "text"):
        per_path = {}
        for path in PATHS:
            noise = rng.normal(1, 0.08, PROMPTS) if path != "native" else np.ones(PROMPTS)
            shape = rng.gamma(2, 0.5, (PROMPTS, STEPS)) * (1 + 0.3 * np.exp(-np.arange(STEPS) / 4))
            kl = LEVEL[path] * (hardness * noise)[:, None] * shape / shape.mean(1, keepdims=True)
            agree = rng.random((PROMPTS, STEPS)) < (1.0 if path == "native" else 0.82)
            per_path[path] = (kl.mean(1), agree.mean(1))
            for p in range(PROMPTS):
                text = f"{article[p]} " + " ".join(rng.choice(WORDS, 60))
                prompts.append(
                    {
                        "forcing": name,
                        "path": path,
                        "prompt": p,
                        "article": article[p],
                        "text": text,
                        "kl32": kl[p].mean(),
                        "top1": agree[p].mean(),
                    }
                )
                for s in range(STEPS):
                    steps.append(
                        {
                            "forcing": name,
                            "path": path,
                            "prompt": p,
                            "step": s + 1,
                            "kl": kl[p, s],
                            "agree": bool(agree[p, s]),
                            "forced_token": str(rng.choice(WORDS)),
                            "native_probability": 0.5,
                            "path_probability": 0.4,
                        }
                    )
        paths = {
            path: {
                "kl32": {k: v for k, v in describe(kl).items() if k != "n"},
                "top1": float(top1.mean()),
                "prompts": PROMPTS,
            }
            for path, (kl, top1) in per_path.items()
        }
        direct = per_path["direct"][0]
        forcing[name] = {
            "paths": paths,
            "paired": {
                f"{path}-direct": paired(per_path[path][0] - direct, article, seed=1, baseline=direct)
                for path in ("learned", "ridge")
            },
        }
    summary = head | {
        "forcing": forcing,
        "controls": {"zero_cache": {"kl32": 5.1}, "other_prompt": {"kl32": 1.5}},
        "frozen": manifest,
        "articles": 22,
        "opened": 1,
        "commit": "0123abc",
    }
    write_json(folder / "summary.json", json.loads(json.dumps(summary)))
    write_table(folder / "prompts.parquet", pd.DataFrame(prompts))
    write_table(folder / "steps.parquet", pd.DataFrame(steps))
    append_line(
        folder / "ledger.jsonl",
        {"opened": "2026-01-02T03:04:05+00:00", "manifest": manifest, "commit": "0123abc"},
    )


def _latency(folder: Path, head: dict, rng, profile: Profile) -> None:
    rows, raw, memory = [], [], []
    modes = {
        "native": "prefill",
        "direct": "absorbed",
        "direct_stock": "background",
        "ridge": "absorbed",
        "learned": "absorbed",
    }
    for tokens, repetitions in zip(profile.latency.prefix_tokens, profile.latency.repetitions, strict=True):
        prefill = 12 + 0.55 * tokens + 2e-5 * tokens**2
        for path, mode in modes.items():
            hand = {
                "native": prefill,
                "direct": 48 + 0.02 * tokens,
                "direct_stock": 49 + 0.021 * tokens,
                "ridge": 52 + 0.02 * tokens,
                "learned": 51 + 0.02 * tokens,
            }[path]
            extra = (
                40_000 * tokens * (2.2 if path == "native" else 1.0 if path.startswith("direct") else 1.1)
                + 2e7
            )
            memory.append({"prefix_tokens": tokens, "path": path, "peak_extra_bytes": int(extra)})
            for residency in ("resident", "cold"):
                centre = hand + (0.72 * prefill if residency == "cold" and path != "native" else 0)
                times = centre * rng.normal(1.02, 0.02, repetitions)
                rows.append(
                    {
                        "prefix_tokens": tokens,
                        "path": path,
                        "residency": residency,
                        "p50_ms": float(np.median(times)),
                        "p95_ms": float(np.quantile(times, 0.95)) if repetitions >= 20 else None,
                        "repetitions": repetitions,
                        "peak_extra_bytes": int(extra) if residency == "resident" else None,
                        "mode": mode,
                    }
                )
                raw += [
                    {
                        "prefix_tokens": tokens,
                        "path": path,
                        "residency": residency,
                        "repetition": i,
                        "ms": ms,
                        "handoff_ms": ms if residency == "resident" else ms * 0.1,
                        "mode": mode,
                    }
                    for i, ms in enumerate(times)
                ]
    crossover = {
        "resident": {"learned": None, "direct": None, "ridge": None, "below": True},
        "cold": {"learned": 341.0, "direct": 310.0, "ridge": 355.0, "below": False},
    }
    write_json(
        folder / "summary.json",
        head
        | {
            "rows": rows,
            "device": "CPU, 2 cores",
            "dtype": "float32",
            "memory_bandwidth_gb_s": 11.8,
            "warmups": list(profile.latency.warmups),
            "threads": 2,
            "crossover": crossover,
        },
    )
    write_table(folder / "raw.parquet", pd.DataFrame(raw))
    write_table(folder / "memory.parquet", pd.DataFrame(memory))
