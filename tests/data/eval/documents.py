"""The documents of the tasks here, for the harness's `custom_dataset`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets


def load(*, file: str, **metadata: Any) -> dict[str, datasets.Dataset]:
    """The lines of a .jsonl beside this module as the split "test"; `metadata` says nothing."""
    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}
