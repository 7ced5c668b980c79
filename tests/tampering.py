"""What a forger does to the records of a run: one change at a time, every file written back as valid as it was."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from kvlib.study.corpus import Article, load_articles, save_articles
from kvlib.study.final_tables import per_prompt, summarise_final
from kvlib.study.freezing import model_files
from kvlib.study.partitions import hash_text
from kvlib.study.records import (
    append_line,
    hash_json,
    read_json,
    read_lines,
    read_table,
    read_tensors,
    sha256_file,
    write_json,
    write_table,
    write_tensors,
)
from kvlib.study.verification.reading import recorded_run

SUMMARY = "summary.json"


def edit(path: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change a JSON record, and nothing else."""

    def tamper(folder: Path) -> None:
        value = read_json(folder / path)
        change(value)
        write_json(folder / path, value)

    return tamper


def edit_table(path: str, column: str, value, row: int = 0) -> Callable[[Path], None]:
    """Change one cell of a table, which is written back as valid as it was. `value` may be a function of the old."""

    def tamper(folder: Path) -> None:
        table = read_table(next(folder.glob(path)))
        old = table.loc[row, column]
        table.loc[row, column] = value(old) if callable(value) else value
        write_table(next(folder.glob(path)), table)

    return tamper


def drop_row(path: str) -> Callable[[Path], None]:
    return lambda folder: write_table(folder / path, read_table(folder / path).iloc[:-1])


def rehash(stage: str) -> Callable[[Path], None]:
    """Write the hashes of a stage's files into its summary, as they are now."""

    def tamper(folder: Path) -> None:
        def change(value):
            value["files"] = {name: sha256_file(folder / stage / name) for name in value["files"]}

        edit(f"{stage}/{SUMMARY}", change)(folder)

    return tamper


def refreeze(folder: Path) -> None:
    """Hash the manifest anew, and write that hash wherever one stands."""
    path = folder / "confirmation" / "manifest.json"
    manifest = {key: value for key, value in read_json(path).items() if key != "hash"}
    stated = hash_json(manifest)
    write_json(path, {**manifest, "hash": stated})
    edit(f"confirmation/{SUMMARY}", lambda s: s.update(manifest_hash=stated))(folder)
    rehash("confirmation")(folder)
    for stage in ("frozen_evaluation", "latency"):
        edit(f"{stage}/{SUMMARY}", lambda s: s.update(frozen=stated))(folder)
    lines = read_lines(folder / "frozen_evaluation" / "ledger.jsonl")
    (folder / "frozen_evaluation" / "ledger.jsonl").unlink()
    for line in lines:
        append_line(folder / "frozen_evaluation" / "ledger.jsonl", {**line, "manifest": stated})


def swap(first: str, second: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copy(next(folder.glob(second)), next(folder.glob(first)))


def edit_map(path: str, change: Callable[[dict, dict], object]) -> Callable[[Path], None]:
    """Change a map's tensors or what it says of itself."""

    def tamper(folder: Path) -> None:
        place = next(folder.glob(path))
        tensors, metadata = read_tensors(place)
        described = json.loads(metadata["kvlib"])
        change(tensors, described)
        write_tensors(place, tensors, {"kvlib": json.dumps(described, sort_keys=True)})

    return tamper


def reword_article(folder: Path) -> None:
    articles = load_articles(folder / "pair" / "articles")
    first = Article(articles[0].title, articles[0].text + " More.")
    save_articles([first, *articles[1:]], folder / "pair" / "articles")


def nudge_weights(folder: Path) -> None:
    """Other weights of the source, with their hash in a manifest that is consistent again."""
    path = folder / "pair" / "source" / "model.safetensors"
    tensors, metadata = read_tensors(path)
    tensors["lm_head.weight"][0, 0] += 0.5
    write_tensors(path, tensors, metadata)
    files = model_files(recorded_run(folder))
    edit("confirmation/manifest.json", lambda m: m.update(models=files))(folder)
    refreeze(folder)


def move_item(folder: Path) -> None:
    """A final prompt taken from elsewhere in its article, with every hash of it made anew."""
    texts = {article.title: article.text for article in load_articles(folder / "pair" / "articles")}

    def change(value):
        part = value["partitions"]["final"]
        item = part["items"][0]
        item["start_character"] += 2
        text = texts[item["article"]][item["start_character"] : item["end_character"]]
        item["sha256"] = hash_text(text)
        part["hash"] = hash_json({key: entry for key, entry in part.items() if key != "hash"})

    edit("pair/partitions.json", change)(folder)
    part = read_json(folder / "pair" / "partitions.json")["partitions"]["final"]
    edit(f"pair/{SUMMARY}", lambda s: s["partitions"]["final"].update(hash=part["hash"]))(folder)
    rehash("pair")(folder)

    def manifest(value):
        value["partitions"]["final"] = part["hash"]
        value["final_prompts"] = [item["sha256"] for item in part["items"]]

    edit("confirmation/manifest.json", manifest)(folder)
    refreeze(folder)


def drop_line(folder: Path) -> None:
    (folder / "frozen_evaluation" / "ledger.jsonl").write_text("")


def foreign_line(folder: Path) -> None:
    path = folder / "frozen_evaluation" / "ledger.jsonl"
    append_line(path, {**read_lines(path)[0], "manifest": "0" * 64})
    edit("frozen_evaluation/made.json", lambda m: m.update(opened=2))(folder)


def backdate_line(folder: Path) -> None:
    path = folder / "frozen_evaluation" / "ledger.jsonl"
    append_line(path, {**read_lines(path)[0], "opened": "2001-01-01T00:00:00+00:00"})
    edit("frozen_evaluation/made.json", lambda m: m.update(opened=2))(folder)


def better_everywhere(folder: Path) -> None:
    """The learned path's KL lowered in a batch and in every table made of it, the figures and hashes with them."""
    stage = folder / "frozen_evaluation"
    for path in (next(stage.glob("work-*/steps-0000.parquet")), stage / "steps.parquet"):
        table = read_table(path)
        table.loc[(table["path"] == "learned") & (table["prompt"] == 0), "kl"] -= 0.25
        write_table(path, table)
    steps, prompts, controls = (
        read_table(stage / f"{name}.parquet") for name in ("steps", "prompts", "controls")
    )
    prompts["kl32"] = per_prompt(steps)["kl32"]
    write_table(stage / "prompts.parquet", prompts)
    run = recorded_run(folder)
    figures = summarise_final(steps, prompts, controls, run.profile.evaluation.forcings, run.profile.seed)
    edit(f"frozen_evaluation/{SUMMARY}", lambda s: s.update(figures))(folder)
    rehash("frozen_evaluation")(folder)


def set_at(*keys) -> Callable:
    """A change: the value at a path of keys; the last argument is the new value, or a function of the old."""
    *way, last, value = keys

    def change(record):
        for key in way:
            record = record[key]
        record[last] = value(record[last]) if callable(value) else value

    return change


def both(*steps: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: [step(folder) for step in steps]


def nudge(value: float) -> float:
    """The last digit of a number."""
    return value * (1 + 1e-15) + 1e-15


def flip(value):
    return not value


def append_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def place(folder: Path, pattern: str) -> str:
    """The one file that a pattern means, by its place in the run."""
    return str(next(folder.glob(pattern)).relative_to(folder))


def swap_values(records: str, first: int, second: int, key: str) -> Callable[[dict], None]:
    """A change: two records of a list take each other's value."""

    def change(value):
        one, other = value[records][first], value[records][second]
        one[key], other[key] = other[key], one[key]

    return change


def freeze_maps_again(folder: Path) -> None:
    """The hashes of the frozen maps as they are now, in the summary and in a manifest that is consistent again."""
    weights = {path.stem: sha256_file(path) for path in (folder / "confirmation").glob("*.safetensors")}

    def manifest(value):
        value["weights"] = {name: weights[name] for name in value["weights"]}
        value["frozen"]["checkpoint_bytes"] = size

    size = (folder / "confirmation" / "learned.safetensors").stat().st_size
    edit("confirmation/manifest.json", manifest)(folder)

    def summary(value):
        value["frozen"].update(weights_sha256=weights["learned"], checkpoint_bytes=size)

    edit(f"confirmation/{SUMMARY}", summary)(folder)
    refreeze(folder)
