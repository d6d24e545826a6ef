"""Check that the verdict of `gradwire headroom` comes true in a script that knows nothing of gradwire.

python benchmarks/promise.py                   # root and iproute2; two minutes
python benchmarks/promise.py --link 300mbit

1. `gradwire headroom --link 100mbit … -- examples/train.py` says what to use, and what that gains.
2. In `gradwire lab --rate 100mbit` the script runs to its end, as it is and by `gradwire run`
   with that recipe; it times itself.
Ends with 1 if nothing was recommended, or if the gain is more than 15 % off.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(__file__).parent.parent / "examples" / "train.py")
GRADWIRE = [sys.executable, "-m", "gradwire"]
RECIPES = ("bf16", "int8", "int4")
WITHIN = 0.15


def say(command: list[str]) -> None:
    names = {sys.executable: "python", SCRIPT: "examples/train.py"}
    text = " ".join(names.get(word, word) for word in command)
    print("$", text.replace("python -m gradwire", "gradwire"), flush=True)


def ask(link: str) -> tuple[str, float]:
    """Return the recommended recipe and its promised gain."""
    recipes = [word for recipe in RECIPES for word in ("--recipe", recipe)]
    command = [*GRADWIRE, "headroom", "--link", link, *recipes, "--steps", "8", "--json", "-", "--", SCRIPT]
    say(command)
    record = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    if record["recommended"] is None:
        sys.exit("nothing was recommended")
    recipe = record["recommended"]["recipe"]
    return recipe, next(row["gain"] for row in record["rows"] if row["recipe"] == recipe)


def step_ms(link: str, *before: str) -> float:
    """Return the step time that the script prints."""
    command = [*GRADWIRE, "lab", "--rate", link, "--", *before, SCRIPT, "--steps", "15"]
    say(command)
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(printed, end="")
    (found,) = re.findall(r"([\d.]+) ms each", printed)
    return float(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--link", default="100mbit")
    link = parser.parse_args().link
    recipe, promised = ask(link)
    plain_ms = step_ms(link, sys.executable)
    kept = plain_ms / step_ms(link, *GRADWIRE, "run", "--recipe", recipe, "--")
    print(f"{recipe}: promised {promised:.2f}x as fast, measured {kept:.2f}x: {kept / promised - 1:+.1%}")
    sys.exit(abs(kept / promised - 1) > WITHIN)


if __name__ == "__main__":
    main()
