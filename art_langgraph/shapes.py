"""The shape of a compiled graph: its nodes and edges, subgraphs included, as plain data.

Invariant: asking for a shape runs nothing of the graph, and a graph whose shape cannot be told runs as ever.
"""

import logging
from typing import Any

from langgraph.pregel import Pregel

logger = logging.getLogger(__name__)

Shape = dict[str, Any]


def graph_shape(graph: object) -> Shape | None:
    """Nodes and edges of a compiled graph, for those who look at its rollouts later.

    Args:
        graph: anything that can be rolled out.

    Returns:
        What `art_core.sinks.GraphSink` keeps, with LangGraph's ids; None for what is no graph of LangGraph's.
    """
    if not isinstance(graph, Pregel):
        return None
    try:
        drawn = graph.get_graph(xray=True)
    except Exception as untold:  # users' schemas and subgraphs are asked, and may raise anything
        logger.warning("the graph's shape is not recorded: %s: %s", type(untold).__name__, untold)
        return None
    return {
        "nodes": list(drawn.nodes),
        "edges": [[edge.source, edge.target, edge.conditional] for edge in drawn.edges],
    }
