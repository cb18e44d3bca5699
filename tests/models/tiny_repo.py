"""The tiny model on the hub of these tests."""

from pathlib import Path

from specops.models.hub import HubModel

REPO = "someone/tiny"
MODEL = HubModel(REPO)
NEEDED = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def ignore(done: int, total: int) -> None:
    """Ignore progress."""
