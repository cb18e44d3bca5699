"""From a draft head's folder to a drafter that reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable

from specops.config import Settings
from specops.models.folder import ModelError
from specops.models.graph.weight_cache import prepacked_graph
from specops.models.head_folder import HeadFolder
from specops.runtime.cost_model import CostModel
from specops.runtime.model_runner import DraftHead, ModelRunner
from specops.runtime.session import Session, open_session
from specops.speculation.drafters.head import HeadDrafter


def load_head(head: HeadFolder, settings: Settings, report: Callable[[str], None]) -> Session:
    """Open a draft head's graph, its weights mapped.

    Raises:
        ModelError: the graph's form for this processor cannot be written.
        ModelLoadError: ONNX Runtime does not take it.
    """
    path = prepacked_graph(head.graph, head.path.resolve().name, settings.cache_dir, report)
    report(f"opening {path}")
    return open_session(path)


def head_drafter(
    head: HeadFolder, graph: Session, target: ModelRunner, costs: CostModel
) -> HeadDrafter:
    """Have a head read the target's hidden states.

    Raises:
        ModelError, ModelLoadError: it was made for another model.
    """
    states = target.output_hidden_states()
    sizes = head.vocab_size, head.hidden_size
    if sizes != (target.vocab_size, target.hidden_size):
        raise ModelError(
            f"the draft head {head.path} was made for {head.target}, a model of {sizes[0]} tokens "
            f"and hidden states of {sizes[1]}; this one has {target.vocab_size} and "
            f"{target.hidden_size}. Make one with `specops draft make`, or set SPECOPS_DRAFT=none"
        )
    runs = DraftHead(
        graph,
        num_slots=target.cache.num_slots,
        hidden_size=head.hidden_size,
        table_size=len(head.tokens),
    )
    return HeadDrafter(runs, states, head.tokens, head.calibration, costs=costs)
