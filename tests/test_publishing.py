"""Workflows, citation, changelog and contributing notes: what they name exists, and what they promise is what runs."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import kvlib
from kvlib.study.profile import profile_names

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
HOSTS = re.compile(r"https?://")


def steps(workflow: Path) -> list[dict]:
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]


def scripts(workflow: Path) -> list[str]:
    return [step["run"] for step in steps(workflow) if "run" in step]


def triggers(workflow: Path) -> dict:
    return yaml.safe_load(workflow.read_text())[True]  # `on`, which YAML 1.1 reads as true


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_target_and_command_that_a_workflow_runs_exists(workflow):
    from kvlib.cli import app

    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    text = "\n".join(scripts(workflow))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    assert set(re.findall(r"-m kvlib ([a-z]+)", text)) <= commands
    assert not [name for name in re.findall(r"PROFILE=([a-z]+)", text) if name not in profile_names()]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_person_types_into_a_workflow_is_never_part_of_a_script(workflow):
    assert not [script for script in scripts(workflow) if "${{" in script]
    assert all(
        re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in steps(workflow) if "uses" in step
    )
    assert yaml.safe_load(workflow.read_text())["permissions"]["contents"] == "read"
    assert all(job["timeout-minutes"] for job in yaml.safe_load(workflow.read_text())["jobs"].values())


def test_every_change_builds_the_smoke_book_keeps_it_and_runs_the_tests():
    workflow = ROOT / ".github" / "workflows" / "check.yml"
    assert set(triggers(workflow)) == {"push", "pull_request"}
    assert "make book PROFILE=smoke" in scripts(workflow) and ".ci/run" in scripts(workflow)
    kept = [
        step["with"]["path"]
        for step in steps(workflow)
        if step.get("uses", "").startswith("actions/upload-artifact")
    ]
    assert "results/smoke/book\n" in kept[0]


def test_a_named_run_is_published_by_hand():
    workflow = ROOT / ".github" / "workflows" / "publish.yml"
    inputs = triggers(workflow)["workflow_dispatch"]["inputs"]
    assert set(triggers(workflow)) == {"workflow_dispatch"}
    assert {"profile", "run"} <= set(inputs) and set(inputs["profile"]["options"]) <= set(profile_names())
    assert [s["uses"].split("@")[0] for s in steps(workflow) if "pages" in s.get("uses", "")] == [
        "actions/upload-pages-artifact", "actions/deploy-pages",
    ]  # fmt: skip


def test_one_version_stands_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == kvlib.__version__ == str(cited["version"])
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert project["license"] == cited["license"]


def test_the_citation_has_what_its_schema_requires():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and cited["message"] and cited["title"]
    assert cited["authors"] and all("name" in one or "family-names" in one for one in cited["authors"])
    assert cited["authors"][0]["name"] in (ROOT / "LICENSE").read_text()


def test_contributing_notes_name_what_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:kvlib|book|tests|notebooks)/[a-z_/.]*)`", text)
    assert len(named) > 8 and not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize(
    "name",
    ["CITATION.cff", "CONTRIBUTING.md", "CHANGELOG.md", *(f".github/workflows/{p.name}" for p in WORKFLOWS)],
)
def test_no_address_is_made_up(name):
    assert not HOSTS.search((ROOT / name).read_text())
