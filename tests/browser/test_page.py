"""The report page as a real browser shows it."""

import re
import shutil
import subprocess
from html import unescape

import pytest

from gradwire.headroom import give_verdict
from gradwire.report import render_page
from tests.report_records import EVIL, measured, tuned

pytestmark = pytest.mark.browser


def shown(text, folder):
    """Return the document after its scripts have run."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert browser, "no Chromium here: apt install chromium"
    (folder / "page.html").write_text(text)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    profile = f"--user-data-dir={folder / 'profile'}"
    return subprocess.run(
        [
            browser,
            *options,
            profile,
            "--virtual-time-budget=10000",
            "--dump-dom",
            f"file://{folder}/page.html",
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout


def test_a_browser_shows_the_verdict_and_draws_the_charts(tmp_path):
    slow = measured(link="100mbit")
    document = shown(render_page([slow, measured(link="1gbit", workload=EVIL), tuned()]), tmp_path)
    (verdict,) = re.findall(r'id="verdict-0">(.*?)</span>', document)
    assert unescape(verdict) == give_verdict(slow)
    # One drawing in each chart's place; in the first, three bars for each of four rows.
    assert len(re.findall(r'<svg[^>]* class="drawn"', document)) == 9
    first = document.partition('id="steps-0"')[2].partition("<table")[0]
    assert len(re.findall(r'<rect[^>]* class="point"', first)) == 12
    assert "compute</title>" in first
    assert "exposed communication" in first
    # Two times before decisions, two that were expected, and one that came.
    decided = document.partition('id="decisions-2-0"')[2].partition("<script")[0]
    assert len(re.findall(r"<circle", decided)) == 5
    assert "<img" not in document.replace("&lt;img", "")
