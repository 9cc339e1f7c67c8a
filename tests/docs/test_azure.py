"""What README says of Azure's conversations, by the command that it shows, on the same requests out of another file."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from pykv.cli.main import main

ROOT = Path(__file__).parents[2]
WASTE = ["0.925", "0.121", "0.006"]
PICTURE = ROOT / "docs/pictures/memory-azure.svg"
(COMMAND,) = re.findall(
    r"^pykv (replay AzureLLM(?:.|\n)+?)\n```$", (ROOT / "README.md").read_text(), re.MULTILINE
)


def azure_csv(path: Path, trace: Path) -> None:
    """The public file, whose times the trace has rounded."""
    start = datetime(2023, 11, 16, 18, 15, 46)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    with gzip.open(trace, "rt") as file:
        next(file)
        for row in map(json.loads, file):
            lines.append(f"{start + timedelta(seconds=row['ts'])},{row['in']},{row['out']}")
    path.write_text("\n".join(lines))


def test_the_picture_of_azure_is_what_its_command_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    shared = next(
        (folder / "shared/traces" for folder in ROOT.parents if (folder / "shared/traces").is_dir()), None
    )
    if shared is None:
        pytest.skip("../shared/traces is not there")
    azure_csv(tmp_path / "AzureLLMInferenceTrace_conv.csv", shared / "azure2023_conv.jsonl.gz")
    (tmp_path / "docs/pictures").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(COMMAND.replace("\\\n", " "))) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [share in row.split() for share, row in zip(WASTE, rows, strict=True)] == [True] * 3
    assert (tmp_path / "docs/pictures/memory-azure.svg").read_bytes() == PICTURE.read_bytes()


def test_readme_says_what_the_picture_shows() -> None:
    picture = PICTURE.read_text()
    assert [f"{share} % empty" in picture for share in ("92.5", "12.1", "0.6")] == [True] * 3
    assert "92.5 % empty (12.1 %" in (ROOT / "README.md").read_text()
