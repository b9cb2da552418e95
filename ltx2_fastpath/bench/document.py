"""The results as one JSON document: where they were measured, how, and every median with the raw values behind it."""

import json
import os
import re
import time
from pathlib import Path

from ltx2_fastpath.environment import environment

SCHEMA = 1  # raised when the meaning of a key changes


def new(command: str, options: dict) -> dict:
    """A document without sections, and not complete until the benchmark says so at its end."""
    return {
        "schema": SCHEMA,
        "command": command,
        "options": options,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": environment(),
        "complete": False,
        "sections": [],
    }


def save(document: dict, path: Path) -> None:
    """Write `document` so that the file holds either the old or the new one, whenever the process is killed."""
    text = json.dumps(document, indent=1)
    text = re.sub(r"\[[\d.,e\s-]+\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text)  # lists of numbers on one line
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text + "\n")
    os.replace(draft, path)
