"""Trajectories for people: as a conversation, as a tree, in a terminal, in a notebook."""

from art_core.views.html import group_html, trajectory_html
from art_core.views.messages import conversation
from art_core.views.terminal import group_view, trajectory_view
from art_core.views.text import rendered
from art_core.views.tree import TreeNode, call_tree

__all__ = [
    "TreeNode",
    "call_tree",
    "conversation",
    "group_html",
    "group_view",
    "rendered",
    "trajectory_html",
    "trajectory_view",
]
