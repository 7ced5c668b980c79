"""The study's stages on the smoke profile: resumed, frozen for real, refused when something changed."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvlib import KvlibError
from kvlib.study import evaluation, freezing, learning
from kvlib.study.controls import CONTROLS
from kvlib.study.freezing import openings
from kvlib.study.profile import DATA
from kvlib.study.records import read_json, read_table, write_json
from kvlib.study.run import read_summary
from kvlib.study.stages import open_run, run_confirmation, run_frozen_evaluation, run_pair, run_screening

SCRIPT = """
import sys
from kvlib.study.stages import open_run, run_confirmation, run_frozen_evaluation, run_pair, run_screening
run = open_run("smoke", results=sys.argv[1])
for stage in (run_pair, run_screening, run_confirmation, run_frozen_evaluation):
    stage(run)
    print(stage.__name__, flush=True)
"""
TIMES = {
    "created",
    "duration_s",
    "seconds",
    "ran",
    "shares",
    "peak_bytes",
    "opened",
    "written",
    "manifest_hash",
    "frozen",
    "hash",
    "environment",
}


def start(folder: Path) -> subprocess.Popen:
    """The stages in a process of their own; what it says goes to a file, so that no pipe is left open."""
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with open(folder / "said.txt", "a") as said:
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder)], env=environment, stdout=said, stderr=said
        )


def without_times(value):
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES}
    return [without_times(v) for v in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run up to the frozen evaluation, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    process = start(folder)
    assert process.wait(600) == 0, (folder / "said.txt").read_text()
    return folder


@pytest.fixture
def run(whole, tmp_path):
    """A copy of the undisturbed run, to be spoilt."""
    shutil.copytree(whole / "smoke", tmp_path / "smoke")
    return open_run("smoke", results=tmp_path)


def test_every_stage_is_found_finished_and_nothing_is_trained_twice(run, monkeypatch):
    monkeypatch.setattr(learning, "train", lambda *a, **k: pytest.fail("an arm was trained again"))
    before = {p: p.stat().st_mtime_ns for p in run.folder.rglob("*") if p.is_file() and p.name != ".lock"}
    for stage in (run_pair, run_screening, run_confirmation, run_frozen_evaluation):
        stage(run)
    assert before == {
        p: p.stat().st_mtime_ns for p in run.folder.rglob("*") if p.is_file() and p.name != ".lock"
    }
    (run.stage("screening") / "summary.json").unlink()
    assert len(run_screening(run)["arms"]) == 20  # rebuilt from the arms' own records


def test_the_study_has_the_designs_shape(whole):
    run = open_run("smoke", results=whole)
    screening, confirmation = (
        read_json(run.stage(s) / "summary.json") for s in ("screening", "confirmation")
    )
    assert (
        len(screening["arms"]) == 20 and len(screening["selected"]) == 6 and len(screening["finalists"]) == 2
    )
    settings = run.profile.screening
    assert len(screening["grid"]) == 6 * len(settings.checkpoints) * len(settings.scales)
    assert [len(arm["runs"]) for arm in confirmation["arms"]] == [3, 3]
    final = read_summary(run.stage("frozen_evaluation"))
    assert final["frozen"] == confirmation["manifest_hash"] and final["opened"] == 1
    steps, prompts = (
        read_table(run.stage("frozen_evaluation") / f"{name}.parquet") for name in ("steps", "prompts")
    )
    count, forced = run.profile.partitions.final.items, run.profile.prompt.forced_steps
    assert len(steps) == 2 * 4 * count * forced and len(prompts) == 2 * 4 * count
    controls = read_table(run.stage("frozen_evaluation") / "controls.parquet")
    assert set(controls["path"]) == {*CONTROLS, "native_own_cache", "native_two_parts"}  # one number format
    assert len(controls) == 2 * (len(CONTROLS) + 2) * count * forced
    for forcing in ("oracle", "text"):
        found = final["forcing"][forcing]
        assert set(found["paths"]) == {"native", "direct", "ridge", "learned"}
        assert (
            found["paths"]["native"]["kl32"]["mean"] == pytest.approx(0, abs=1e-6)
            and found["paths"]["native"]["top1"] == 1
        )
        rows = steps[(steps["forcing"] == forcing) & (steps["path"] == "learned")]
        assert found["paths"]["learned"]["kl32"]["mean"] == pytest.approx(rows["kl"].mean(), rel=1e-6)
        assert set(found["controls"]) == set(CONTROLS) and set(found["step1"]) == set(found["paths"])
        for entry in found["noise"].values():
            assert abs(entry["kl32"]["mean"]) < 1e-5 and entry["top1"] == 1
        first = rows[rows["step"] == 1]
        assert found["step1"]["learned"]["kl"]["mean"] == pytest.approx(first["kl"].mean())
    assert final["controls"] == final["forcing"]["oracle"]["controls"]
    for name in ("zeros", "random_moments", "other_prompt"):
        assert final["controls"][name]["paired"]["mean"] > 0


def test_the_final_prompts_are_not_tokenised_before_the_manifest(run, monkeypatch):
    (run.stage("confirmation") / "manifest.json").unlink()
    shutil.rmtree(run.stage("frozen_evaluation"))
    monkeypatch.setattr(evaluation, "load_partitions", lambda *_: pytest.fail("the final prompts were read"))
    with pytest.raises(KvlibError, match="manifest .* is missing"):
        run_frozen_evaluation(run)
    assert openings(run) == []


def edit_json(path: Path, change):
    value = read_json(path)
    change(value)
    write_json(path, value)


def edit_prompts(run):
    path = run.stage("pair") / "partitions.json"

    def change(value):
        value["partitions"]["final"]["items"][0]["sha256"] = "0" * 64

    edit_json(path, change)


def append_byte(path):
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (
            lambda run: edit_json(
                run.stage("confirmation") / "manifest.json", lambda m: m.update(rule="the luckiest seed")
            ),
            "was edited",
        ),
        (edit_prompts, "the final prompts"),
        (
            lambda run: append_byte(run.stage("confirmation") / "learned.safetensors"),
            "the learned map's weights",
        ),
        (lambda run: append_byte(run.stage("confirmation") / "ridge.safetensors"), "the ridge map's weights"),
        (lambda run: append_byte(run.stage("pair") / "source" / "model.safetensors"), "the models' weights"),
    ],
)
def test_what_changed_after_the_freeze_is_named(run, spoil, named):
    shutil.rmtree(run.stage("frozen_evaluation"))
    spoil(run)
    with pytest.raises(KvlibError, match=named):
        run_frozen_evaluation(run)
    assert openings(run) == []


def test_changed_code_or_rule_is_named(run, monkeypatch):
    shutil.rmtree(run.stage("frozen_evaluation"))
    with monkeypatch.context() as patch:
        patch.setattr(freezing, "code_hash", lambda: "f" * 64)
        with pytest.raises(KvlibError, match="kvlib's code changed after the freeze"):
            run_frozen_evaluation(run)
    with monkeypatch.context() as patch:
        patch.setattr(freezing, "FREEZE_RULE", "whichever looks best")
        with pytest.raises(KvlibError, match="the decision rule changed"):
            run_frozen_evaluation(run)


def test_edited_article_text_is_named(run):
    shutil.rmtree(run.stage("frozen_evaluation"))
    from kvlib.study.corpus import Article, load_articles, save_articles

    articles = load_articles(run.stage("pair") / "articles")
    save_articles(
        [Article(a.title, a.text.replace("the", "teh")) for a in articles], run.stage("pair") / "articles"
    )
    with pytest.raises(KvlibError, match="has hash"):
        run_frozen_evaluation(run)


def test_a_second_opening_is_recorded(run):
    shutil.rmtree(next(run.stage("frozen_evaluation").glob("work-*")))
    (run.stage("frozen_evaluation") / "summary.json").unlink()
    assert run_frozen_evaluation(run)["opened"] == 2
    assert [line["manifest"] for line in openings(run)] == [
        read_json(run.stage("confirmation") / "manifest.json")["hash"]
    ] * 2


def spoil_windows(run):
    path = next(run.stage("screening").glob("windows-*/hidden.bin"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_cut_window_files_are_filled_anew(run):
    before = read_summary(run.stage("screening"))
    spoil_windows(run)
    shutil.rmtree(run.stage("screening") / "arms")
    (run.stage("screening") / "summary.json").unlink()
    assert without_times(run_screening(run)) == without_times(before)


def swap(folder: Path, pattern: str):
    first, second = sorted(folder.glob(pattern))[:2]
    first.write_bytes(second.read_bytes())


def cut_scores(run):
    path = next(run.stage("screening").glob("arms/*/scored-*.json"))
    write_json(path, {name: column[:3] for name, column in read_json(path).items()})


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda run: swap(run.stage("screening"), "prompts-*/*.safetensors"), "does not match its seal"),
        (cut_scores, "is not of this stage's 8 prompts"),
        (lambda run: swap(run.stage("screening"), "arms/*/curve.parquet"), "does not match its seal"),
    ],
)
def test_swapped_and_cut_records_of_the_screen_are_refused(run, spoil, named):
    spoil(run)
    (run.stage("screening") / "summary.json").unlink()
    with pytest.raises(KvlibError, match=named):
        run_screening(run)


def test_another_arms_checkpoint_is_refused(run):
    swap(run.stage("screening"), "arms/*/step-00012.safetensors")
    for path in run.stage("screening").glob("arms/*/scored-*.json"):
        path.unlink()
    (run.stage("screening") / "summary.json").unlink()
    with pytest.raises(KvlibError, match="is not the checkpoint of|is no whole residual map"):
        run_screening(run)


def test_swapped_records_of_the_final_evaluation_are_refused(run):
    swap(run.stage("frozen_evaluation"), "work-*/steps-*.parquet")
    (run.stage("frozen_evaluation") / "summary.json").unlink()
    with pytest.raises(KvlibError, match="does not match its seal"):
        run_frozen_evaluation(run)


@pytest.mark.parametrize("name", ["manifest.json", "learned.safetensors"])
def test_a_deleted_product_is_made_again_by_its_stage(run, name):
    path = run.stage("confirmation") / name
    path.unlink()
    assert run.finished("confirmation") is None
    run_confirmation(run)
    assert path.exists()


def test_a_run_made_from_a_file_is_found_again_by_that_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text((DATA / "profiles" / "smoke.yaml").read_text().replace("seed: 7", "seed: 99"))
    run = open_run(str(path), "mine", results=tmp_path)
    assert run.source.endswith("mine.yaml") and read_json(run.folder / "run.json")["source"] == run.source
    with pytest.raises(KvlibError, match=r"--profile \S*mine.yaml --run mine"):
        run_screening(run)


def test_a_missing_stage_says_what_to_run(tmp_path):
    run = open_run("smoke", "fresh", results=tmp_path)
    for stage in (run_screening, run_confirmation, run_frozen_evaluation):
        with pytest.raises(
            KvlibError,
            match=r"has not been run: run `python -m kvlib run 0\d_\w+ --profile smoke --run fresh` first",
        ):
            stage(run)


def test_parameters_stay_with_a_run_and_arms_of_other_settings_are_kept(run):
    folders = {p.name for p in (run.stage("screening") / "arms").iterdir()}
    results = run.folder.parent
    changed = open_run("smoke", results=results, **{"training.steps": 14, "screening.arms": None})
    assert (
        changed.profile.training.steps == 14
        and open_run("smoke", results=results).profile.training.steps == 14
    )
    assert changed.finished("screening") is None and changed.finished("pair") is not None
    with pytest.raises(KvlibError, match="screening, which was made with other settings"):
        run_confirmation(changed)
    assert folders <= {p.name for p in (run.stage("screening") / "arms").iterdir()}


def test_a_folder_of_another_profile_or_format_is_refused(tmp_path):
    open_run("smoke", "mine", results=tmp_path)
    with pytest.raises(KvlibError, match="is a run of profile 'smoke', profile 'laptop' was given"):
        open_run("laptop", "mine", results=tmp_path)
    write_json(
        tmp_path / "mine" / "run.json", {"format": 99, "profile": "smoke", "source": "smoke", "overrides": {}}
    )
    with pytest.raises(KvlibError, match="has format 99"):
        open_run("smoke", "mine", results=tmp_path)
    for name in ("../elsewhere", ".hidden", "a/b"):
        with pytest.raises(KvlibError, match="expected a plain folder name"):
            open_run("smoke", name, results=tmp_path)


def test_a_diverging_arm_is_recorded_and_the_screen_goes_on(tmp_path, monkeypatch):
    whole_training = learning.train

    def sometimes_broken(*arguments, **settings):
        for step in whole_training(*arguments, **settings):
            broken = settings["learning_rate"] == 0.01 and step.number == 3
            yield replace(step, loss=float("nan")) if broken else step
            if broken:
                return

    monkeypatch.setattr(learning, "train", sometimes_broken)
    run = open_run("smoke", results=tmp_path)
    run_pair(run)
    arms = run_screening(run)["arms"]
    failed = [arm for arm in arms if arm["status"] == "not_finite"]
    assert len(failed) == 2 and all(
        arm["learning_rate"] == 0.01 and "at step 3" in arm["reason"] for arm in failed
    )
    assert all(arm["kl32"] is None and arm["order"] is None for arm in failed) and len(arms) == 20
    json.dumps(arms, allow_nan=False)


def test_text_that_is_too_short_is_an_error_that_says_how_much_there_is(tmp_path):
    run = open_run("smoke", results=tmp_path, **{"corpus.articles": 9})
    with pytest.raises(KvlibError, match="too little text for partition"):
        run_pair(run)
    assert not (run.stage("pair") / "summary.json").exists()
