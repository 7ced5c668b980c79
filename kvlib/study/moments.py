"""The moments at which runs are attacked: inside every stage, between and in the middle of writes."""

from kvlib.study.sabotage import FileLimit, Moment

ADVANCE, REPLACE = "kvlib.study.progress.Progress.advance", "os.replace"


def _noted(note: str, call: int = 1) -> Moment:
    """Right after a piece of work was counted whose note is this."""
    return Moment(ADVANCE, note, call, "after")


def _half_written(file: str, call: int = 1) -> Moment:
    """In the middle of the writing of a file."""
    return Moment(REPLACE, f"*/smoke/{file}", call, "half")


def _unwritten(file: str, call: int = 1) -> Moment:
    """When a file or folder is whole, but not yet in its place."""
    return Moment(REPLACE, f"*/smoke/{file}", call, "before")


def _written(file: str, call: int = 1) -> Moment:
    """When a file has just come to its place."""
    return Moment(REPLACE, f"*/smoke/{file}", call, "after")


KILLED_FETCHING = [
    Moment("kvlib.study.assets._bytes_below"),  # pip is at work
    Moment("kvlib.study.assets._extract"),
    Moment("shutil.copyfileobj", when="half"),
    Moment(REPLACE, "*/weights.bin"),
]

# By kind, in the order in which one run meets them: it is started, dies, is started again.
KILLED = {
    "preparing text and models": [
        _written("pair/key.json"),
        _unwritten("pair/articles"),
        _unwritten("pair/target"),
        _half_written("pair/partitions.json"),
    ],
    "pruning": [
        _noted("pruning, pass 2 of 6"),
        _noted("pruning, pass 5 of 6"),
        _half_written("pair/pruning.json"),
        _written("pair/pruning.json"),
        _unwritten("pair/source"),
        _half_written("pair/summary.json"),
    ],
    "caching": [
        _half_written("screening/prompts-*/*.safetensors", 2),
        Moment("os.posix_fallocate", call=2, when="after"),
        Moment("kvlib.study.store.WindowStore._keep", call=2, when="after"),
        _half_written("screening/windows-*/windows.json"),
        _noted("source over window 12 of 12"),
        _noted("caching window 8 of 12"),
        _half_written("screening/ridge-*.safetensors"),
    ],
    "training": [
        _noted("arm 1 of 20, step 6 of 12"),
        _half_written("screening/arms/*/step-00012.safetensors", 2),
        _written("screening/arms/*/curve.parquet", 2),
        _half_written("screening/arms/*/trained.json", 3),
        _written("screening/arms/*/trained.json", 4),
        _noted("arm 20 of 20, step 11 of 12"),
        _half_written("screening/arms/*/scored-*.json"),
        _noted("scored *", 9),
        _half_written("screening/curves.parquet"),
        _half_written("screening/summary.json"),
    ],
    "confirming and freezing": [
        _noted("*, seed 12, step 5 of *"),
        _half_written("confirmation/arms/*/trained.json"),
        _half_written("confirmation/learned.safetensors"),
        _half_written("confirmation/manifest.json"),
        _written("confirmation/manifest.json"),
        _unwritten("confirmation/summary.json"),
    ],
    "evaluating": [
        _written("frozen_evaluation/work-*/opening.json"),
        _half_written("frozen_evaluation/ledger.jsonl"),
        _written("frozen_evaluation/ledger.jsonl"),
        _half_written("frozen_evaluation/work-*/prompts-*.safetensors", 2),
        _noted("native over prompt 8 of 12"),
        _half_written("frozen_evaluation/work-*/steps-0004.parquet"),
        _noted("paths over prompt 8 of 12"),
        _written("frozen_evaluation/steps.parquet"),
        _half_written("frozen_evaluation/summary.json"),
    ],
}

PAIR, SCREENING, CONFIRMATION, FINAL = ("pair",), ("screening",), ("confirmation",), ("frozen_evaluation",)

# (stages that are run, where the disk is full). A limit lets the system refuse in the middle of a library's write.
FULL = [
    (PAIR, Moment("tempfile.mkstemp")),
    (PAIR, FileLimit(60)),  # the first record
    (PAIR, FileLimit(100_000)),  # the text
    (PAIR, FileLimit(300_000)),  # the target's weights
    (PAIR, FileLimit(20_000)),  # the list of partitions
    (PAIR, Moment("pyarrow.parquet.write_table", when="half")),
    (PAIR, FileLimit(200_000)),  # the source's weights
    (PAIR, Moment("os.fsync", call=2)),
    (("pair", "screening"), FileLimit(50_000)),  # prompts
    (SCREENING, Moment("os.posix_fallocate", call=2)),
    (SCREENING, FileLimit(400_000)),  # windows
    (SCREENING, FileLimit(10_000)),  # the ridge map, or what comes first
    (SCREENING, Moment("kvlib.maps.base.save_file", call=4, when="half")),
    (SCREENING, FileLimit(5_000)),  # a checkpoint
    (("screening", "confirmation"), Moment(REPLACE, "*/confirmation/manifest.json")),
    (("confirmation", "frozen_evaluation"), Moment(REPLACE, "*/opening.json")),
    (FINAL, Moment(REPLACE, "*/ledger.jsonl")),
    (FINAL, FileLimit(80_000)),  # final prompts
    (FINAL, FileLimit(11_000)),  # a batch's table
]

# (stages that both processes run, where the first one is held until the second has ended).
CROWDED = [
    (PAIR, _noted("pruning, pass 3 of 6")),
    (SCREENING, _noted("caching window 4 of 12")),
    (CONFIRMATION, _noted("*, seed 12, step 5 of *")),
    (FINAL, _noted("paths over prompt 4 of 12")),
]
