"""Tables of the colophon: what ran, where, with which seeds and hashes, and how often the end was opened."""

import pandas as pd

from kvlib.report import wording
from kvlib.report.tables.cells import ABSENT


def durations(records: dict[str, dict]) -> pd.DataFrame:
    rows = [
        (
            stage.replace("_", " "),
            wording.duration(s["duration_s"]),
            wording.when(s["created"]),
            s["key"][:16],
        )
        for stage, s in records.items()
    ]
    return pd.DataFrame(rows, columns=["stage", "time spent", "finished (UTC)", "settings hash"])


def machine(records: dict[str, dict]) -> pd.DataFrame:
    env = records["pair"]["environment"]
    latency = records["latency"]
    known = {
        "processor": env["processor"],
        "cores": env["cores"],
        "memory (GiB)": env["memory_gb"],
        "platform": env["platform"],
        "device of the timings": latency["device"],
        "number format of the timings": latency["dtype"],
        "threads": latency["threads"],
        "Python": env["python"],
        **env["packages"],
    }
    return pd.DataFrame([(k, str(v)) for k, v in known.items()], columns=["what", "value"])


def hashes(records: dict[str, dict]) -> pd.DataFrame:
    pair, confirmation = records["pair"], records["confirmation"]
    rows = [
        ("target, fingerprint", pair["target"]["fingerprint"]),
        ("source, fingerprint", pair["source"]["fingerprint"]),
        ("frozen manifest", confirmation["manifest_hash"]),
        ("frozen weights", confirmation["frozen"]["weights_sha256"]),
    ]
    rows += [(f"partition {name}", p["hash"]) for name, p in pair["partitions"].items()]
    return pd.DataFrame(rows, columns=["what", "hash"])


def ledger(lines: list[dict]) -> pd.DataFrame:
    rows = [(wording.when(line["opened"]), line["manifest"], line.get("commit") or ABSENT) for line in lines]
    return pd.DataFrame(rows, columns=["opened (UTC)", "manifest", "commit"])


def seeds(records: dict[str, dict]) -> pd.DataFrame:
    rows = [("partitions", str(records["pair"]["seed"]))]
    rows += [
        (f"confirmation, {arm['id']}", ", ".join(str(run["seed"]) for run in arm["runs"]))
        for arm in records["confirmation"]["arms"]
    ]
    rows.append(("frozen", str(records["confirmation"]["frozen"]["seed"])))
    return pd.DataFrame(rows, columns=["what", "seed"])


def colophon(records: dict[str, dict], lines: list[dict]) -> dict[str, pd.DataFrame]:
    """The colophon's tables by the key under which the page asks for them."""
    return {
        "durations": durations(records),
        "machine": machine(records),
        "hashes": hashes(records),
        "seeds": seeds(records),
        "ledger": ledger(lines),
    }
