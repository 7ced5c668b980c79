"""What a stage has lowered because memory ran out: kept in its folder, so that it goes on so and its record says it."""

from pathlib import Path

from kvlib.errors import KvlibError
from kvlib.room import Room
from kvlib.study.progress import Progress
from kvlib.study.records import read_json, write_json

LOWERED = "lowered.json"

# (name in the record, what they are)
WINDOWS, PROMPTS, STEP = (
    ("windows", "windows"),
    ("prompts", "prompts"),
    ("training.micro_batch", "step's prompts"),
)


def read_lowered(folder: Path) -> dict[str, int]:
    """What is lowered -> to how many at once; empty where memory has sufficed so far."""
    path = Path(folder) / LOWERED
    if not path.exists():
        return {}
    found = read_json(path)
    if not all(type(number) is int and number >= 1 for number in found.values()):
        raise KvlibError(
            f"{path} holds something else than numbers of 1 or more, expected what memory sufficed for: delete it and run the "
            "stage again"
        )
    return found


def room(
    folder: Path, name: str, what: str, most: int, remedy: str, progress: Progress | None = None
) -> Room:
    """A `Room` that begins where the stage in `folder` was when it stopped, and writes there what it is lowered to.

    name: in the record. what, remedy: as for `Room`.
    """

    def lowered(number: int) -> None:
        present = read_lowered(folder)
        # another worker of the same stage may have had less
        write_json(Path(folder) / LOWERED, present | {name: min(number, present.get(name, number))})
        if progress is not None:
            progress.say(f"memory ran out: {number} of the {what} at a time from here on")

    return Room(what, min(most, read_lowered(folder).get(name, most)), remedy, lowered)
