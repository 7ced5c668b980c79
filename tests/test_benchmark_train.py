"""benchmarks/train.py: its tiny version runs, and what it writes is whole."""

import json
import math
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "train.py"


def test_the_tiny_benchmark_writes_a_row_per_phase_and_kind_of_arm(tmp_path):
    path = tmp_path / "train.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--tiny", "--out", path], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert record["benchmark"] == "train" and record["machine"]["threads"] >= 1
    assert [(row["phase"], row["arm"]) for row in record["rows"]] == [
        (phase, arm) for phase in ("warmup", "kl") for arm in ("affine", "not affine")
    ]
    for row in record["rows"]:
        times = [row[name] for name in ("step_ms", "floor_ms", "plain_ms")]
        assert all(math.isfinite(ms) and ms > 0 for ms in times)
        assert row["step_to_floor"] == row["step_ms"] / row["floor_ms"]
        assert row["plain_to_step"] == row["plain_ms"] / row["step_ms"]
    assert "step_to_floor" in done.stdout
