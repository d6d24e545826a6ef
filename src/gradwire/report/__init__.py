"""Show records as a page: one HTML file with charts and tables, for a browser without a network.

Output to the terminal does not belong here.
"""

from gradwire.report.page import render_page

__all__ = ["render_page"]
