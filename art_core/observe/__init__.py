"""Seeing what a run does: metrics, sinks, and pages."""
