"""The report of a run: one HTML file to keep, to send, to print."""

from art_core.observe.report.document import report_html, write_report

__all__ = ["report_html", "write_report"]
