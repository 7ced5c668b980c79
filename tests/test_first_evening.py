"""The errors of the first evening: access, token, network, files, room, device, tokenizer, each in one sentence."""

import errno
import importlib
import json
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

from kvlib import KvlibError
from kvlib.load_errors import load_error
from kvlib.pair import load_model, load_tokenizer
from kvlib.study import headroom, hub, models
from kvlib.study.pairing import check_lengths, run_pair
from tests.standins import byte_tokenizer, config_of, save_model
from tests.tiny import is_one_sentence, refused

pytest_plugins = ["tests.hub_fixtures"]
ID, COMMIT = "meta-llama/Llama-3.1-8B", "a" * 40


class Answer(SimpleNamespace):
    """As much of an HTTP response as the hub's client looks at."""

    headers: dict = {}
    request = SimpleNamespace(method="GET", url="https://huggingface.co")


def refusal(kind: type, status: int) -> Exception:
    return kind("what the hub says\nand advice", response=Answer(status_code=status))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (refusal(errors.GatedRepoError, 401), f"{ID} is gated and no valid access token.*hf auth login"),
        (
            refusal(errors.GatedRepoError, 403),
            f"{ID} is gated and your account has no access.*ask for access",
        ),
        (errors.LocalTokenNotFoundError("Token is required"), "there is no access token.*HF_TOKEN"),
        (refusal(errors.RepositoryNotFoundError, 401), "shows none of this name.*spelling"),
        (refusal(errors.RevisionNotFoundError, 404), "no such revision"),
        (errors.OfflineModeIsEnabled("Cannot reach"), "HF_HUB_OFFLINE is set"),
        (ConnectionError("Max retries exceeded"), "no network"),
        (TimeoutError("timed out"), "no network"),
        (errors.LocalEntryNotFoundError("not on the disk"), "not on this disk as a whole"),
        (OSError(errno.ENOSPC, "No space left on device"), "no room on the disk.*HF_HOME"),
        (refusal(errors.HfHubHTTPError, 503), "the hub refused.*run again later"),
        (MemoryError(), "do not fit into memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "do not fit into memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "do not fit into memory"),
        (ValueError("Unrecognized model\nShould have a key"), "given, expected a model: Unrecognized model"),
    ],
)
def test_what_a_library_raises_becomes_one_sentence(error, said):
    refused(lambda: (_ for _ in ()).throw(load_error(error, ID, "a model")), match=said)
    wrapped = OSError("There was a problem when trying to load")
    wrapped.__cause__ = error
    if not isinstance(error, (ValueError, MemoryError, RuntimeError)):
        refused(lambda: (_ for _ in ()).throw(load_error(wrapped, ID, "a model")), match=said)


def test_the_http_librarys_own_failure_is_no_network():
    # Which HTTP library the client uses differs from version to version.
    library = importlib.import_module(errors.HTTPError.__module__.split(".")[0])
    assert "no network" in str(load_error(library.ConnectError("no route"), ID, "a model"))


def test_offline_with_nothing_cached_says_so(hub_cache):
    refused(lambda: hub.commit_of(ID, None), match=f"{ID} is not on this disk and HF_HUB_OFFLINE is set")
    refused(lambda: hub.snapshot(ID, COMMIT), match=f"{ID} is not on this disk and HF_HUB_OFFLINE is set")


def test_the_command_line_says_what_is_missing_in_one_line_and_status_2(kvlib, hub_cache):
    status, _, said = kvlib("run", "--profile", "paper")
    assert (
        status == 2 and "device cuda given, but torch" in said
    )  # before access is asked for and anything fetched
    status, _, said = kvlib("fetch", "--profile", "paper")
    assert status == 2 and "meta-llama/Llama-3.1-8B is not on this disk and HF_HUB_OFFLINE is set" in said


def test_a_partial_download_is_completed_or_named(small_pair, hub_cache, monkeypatch):
    whole, part = small_pair.places["target"], small_pair.home / "part"
    shutil.copytree(whole, part)
    last = sorted(part.glob("*.safetensors"))[-1]
    last.unlink()

    def downloaded(place, *, local_files_only=False, **_):
        return str(part if local_files_only or not hub_cache.exists() else whole)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", downloaded)
    monkeypatch.setattr(hub.HfApi, "repo_info", lambda *_, **__: SimpleNamespace(siblings=[]))
    refused(lambda: hub.snapshot(ID, COMMIT), match=f"{ID}: {last.name} .* is missing.*download it again")
    hub_cache.mkdir()
    assert hub.snapshot(ID, COMMIT) == whole


def test_a_local_folder_with_a_missing_or_truncated_file_is_named(small_run, small_pair):
    run = small_run()
    first = sorted(small_pair.places["source"].glob("*.safetensors"))[0]
    content = first.read_bytes()
    first.write_bytes(content[:-64])
    refused(lambda: models.load_pair_model(run, "source"), match=f"{first.name} .* is cut short")
    first.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(lambda: models.load_pair_model(run, "source"), match=f"{first.name} .* no safetensors file")
    first.unlink()
    refused(lambda: models.load_pair_model(run, "source"), match=f"{first.name} .* is missing")
    first.write_bytes(content)
    models.load_pair_model(run, "source")
    (small_pair.places["source"] / "model.safetensors.index.json").write_text("{")
    refused(lambda: models.load_pair_model(run, "source"), match="index.json cannot be read")


def test_a_disk_without_room_is_said_before_the_download(hub_cache, monkeypatch):
    files = [
        SimpleNamespace(rfilename="model-00001-of-00001.safetensors", size=16_000_000_000),
        SimpleNamespace(rfilename="original/consolidated.00.pth", size=16_000_000_000),
    ]
    monkeypatch.setattr(hub.HfApi, "repo_info", lambda *_, **__: SimpleNamespace(siblings=files))
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: SimpleNamespace(free=9_000_000_000))
    refused(lambda: hub.require_space(ID, COMMIT), match="9.0 GB free and 16.0 GB are still to be downloaded")
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: SimpleNamespace(free=18_000_000_000))
    hub.require_space(ID, COMMIT)


def test_too_little_memory_is_said_before_the_weights_are_read(small_run, monkeypatch):
    run = small_run()
    monkeypatch.setattr(headroom.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    refused(
        lambda: models.load_pair_model(run, "target"),
        match="GiB in bfloat16 and this machine has 0.0 GiB free",
    )


def test_a_card_that_is_not_there_is_said_before_anything_is_fetched(small_run, monkeypatch):
    run = small_run(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(lambda: run_pair(run), match="device cuda given, but .* expected a CUDA device")
    assert not (run.stage("pair") / "articles").exists()


@pytest.mark.parametrize("role", ["target", "source"])
def test_too_few_positions_in_either_model_are_said_before_any_text_is_read(small_run, small_pair, role):
    config = small_pair.places[role] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 200}))
    run = small_run()
    refused(
        lambda: run_pair(run), match=f"longest of latency.prefix_tokens is 256, the {role} has 200 positions"
    )
    assert not (run.stage("pair") / "articles").exists()
    refused(lambda: check_lengths(run), match="200 at most")


def test_a_source_with_another_tokenizer_is_refused(small_run, small_pair):
    other = byte_tokenizer(["other words entirely, zebra quagga"], words=300)
    place = save_model(small_pair.home / "other", config_of("llama", 48, 400), other, 3)
    refused(lambda: run_pair(small_run({**small_pair.places, "source": place})), match="differ in tokenizer")


def test_a_renamed_reserved_token_is_no_other_tokenizer(small_run, small_pair):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = small_pair.places["source"] / name
        path.write_text(path.read_text().replace("<|end_of_text|>", "<|reserved_0|>"))
    assert run_pair(small_run())["gate"]["passed"]


def test_the_library_loads_a_revision_and_says_what_is_wrong_with_an_id():
    refused(lambda: load_model(ID, revision="v2"), match=f"{ID} .*(no network|not on this disk)")
    with pytest.raises(KvlibError) as error:
        load_tokenizer("no/such/path/anywhere")
    assert is_one_sentence(error.value)
