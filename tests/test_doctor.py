"""`gradwire doctor`, and the first words that a user types."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from gradwire.cli import app
from gradwire.doctor import (
    Finding,
    Link,
    compare_links,
    examine_group,
    examine_machine,
    machine,
    measure_links,
    reach,
)
from gradwire.lab import network
from gradwire.processes import rank_environment
from gradwire.torch_private import default_store


def invoke(*arguments, **options):
    return CliRunner().invoke(app, list(arguments), prog_name="gradwire", **options)


def texts(findings, level):
    return " ".join(finding.text for finding in findings if finding.level == level)


def test_the_command_alone_says_what_to_do_next():
    result = invoke()
    assert result.exit_code == 0
    for words in ("gradwire doctor", "gradwire headroom", "gradwire run", "gradwire.attach(", "--help"):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["hedroom"], "gradwire: there is no command hedroom; did you mean headroom? See gradwire --help"),
        (
            ["headroom", "--rcipe", "x"],
            "there is no option --rcipe; did you mean --recipe? See gradwire headroom",
        ),
        (["headroom", "--ranks", "0"], "gradwire headroom: --ranks: "),
        (["headroom", "--ranks", "many"], "gradwire headroom: --ranks: "),
        (
            ["headroom", "--json"],
            "gradwire headroom: option '--json' requires an argument; see gradwire head",
        ),
        (
            ["headroom", "--json", "--quiet"],
            "--json takes a file, and --quiet is an option: write --json FILE",
        ),
        (["doctor", "--json", "--help"], "--json takes a file, and --help is an option"),
        (["recipes", "int8"], "gradwire recipes: it does not take: int8; see gradwire recipes --help"),
    ],
)
def test_wrong_words_are_told_in_one_line(arguments, told):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_shell_can_complete_the_commands():
    result = invoke(
        env={"_GRADWIRE_COMPLETE": "complete_bash", "COMP_WORDS": "gradwire he", "COMP_CWORD": "1"}
    )
    assert result.stdout.split() == ["headroom"]


def test_the_machine_is_examined_and_told_as_json():
    result = invoke("doctor", "--json", "-")
    findings = json.loads(result.stdout)["findings"]
    assert {"versions", "devices", "network", "kernels", "tools", "limits"} <= {
        each["topic"] for each in findings
    }
    assert result.exit_code == int(any(each["level"] == "problem" for each in findings))
    assert "problem" in result.stderr


def test_a_file_that_cannot_be_written_is_told_first(tmp_path):
    result = invoke("doctor", "--json", str(tmp_path / "none" / "found.json"))
    assert result.exit_code == 2
    assert "gradwire doctor: --json: cannot write" in result.stderr


def test_what_would_go_wrong_is_a_problem_with_advice(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    monkeypatch.setattr(machine, "_LITTLE_SHARED_MEMORY_BYTES", 1 << 60)
    findings = examine_machine()
    problems = [finding for finding in findings if finding.level == "problem"]
    assert {finding.topic for finding in problems} >= {"kernels", "network"}
    assert "eth99" in texts(findings, "problem")
    assert all(finding.advice for finding in problems)


def test_only_interfaces_that_others_may_reach_are_suggested(monkeypatch, tmp_path):
    for name, flags in {"lo": "0x9", "eth0": "0x1003", "ib0": "0x1043", "idle0": "0x1002"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "flags").write_text(f"{flags}\n")
    interfaces = list(enumerate(["lo", "eth0", "idle0", "ib0"], start=1))
    monkeypatch.setattr(machine, "_INTERFACES", tmp_path)
    monkeypatch.setattr(machine.socket, "if_nameindex", lambda: interfaces)
    monkeypatch.setattr(machine, "own_address", lambda: "127.0.1.1")
    (advice,) = [each.advice for each in examine_machine() if "which other machines cannot" in each.text]
    assert advice == "on several machines, set GLOO_SOCKET_IFNAME to eth0 or ib0"


def test_tools_that_the_lab_finds_are_not_called_missing(monkeypatch, tmp_path):
    for name in ("ip", "tc"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(network, "SYSTEM_FOLDERS", ())
    assert "no iproute2" in texts(examine_machine(), "note")
    monkeypatch.setattr(network, "SYSTEM_FOLDERS", (str(tmp_path),))
    assert "no iproute2" not in texts(examine_machine(), "note")


def test_a_slow_link_stands_out():
    links = [Link((0, 1), 0.1, 1000.0), Link((0, 2), 0.1, 990.0), Link((1, 2), 0.1, 90.0)]
    findings = compare_links(links)
    assert "ranks 1 - 2: 0.100 ms, 90 Mbit/s" in texts(findings, "problem")
    assert [finding.level for finding in compare_links(links[:2])] == ["ok"]
    late = compare_links([*links[:2], Link((1, 2), 5.0, 1000.0)])
    assert "5.000 ms" in texts(late, "problem")


def job_group(rank):
    own = [Finding("tools", "note", "only here")] if rank == 1 else []
    findings = examine_group(default_store(), rank, 3, own)
    assert "every rank reaches every other: 3 ranks on 1 host(s)" in texts(findings, "ok")
    assert "all 3 ranks have gradwire" in texts(findings, "ok")
    assert texts(findings, "note") == "only here"
    links = measure_links(reach.torch.device("cpu"))
    assert [link.ranks for link in links] == [(0, 1), (0, 2), (1, 2)]
    assert all(link.latency_ms > 0 and link.mbit_per_s > 0 for link in links)
    everyone = [None] * 3
    dist.all_gather_object(everyone, links)
    assert everyone == [links] * 3


def job_unreachable(rank):
    reach._CONNECT_S = 120.0  # a rank that stands still answers all the same
    reach._advertised = lambda: "127.0.0.1" if rank else "127.0.0.1:wrong"
    reach.__version__ = "0.0.9" if rank == 2 else reach.__version__
    findings = examine_group(dist.PrefixStore("unreachable", default_store()), rank, 3)
    problems = texts(findings, "problem")
    assert "versions differ: " in problems
    assert "gradwire 0.0.9" in problems
    assert "rank 1 on " in problems
    assert "cannot reach rank(s) 0 (127.0.0.1:wrong): " in problems
    assert "cannot reach rank(s) 1" not in problems


@pytest.mark.full
def test_ranks_that_reach_each_other_are_measured(three_ranks):
    three_ranks.run(job_group)


def test_a_rank_that_nobody_reaches_is_named(three_ranks):
    three_ranks.run(job_unreachable)


@pytest.mark.full
def test_under_torchrun_rank_0_tells_about_all(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = tmp_path / "found.json"
    done = subprocess.run(
        [*command, "-m", "gradwire", "doctor", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every rank reaches every other") == 1
    (link,) = json.loads(path.read_text())["links"]
    assert link["ranks"] == [0, 1]


# A test run in the background has told its children to ignore it.
CTRL_C_ENDS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def test_ctrl_c_ends_a_rank_that_waits_for_a_store_which_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        told = rank_environment(1, 2, local_rank=1, local_world_size=2, address="127.0.0.1", port=port)
        source = f"{CTRL_C_ENDS}import sys; from gradwire.cli import main; sys.argv[1:] = ['doctor']; main()"
        with subprocess.Popen(
            [sys.executable, "-c", source],
            env={**os.environ, **told, "TORCHELASTIC_RUN_ID": "none"},
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                store.settimeout(100)
                connection, _ = store.accept()
                with connection:
                    process.send_signal(signal.SIGINT)
                    _, said = process.communicate(timeout=100)
            finally:
                process.kill()
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "gradwire doctor: interrupted"
    assert "Traceback" not in said
