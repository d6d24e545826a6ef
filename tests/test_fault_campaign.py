"""Planted faults: every other rank ends with an error that names the rank that failed."""

import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parent.parent / "benchmarks" / "faults.py"


def plant(*options):
    """Run the campaign; fail with what it has printed unless every verdict is good."""
    done = subprocess.run(
        [sys.executable, CAMPAIGN, *options], check=False, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_faults_that_once_went_wrong_end_every_survivor_with_the_origin():
    assert "| all | 10 | 0 | 0 | 0 | 0 |" in plant("--named", "--jobs", "3")


@pytest.mark.full
def test_random_faults_end_every_survivor_with_the_origin():
    plant("--faults", "40", "--jobs", "3")
