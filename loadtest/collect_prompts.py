"""Takes the code prompts of the load test from the demo pair's held-out text.

    python loadtest/collect_prompts.py

Neither model has seen that text, so guesses are as good as they would be on new code. The other
categories are written by hand and stay as they are in prompts.jsonl.
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent
HELD_OUT = FOLDER.parent / "api" / "models" / "demo" / "heldout.jsonl"
EVERY = 4  # enough lengths and files, and the other categories stay in sight


def main() -> None:
    """Rewrite prompts.jsonl."""
    prompts = FOLDER / "prompts.jsonl"
    kept = [json.loads(line) for line in prompts.read_text("utf-8").splitlines()]
    code = [json.loads(line) for line in HELD_OUT.read_text("utf-8").splitlines()][::EVERY]
    rows = [{"category": "code", "prompt": row["prompt"]} for row in code]
    rows += [row for row in kept if row["category"] != "code"]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


if __name__ == "__main__":
    main()
