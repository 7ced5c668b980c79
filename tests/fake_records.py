"""A complete, plausible run folder made of seeded random numbers: every stage's records, no model."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from kvlib.breakdown import ARGMAX, ATTACHING, ATTENTION, BODY, HEAD, MAP, PYTHON, WEIGHTS
from kvlib.cold import pipeline_rows
from kvlib.study.arms import all_arms, slices
from kvlib.study.controls import CONTROLS, NOISE
from kvlib.study.decision import decision_rule_hash
from kvlib.study.final_tables import per_prompt, summarise_final
from kvlib.study.profile import Profile, load_profile
from kvlib.study.records import append_line, hash_json, write_json, write_table
from kvlib.study.statistics import paired

STEPS, PROMPTS, LAYERS = 32, 64, 30
FORCINGS = ("oracle", "text")
CONTROL_LEVEL = {"other_prompt": 1.5, "shuffled_positions": 2.1, "random_moments": 3.0, "zeros": 5.1}
CONTROL_LEVEL |= {"learned_other_prompt": 1.4, "wrong_trained_other_prompt": 1.2} | dict.fromkeys(NOISE, 1e-9)
LEVEL = {"native": 0.0, "direct": 0.20, "ridge": 0.31, "learned": 0.165}
GATES = [
    {
        "prefix_tokens": 256,
        "prompts": 4,
        "comparisons": 82_000_000,
        "max_abs_difference": {"materialised": 0.0, "in_place": 2e-6, "absorbed": 8e-4},
        "by_map": {"direct": 8e-4, "ridge": 7e-4},
        "logit_scale": 19.5,
        "tolerance": 5e-3,
        "passed": True,
    }
]
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


def write_stage(folder: Path, head: dict, found: dict, **made) -> None:
    """A stage's two records, as `Run.publish` leaves them."""
    write_json(
        folder / "made.json",
        {"run": folder.parent.name, "created": "2026-01-02T03:04:05+00:00", "duration_s": 321.5, **made},
    )
    write_json(folder / "summary.json", json.loads(json.dumps(head | {"files": {}} | found)))


def write_fake_run(folder: Path, name: str = "laptop") -> Path:
    """Write all five stages under `folder` and return it. `name` is the profile's."""
    folder, rng = Path(folder), np.random.default_rng(7)
    profile = load_profile(name)
    head = {
        "profile": name,
        "label": profile.label,
        "key": hash_json(name),
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
            "text": None,
        }
        for n, a, i, k in zip(names, articles, items, kinds, strict=True)
    }
    packages = {"torch": "2.13.0", "transformers": "5.24.0", "numpy": "2.4.6", "plotly": "7.1.0"}
    write_stage(
        folder,
        head,
        {
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
            },
            "held_out_nll": {"target": 2.60, "source": 3.74, "tokens": 7776},
            "gate": GATES[0],
            "gates": GATES,
            "decision_rule": decision_rule_hash(),
            "partitions": partitions,
            "corpus": {
                "name": "English Wikipedia sample",
                "source": "gensim 4.4.0 test data",
                "licence": "CC BY-SA",
                "articles": 92,
                "characters": 3_400_000,
                "texts": [],
            },
            "revisions": {"target": None, "source": None},
            "training_dtype": "bfloat16",
            "seed": 2026,
        },
        pruning_seconds=212.0,
        pruning_peak_bytes=3_100_000_000,
        environment={
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
                "against_direct": None
                if broken
                else paired([kl - 0.195 + e for e in rng.normal(0, 0.03, 27)], baseline=0.195, seed=1)
                | {"wilcoxon_p_holm": 0.03, "sign_p_holm": 0.2, "se_clustered": 0.006},
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
    write_stage(
        folder,
        head,
        {
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
            "places": [{"arm": g["arm"], "lowest": g["arm"], "tied": []} for g in chosen[:2]],
            "finalists": [g["arm"] for g in chosen[:2]],
            "gates": GATES,
        },
        seconds={arm["id"]: 60.0 for arm in arms},
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
                "absorbable": True,
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
    write_stage(
        folder,
        head,
        {
            "arms": arms,
            "direct": {"kl32": 0.196, "se": 0.02, "top1": 0.81},
            "ridge": {"kl32": 0.29, "se": 0.03, "top1": 0.77},
            "prompts": 24,
            "frozen": frozen,
            "wrong_trained": {"status": "finished", "reason": None},
            "manifest_hash": hash_json(manifest),
            "gates": GATES,
        },
        frozen_at="2026-01-02T03:04:05+00:00",
    )
    return hash_json(manifest)


def _frozen_evaluation(folder: Path, head: dict, rng, manifest: str) -> None:
    hardness, article = rng.gamma(2, 0.5, PROMPTS), [f"Article {p // 3}" for p in range(PROMPTS)]
    text = [f"{a} " + " ".join(rng.choice(WORDS, 60)) for a in article]
    steps = pd.concat(
        [
            _steps(rng, hardness, forcing, path, level)
            for forcing in FORCINGS
            for path, level in LEVEL.items()
        ],
        ignore_index=True,
    )
    tokens = rng.choice(WORDS, (len(steps), 3))
    steps = steps.assign(
        **dict(zip(("forced_token", "native_token", "path_token"), tokens.T, strict=True)),
        native_probability=0.5,
        path_probability=0.4,
    )
    controls = pd.concat(
        [
            _steps(rng, hardness, forcing, name, CONTROL_LEVEL.get(name, 0.19))
            for forcing in FORCINGS
            for name in (*CONTROLS, *NOISE)
        ],
        ignore_index=True,
    )
    prompts = per_prompt(steps)
    prompts = prompts.assign(
        article=[article[p] for p in prompts.prompt], text=[text[p] for p in prompts.prompt]
    )
    found = summarise_final(steps, prompts, controls, list(FORCINGS), seed=1)
    write_stage(
        folder,
        head,
        found
        | {
            "frozen": manifest,
            "articles": 22,
            "commit": "0123abc",
            "gates": GATES,
            "modes": {"direct": "absorbed", "ridge": "absorbed", "learned": "absorbed"},
            "agreement": [
                {
                    "map": name,
                    "prompts": 4,
                    "comparisons": 4 * 32 * 49152 * 2,
                    "moved": 2.5,
                    "max_abs_difference": {"in_place": 2e-5, "absorbed": 3e-5},
                    "logit_scale": 21.0,
                    "tolerance": 0.001,
                    "passed": True,
                }
                for name in ("ridge", "learned")
            ],
        },
        opened=1,
    )
    for name, table in (("prompts", prompts), ("steps", steps), ("controls", controls)):
        write_table(folder / f"{name}.parquet", table)
    append_line(
        folder / "ledger.jsonl",
        {"opened": "2026-01-02T03:04:05+00:00", "manifest": manifest, "commit": "0123abc"},
    )


def _steps(rng, hardness, forcing: str, path: str, level: float) -> pd.DataFrame:
    noise = np.ones(PROMPTS) if path == "native" else rng.normal(1, 0.08, PROMPTS)
    shape = rng.gamma(2, 0.5, (PROMPTS, STEPS)) * (1 + 0.3 * np.exp(-np.arange(STEPS) / 4))
    kl = level * (hardness * noise)[:, None] * shape / shape.mean(1, keepdims=True)
    agree = rng.random((PROMPTS, STEPS)) < (1.0 if level < 1e-6 else 0.82)
    prompt, step = np.divmod(np.arange(PROMPTS * STEPS), STEPS)
    return pd.DataFrame(
        {
            "prompt": prompt,
            "step": step + 1,
            "kl": kl.ravel(),
            "agree": agree.ravel(),
            "forcing": forcing,
            "path": path,
        }
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
                        "handoff_p50_ms": hand * 1.02 if residency == "cold" else None,
                        "repetitions": repetitions,
                        "peak_extra_bytes": int(extra) if residency == "resident" else None,
                        "mode": mode,
                        "compiled": False,
                        "compile_seconds": None,
                    }
                )
                raw += [
                    {
                        "prefix_tokens": tokens,
                        "path": path,
                        "residency": residency,
                        "repetition": i,
                        "prompt": i % 3,
                        "token": 100 + i % 3 + (path in ("direct", "ridge") and i % 3 == 0),
                        "ms": ms,
                        "handoff_ms": ms if residency == "resident" else ms * 0.1,
                        "mode": mode,
                        "compiled": False,
                    }
                    for i, ms in enumerate(times)
                ]
    modes, floor, breakdown, pipeline = _latency_extras(rng, profile, rows, raw, memory)
    crossover = {
        "resident": {"learned": None, "direct": None, "ridge": None, "below": True},
        "cold": {"learned": 341.0, "direct": 310.0, "ridge": 355.0, "below": False},
    }
    write_stage(
        folder,
        head,
        {
            "rows": rows,
            "device": "CPU, 2 cores",
            "dtype": "float32",
            "memory_bandwidth_gb_s": 11.8,
            "warmups": dict(
                zip(map(str, profile.latency.prefix_tokens), profile.latency.warmups, strict=True)
            ),
            "threads": 2,
            "crossover": crossover,
            "gates": GATES,
            "modes": modes,
            "left_out": [],
            "floor": floor,
            "breakdown": breakdown,
            "pipeline": pipeline_rows(pipeline),
        },
    )
    tables = {"raw": raw, "memory": memory, "breakdown": breakdown, "pipeline": pipeline}
    for name, table in tables.items():
        write_table(folder / f"{name}.parquet", pd.DataFrame(table))


WAYS = {"materialised": (1.9, 2.0), "in_place": (1.3, 1.01), "background": (1.02, 1.02)}
PART_SHARES = {
    WEIGHTS: 0.30, HEAD: 0.08, ATTENTION: 0.25, MAP: 0.04, BODY: 0.12, ATTACHING: 0.02, ARGMAX: 0.01, PYTHON: 0.18,
}  # fmt: skip


def _latency_extras(rng, profile: Profile, rows: list, raw: list, memory: list) -> tuple[list, ...]:
    """The learned map's other ways, whose repetitions and peaks go into `raw` and `memory`, the floor and the rest."""
    modes, floor, breakdown, pipeline = [], [], [], []
    lengths = profile.latency.prefix_tokens
    found = {(r["prefix_tokens"], r["path"], r["residency"]): r for r in rows}
    for tokens in lengths:
        learned = found[tokens, "learned", "resident"]
        for way, (slower, larger) in WAYS.items():
            name, extra = f"learned@{way}", int(learned["peak_extra_bytes"] * larger)
            times = learned["p50_ms"] * slower * rng.normal(1, 0.01, learned["repetitions"])
            raw += [
                {
                    "prefix_tokens": tokens,
                    "path": name,
                    "residency": "resident",
                    "repetition": i,
                    "prompt": i % 3,
                    "token": 100 + i % 3,
                    "ms": ms,
                    "handoff_ms": None,
                    "mode": way,
                    "compiled": False,
                }
                for i, ms in enumerate(times)
            ]
            memory.append({"prefix_tokens": tokens, "path": name, "peak_extra_bytes": extra})
            modes.append(
                {
                    "prefix_tokens": tokens,
                    "path": "learned",
                    "mode": way,
                    "compiled": False,
                    "p50_ms": float(np.median(times)),
                    "p95_ms": None,
                    "repetitions": len(times),
                    "peak_extra_bytes": extra,
                }
            )
        weights, cache = 538_060_032, 46_080 * (tokens - 1)
        floor.append(
            {
                "prefix_tokens": tokens,
                "weight_bytes": weights,
                "cache_bytes": cache,
                "floor_ms": (weights + cache) / 11.8 / 1e6,
            }
        )
    for tokens in (lengths[0], lengths[-1]):
        for path in ("direct", "learned"):
            whole = found[tokens, path, "resident"]["p50_ms"] * 1.15
            breakdown += [
                {
                    "prefix_tokens": tokens,
                    "path": path,
                    "part": part,
                    "ms": 0.0 if (path, part) == ("direct", MAP) else whole * share,
                }
                for part, share in PART_SHARES.items()
            ]
    for tokens in lengths[:3]:
        cold, resident = (found[tokens, "learned", kind]["p50_ms"] for kind in ("cold", "resident"))
        clocks = {"serial": cold, "pipelined": cold - 0.4 * resident, "resident": resident}
        for i in range(3):
            for way, ms in clocks.items():
                serial = way == "serial"
                pipeline.append(
                    {
                        "prefix_tokens": tokens, "path": "learned", "way": way, "repetition": i, "prompt": 0,
                        "order": len(pipeline), "ms": ms, "source_ms": cold - resident if serial else None,
                        "handoff_ms": resident if serial else None, "mode": "absorbed", "token": 1,
                    }
                )  # fmt: skip
    return modes, floor, breakdown, pipeline
