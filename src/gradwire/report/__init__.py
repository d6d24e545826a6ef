"""Show records as a page: one HTML file with charts and tables, for a browser without a network.

Output to the terminal does not belong here.
"""

from gradwire.report.page import ReportUnavailable, check_plotly, render_page

__all__ = ["ReportUnavailable", "check_plotly", "render_page"]
