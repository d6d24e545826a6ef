"""Records as a page: one HTML file with everything in it, for a browser without a network."""

from gradwire.report.page import ReportUnavailable, check_plotly, render_page

__all__ = ["ReportUnavailable", "check_plotly", "render_page"]
