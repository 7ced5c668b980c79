"""Among how many processes a stage's units were shared out: kept in its folder, so that it goes on so and its record says it."""

from dataclasses import asdict, dataclass
from pathlib import Path

from kvlib.errors import KvlibError
from kvlib.study.records import read_record, write_json

SHARES = "shares.json"


@dataclass(frozen=True)
class Share:
    """workers: units at once, in a process each. threads: of the processor, for each of them."""

    workers: int
    threads: int


def read_shares(folder: Path, key: str) -> dict[str, dict]:
    """ "20 units" -> {"workers", "threads"}; empty where nothing was shared out yet in the settings that `key` stands for."""
    path = Path(folder) / SHARES
    if not path.exists():
        return {}
    record = read_record(path, "key", "shares")
    whole = isinstance(record["shares"], dict) and all(_is_share(v) for v in record["shares"].values())
    if not whole:
        raise KvlibError(
            f"{path} holds something else than numbers of workers and threads, expected how units were shared out: delete it and "
            "run the stage again"
        )
    return record["shares"] if record["key"] == key else {}


def share_of(folder: Path, key: str, units: int) -> Share | None:
    """How so many units were shared out before, in a stage that was stopped."""
    found = read_shares(folder, key).get(_name(units))
    return Share(**found) if found else None


def keep_share(folder: Path, key: str, units: int, share: Share) -> None:
    present = read_shares(folder, key)
    if present.get(_name(units)) != asdict(share):
        write_json(Path(folder) / SHARES, {"key": key, "shares": present | {_name(units): asdict(share)}})


def _name(units: int) -> str:
    return f"{units} unit{'s' if units != 1 else ''}"


def _is_share(value) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"workers", "threads"}
        and all(type(number) is int and number >= 1 for number in value.values())
    )
