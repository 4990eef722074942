"""The sample grid file: it contains every key with its default."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from pathlib import Path

import yaml

from genie.grid import own_wheel
from genie.grid.grid_file import GridFile, GridNode, parse_grid_file, read_sample_grid_file_text

ROOT = Path(__file__).resolve().parents[2]


def test_sample_has_the_documented_nodes_and_all_defaults() -> None:
    nodes = tuple(GridNode(name=name) for name in ("gpu1", "gpu2", "gpu3"))
    assert parse_grid_file(read_sample_grid_file_text(), name="sample") == GridFile(nodes=nodes)


def test_sample_has_every_key_with_a_comment() -> None:
    sample = yaml.safe_load(read_sample_grid_file_text())
    defaults = dataclasses.asdict(GridFile(nodes=()))
    defaults.pop("path")
    assert sample.keys() == defaults.keys()
    lines = read_sample_grid_file_text().splitlines()
    for section in ("ssh", "health_check", "sync", "ray"):
        assert sample[section].keys() == defaults[section].keys()
        for name in sample[section]:
            found = [each for each in lines if each.startswith(f"  {name}:")]
            assert found and all(" # " in line for line in found), found


def test_genie_wheel_contains_the_sample_file() -> None:
    with zipfile.ZipFile(io.BytesIO(own_wheel.build_genie_wheel()[1])) as wheel:
        assert wheel.read("genie/grid/config/cluster_config.yaml").decode() == read_sample_grid_file_text()


def test_documentation_shows_the_values_of_the_sample() -> None:
    page = (ROOT / "docs/GRID.md").read_text()
    shown = page.partition("```yaml\n")[2].partition("```")[0]
    given = parse_grid_file(shown, name="docs/GRID.md")
    assert dataclasses.replace(given, nodes=()) == GridFile(nodes=())
