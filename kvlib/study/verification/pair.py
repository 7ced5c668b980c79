"""Checks of the pair stage: partitions drawn again, models hashed again, what its other records say."""

from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from kvlib.study.corpus import load_articles
from kvlib.study.decision import decision_rule_hash
from kvlib.study.describing import describe_corpus, describe_model, display_name
from kvlib.study.folders import check_folder
from kvlib.study.gate import worst
from kvlib.study.models import REVISIONS
from kvlib.study.pairing import PRUNING_COST, partition_requests, without_cost
from kvlib.study.partitions import Partitions
from kvlib.study.planning import plan_partitions
from kvlib.study.profile import HubModel
from kvlib.study.records import read_json
from kvlib.study.verification.checking import Check
from kvlib.study.verification.reading import Records, training_dtype_of

ROLES = ("target", "source")


def check_partitions(records: Records, check: Check) -> None:
    """The text has its hashes, no article stands twice, and the same draw gives the same partitions again."""
    run, where = records.run, "pair/partitions.json"
    manifest = read_json(run.stage("pair") / "partitions.json")
    articles = load_articles(run.stage("pair") / "articles")
    with check.reading(where):
        found = Partitions.from_manifest(manifest, articles)
        for part in found.parts.values():
            check.checked += 1 + len(part.articles) + len(part.spans)  # the hashes just compared
        check.same("pair/summary.json, partitions", records.summary("pair")["partitions"], found.summary())
    with check.reading(where):
        owners: dict[str, str] = {}
        for name, part in manifest["partitions"].items():
            for article in part["articles"]:
                owner = owners.setdefault(article["sha256"], name)
                check.holds(
                    owner == name,
                    f"{where}: found the text of {article['title']!r} in {owner} and {name}, expected it in one of them",
                )
    with check.reading(f"{where}, drawn again"):
        requests = partition_requests(run.profile)
        again = plan_partitions(articles, requests, run.profile.seed, records.tokenizer)
        check.same(where, manifest, again.manifest())


def check_models(records: Records, check: Check) -> None:
    """The models that the run made are whole, with the fingerprints and the measures that the pair stage recorded."""
    run, summary = records.run, records.summary("pair")
    for role in ROLES:
        where, recorded = f"pair/summary.json, {role}", summary[role]
        with check.reading(where):
            check.same(f"{where}.name", recorded["name"], display_name(run, role))
            check.same(f"{where}.dtype", recorded["dtype"], run.profile.pair.dtype)
            if not isinstance(getattr(run.profile.pair, role), HubModel):
                model = _from_files(check_folder(run.stage("pair") / role))
                check.checked += 1
                measured = describe_model(model, recorded["name"]) | {"dtype": recorded["dtype"]}
                check.same(where, recorded, measured)


def _from_files(folder: Path):
    """A model over the tensors of its files, as they are: enough to be measured, and nothing is computed with it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    if unexpected or any(weight.is_meta for weight in model.parameters()):
        raise ValueError(f"the weight files do not go with config.json: {[*missing, *unexpected][0]}")
    return model


def check_pair(records: Records, check: Check) -> None:
    """Everything else in the pair stage's summary that another record or the profile gives."""
    run, summary = records.run, records.summary("pair")
    profile, partitions = run.profile, summary["partitions"]
    report = run.stage("pair") / "pruning.json"
    pruning = records.json("pair", report.name) if report.exists() else None
    revisions = records.json("pair", REVISIONS)
    screen = partitions["screen_validate"]
    losses = summary["held_out_nll"]  # of the models: no record but this one holds them
    expected = {
        **{role: summary[role] for role in ROLES},  # by the check of the models
        "revisions": {role: revisions[role] for role in ROLES},
        "pruning": without_cost(pruning),
        "held_out_nll": {
            **{role: losses[role] for role in ROLES},
            "tokens": screen["items"] * (screen["tokens_each"] - 1),
        },
        "gate": worst(summary["gates"]),
        "decision_rule": decision_rule_hash(),
        "partitions": partitions,  # by the check of the partitions
        "corpus": describe_corpus(run, load_articles(run.stage("pair") / "articles")),
        "training_dtype": training_dtype_of(profile, summary),
        "seed": profile.seed,
    }
    records.same_summary(check, "pair", expected, recorded=("gates",))
    if pruning is not None:
        with check.reading("pair/layers.parquet"):
            table = records.table("pair", "layers.parquet")
            layers = list(range(summary["target"]["layers"]))
            check.same("pair/layers.parquet, layer", table["layer"].tolist(), layers)
            possible = table["residual_error"].ge(0) & table["mlp_energy_kept"].between(0, 1)
            check.holds(bool(possible.all()), "pair/layers.parquet: found a share or an error that cannot be")
    made = records.made("pair")
    for name in PRUNING_COST:
        check.same(f"pair/made.json, pruning_{name}", made[f"pruning_{name}"], (pruning or {}).get(name))
