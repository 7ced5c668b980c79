"""What a forger does to the records of a run: a careful one writes them back sealed, a plain one edits the files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from kvlib.maps.base import hash_map
from kvlib.study.corpus import Article, load_articles, save_articles
from kvlib.study.final_tables import per_prompt, summarise_final
from kvlib.study.folders import SEALS
from kvlib.study.freezing import model_files
from kvlib.study.partitions import hash_text
from kvlib.study.records import (
    append_line,
    hash_json,
    read_json,
    read_lines,
    read_table,
    sha256_file,
    write_json,
    write_table,
)
from kvlib.study.verification.reading import recorded_run

SUMMARY = "summary.json"
LEDGER = "frozen_evaluation/ledger.jsonl"


def edit(path: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change a JSON record, sealed again, and nothing else. `path` may be a pattern."""

    def tamper(folder: Path) -> None:
        place = next(folder.glob(path))
        value = read_json(place)
        change(value)
        write_json(place, value)

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
    for stage in ("frozen_evaluation", "latency", "evidence"):
        edit(f"{stage}/{SUMMARY}", lambda s: s.update(frozen=stated))(folder)
    edit_lines(lambda lines: [line.update(manifest=stated) for line in lines])(folder)


def edit_lines(change: Callable[[list[dict]], object]) -> Callable[[Path], None]:
    """Change the ledger, its lines chained again."""

    def tamper(folder: Path) -> None:
        lines = read_lines(folder / LEDGER)
        change(lines)
        (folder / LEDGER).write_text("")
        for line in lines:
            append_line(folder / LEDGER, line)

    return tamper


def swap_tables(first: str, second: str) -> Callable[[Path], None]:
    """The second table in the first one's place, sealed for it."""
    return lambda folder: write_table(next(folder.glob(first)), read_table(next(folder.glob(second))))


def swap(first: str, second: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copy(next(folder.glob(second)), next(folder.glob(first)))


def edit_map(path: str, change: Callable[[dict, dict], object]) -> Callable[[Path], None]:
    """Change a map's tensors or what it says of itself, and the hash of both in it."""

    def tamper(folder: Path) -> None:
        place = next(folder.glob(path))
        tensors, described = read_safetensors(place)
        change(tensors, described)
        described["sha256"] = hash_map(described, tensors)
        save_file(tensors, place, {"kvlib": json.dumps(described, sort_keys=True)})

    return tamper


def read_safetensors(path: Path) -> tuple[dict, dict]:
    """(tensors, what kvlib wrote beside them; nothing where that is nothing)."""
    with safe_open(path, framework="pt") as file:
        described = json.loads((file.metadata() or {}).get("kvlib", "{}"))
        return {name: file.get_tensor(name) for name in file.keys()}, described


def seal_folder(folder: Path) -> None:
    """The hashes of a folder's files as they are now."""
    names = [path for path in folder.rglob("*") if path.is_file() and path.name != SEALS]
    write_json(folder / SEALS, {"files": {str(p.relative_to(folder)): sha256_file(p) for p in names}})


def reword_article(folder: Path) -> None:
    articles = load_articles(folder / "pair" / "articles")
    first = Article(articles[0].title, articles[0].text + " More.")
    save_articles([first, *articles[1:]], folder / "pair" / "articles")


def nudge_weights(folder: Path) -> None:
    """Other weights of the source, with their hash in its folder and in a manifest that is consistent again."""
    path = folder / "pair" / "source" / "model.safetensors"
    tensors, _ = read_safetensors(path)
    tensors["lm_head.weight"][0, 0] += 0.5
    save_file(tensors, path, {"format": "pt"})
    seal_folder(path.parent)
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


def drop_lines(folder: Path) -> None:
    (folder / LEDGER).write_text("")


def tell_again(folder: Path) -> None:
    edit_lines(lambda lines: lines.append(lines[0]))(folder)


def backdate(folder: Path) -> None:
    """A further opening, before all the others."""
    earlier = {"opening": "f" * 32, "opened": "2001-01-01T00:00:00+00:00"}
    edit_lines(lambda lines: lines.append({**lines[0], **earlier}))(folder)
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
