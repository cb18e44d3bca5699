"""From a model's folder to a session: its graph in the form that the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specops.config import Settings
from specops.models.folder import ModelFolder
from specops.models.graph.weight_cache import prepacked_graph, used_bytes
from specops.runtime.session import Session, open_session

_FOREIGN_PRODUCTS = "specops.foreign_products"


@dataclass(frozen=True, slots=True)
class Graph:
    """A loaded graph.

    Attributes:
        folder: the model.
        session: see `specops.models.graph.rewrite` for its inputs.
        mapped_bytes: bytes of its weights, which lie in the page cache.
        foreign_products: names of the nodes whose products ONNX Runtime computes. Without any, a
            token's logits have the same bits whatever else is in its pass.
    """

    folder: ModelFolder
    session: Session
    mapped_bytes: int
    foreign_products: tuple[str, ...]


def load_graph(folder: ModelFolder, settings: Settings, report: Callable[[str], None]) -> Graph:
    """Open a model's graph, its weights mapped.

    Args:
        folder: the model.
        settings: see `Settings`.
        report: gets the names of slow steps.

    Raises:
        ModelError: the graph has an unknown form, or the cache folder cannot be written.
        ModelLoadError: ONNX Runtime refuses it.
    """
    name = f"{folder.name}-{folder.quant}"
    path = prepacked_graph(folder.graph, name, settings.cache_dir, report)
    report(f"opening {path}")
    session = open_session(path)
    foreign = session.get_modelmeta().custom_metadata_map.get(_FOREIGN_PRODUCTS, "")
    # The files hold more than that: the originals of packed weights, which no node reads.
    return Graph(folder, session, used_bytes(path.parent), tuple(filter(None, foreign.split(","))))
