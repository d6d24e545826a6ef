"""The lab: hosts, links with a rate, commands and ranks on them, and nothing left behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from gradwire.cli import app
from gradwire.headroom import read_records
from gradwire.lab import Lab, format_delay, format_rate, parse_delay, parse_rate, relay
from gradwire.testing import run_ranks
from tests.lab_machine import needs_lab


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_rates_are_read_as_people_write_them():
    assert [parse_rate(text) for text in ("100mbit", "1 Gbit/s", "2.5gbit", "64kbit")] == [
        1e8,
        1e9,
        2.5e9,
        6.4e4,
    ]
    assert parse_rate(format_rate(2.5e9)) == 2.5e9
    for text in ("fast", "100", "0mbit", "-1gbit", "1gb"):
        with pytest.raises(ValueError, match="such as 100mbit"):
            parse_rate(text)


def test_a_rate_or_a_delay_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="a rate is text, such as '100mbit', not 100"):
        parse_rate(100)
    with pytest.raises(TypeError, match="a delay is text, such as '20ms', not 0.02"):
        parse_delay(0.02)


def sum_and_time(rank):
    """Return a sum over ranks, the local rank, and when the sum began and ended by the machine's clock."""
    values = torch.full((500_000,), float(rank))
    dist.barrier()
    begin = time.monotonic()
    dist.all_reduce(values)
    return values[0].item(), os.environ["LOCAL_RANK"], begin, time.monotonic()


def duration_s(results):
    """Return the seconds from the first rank's begin to the last one's end, in which all bytes have moved."""
    _, _, begins, ends = zip(*results, strict=True)
    return max(ends) - min(begins)


@needs_lab
def test_ranks_on_the_hosts_of_a_lab_talk_over_its_links():
    with Lab(hosts=3, rate="50mbit") as lab:
        before = [lab.bytes_sent(host) for host in range(3)]
        results = run_ranks(sum_and_time, 3, lab=lab)
        sent = [lab.bytes_sent(host) - old for host, old in enumerate(before)]
    assert [result[:2] for result in results] == [(3.0, "0")] * 3
    # A ring of three sends 4/3 of 2 MB: 0.43 s at 50 Mbit/s, and nothing gets around the limit.
    assert all(2.6e6 < count < 3.5e6 for count in sent)
    assert duration_s(results) > 0.35


@needs_lab
def test_a_slow_link_takes_a_whole_tcp_segment_with_the_headers_of_its_packets(capfd):
    with Lab(hosts=1, rate="10mbit") as lab:
        assert lab.run(["tc", "qdisc", "show", "dev", "eth0"]) == 0
    (burst,) = re.findall(r"burst (\d+)Kb", capfd.readouterr().out)
    num_packets = -(-65536 // 1448)
    assert int(burst) * 1024 >= 65536 + num_packets * 66


@needs_lab
def test_links_change_their_rate_while_a_lab_runs(capfd):
    with Lab(hosts=2, rate="50mbit") as lab:
        lab.set_rate("80mbit")
        assert lab.run(["tc", "qdisc", "show", "dev", "eth0"]) == 0
        assert str(lab) == "2 hosts, 80mbit"
        with pytest.raises(ValueError, match="such as 100mbit"):
            lab.set_rate("fast")
    assert capfd.readouterr().out.count("rate 80Mbit") == 2


def test_delays_are_read_as_people_write_them():
    assert [parse_delay(text) for text in ("20ms", "0.1 s", "500us")] == [0.02, 0.1, 0.0005]
    assert [format_delay(s) for s in (0.02, 0.0005, 1.5)] == ["20ms", "500us", "1.5s"]
    for text in ("far", "20", "0ms", "-1ms", "1h", "61s"):
        with pytest.raises(ValueError, match="such as 20ms"):
            parse_delay(text)


@needs_lab
def test_a_delay_holds_every_packet_back_and_loses_none():
    with Lab(hosts=3, rate="50mbit", delay="60ms") as lab:
        assert str(lab) == "3 hosts, 50mbit, 60ms long"
        results = run_ranks(sum_and_time, 3, lab=lab)
    assert [result[:2] for result in results] == [(3.0, "0")] * 3
    # 0.43 s for the bytes, and a ring of three passes them on four times.
    assert duration_s(results) > 0.35 + 4 * 0.06


@needs_lab
def test_every_host_has_an_address_and_torchruns_environment(tmp_path):
    script = 'echo "$RANK/$WORLD_SIZE $MASTER_ADDR $(ip -4 -br address show eth0)" > $FOLDER/$RANK'
    with Lab(hosts=2) as lab, Lab(hosts=1) as other:
        assert lab.run(["sh", "-c", script], env={"FOLDER": str(tmp_path)}) == 0
        assert other.run(["true"]) == 0
        # With one id, NCCL would bypass the links.
        assert len({lab.environment(host)["NCCL_HOSTID"] for host in range(2)}) == 2
    for host in range(2):
        fields = (tmp_path / str(host)).read_text().split()
        assert fields[:2] == [f"{host}/2", "10.77.0.1"]
        assert fields[-2] == f"10.77.0.{host + 1}/16" or fields[-1] == f"10.77.0.{host + 1}/16"


@needs_lab
def test_the_first_failure_ends_the_other_hosts_and_is_the_exit_code(tmp_path):
    script = f"test $RANK = 1 && exit 7; sleep 600; touch {tmp_path / 'slept'}"
    assert run("lab", "--hosts", "2", "--", "sh", "-c", script).exit_code == 7
    assert not (tmp_path / "slept").exists()
    assert run("lab", "--", "sh", "-c", "kill -9 $$").exit_code == 128 + signal.SIGKILL
    assert run("lab", "true").exit_code == 0


@needs_lab
def test_a_command_that_does_not_end_is_ended_at_the_timeout():
    with Lab(hosts=1) as lab, pytest.raises(subprocess.TimeoutExpired):
        lab.run(["sleep", "600"], timeout=0.2)


@needs_lab
def test_headroom_sweeps_over_links(tmp_path):
    path = tmp_path / "sweep.json"
    sizes = ["--width", "64", "--layers", "1", "--sequence", "4", "--steps", "2", "--recipe", "bf16"]
    result = run("headroom", *sizes, "--link", "5mbit,1gbit", "--json", str(path))
    assert result.exit_code == 0, result.output
    slow, fast = read_records(path.read_text())
    assert (slow.link, fast.link) == ("5mbit", "1gbit")
    # 200 kB of gradients take 320 ms at 5 Mbit/s, of which the token bucket lets 64 KiB pass at once. At
    # 1 Gbit/s they may take as long on a busy machine.
    assert min(slow.allreduce.samples_ms) > 200
    assert "links of 5mbit" in result.stdout


def sleepers(marker):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker in path.read_text().split("\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def wait_until(condition, seconds=180):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_lab
def test_nothing_survives_the_end_of_the_lab_however_it_ends():
    ways = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    markers = [f"60{os.getpid()}{how.value}" for how in ways]  # seconds that nobody else sleeps
    parents = [start_sleepers(marker) for marker in markers]
    try:
        for marker in markers:
            wait_until(lambda marker=marker: len(sleepers(marker)) == 4)
        for parent, how in zip(parents, ways, strict=True):
            parent.send_signal(how)
        wait_until(lambda: not any(map(sleepers, markers)))
        assert all(parent.wait(120) != 0 for parent in parents)
    finally:
        for parent in parents:
            parent.kill()


def start_sleepers(marker):
    """Start a program with a lab of two hosts, and two sleepers on each, one in its own session."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from gradwire.lab import Lab\n"
        f"with Lab(2) as lab: lab.run(['sh', '-c', 'sleep {marker} & setsid sleep {marker}; wait'])"
    )
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)


def test_without_iproute2_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("gradwire.lab.network.shutil.which", lambda *args, **kwargs: None)
    result = run("lab", "true")
    assert result.exit_code == 1
    assert "apt install iproute2" in result.stderr


def test_without_the_right_to_make_namespaces_the_error_says_what_to_grant(monkeypatch):
    def refuse():
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("gradwire.lab.network.find_tools", lambda: "/usr/sbin/ip")
    monkeypatch.setattr("gradwire.lab.network.Namespace", refuse)
    result = run("lab", "true")
    assert result.exit_code == 1
    assert "run it as root" in result.stderr
    assert "--cap-add SYS_ADMIN" in result.stderr


@needs_lab
def test_wrong_arguments_are_explained():
    assert run("lab", "--rate", "fast", "true").exit_code == 2
    assert "such as 100mbit" in run("lab", "--rate", "fast", "true").stderr
    assert "such as 20ms" in run("lab", "--delay", "far", "true").stderr
    assert "at most 60s, not '61s'" in run("lab", "--delay", "61s", "true").stderr
    assert run("lab", "no-such-command").exit_code == 127
    assert run("lab").exit_code == 2
    with Lab(hosts=2) as lab:
        with pytest.raises(ValueError, match="there is no host 2; the hosts are 0 to 1"):
            lab.bytes_sent(2)
        with pytest.raises(ValueError, match="there is no host -1"):
            lab.path(-1)
        with pytest.raises(ValueError, match="3 ranks cannot be spread evenly over the 2 hosts"):
            run_ranks(sum_and_time, 3, lab=lab)
    with pytest.raises(ValueError, match="this lab is closed"):
        lab.bytes_sent(0)
    with pytest.raises(ValueError, match="1 to 4096 hosts"):
        Lab(hosts=0)


def host_and_place(rank):
    """Return the address of this rank's host, and its place there as torchrun would tell it."""
    ours = subprocess.run(
        ["ip", "-4", "-o", "addr", "show", "eth0"], capture_output=True, text=True, check=True
    )
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    names = "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"
    return ours.stdout.split()[3], [os.environ[name] for name in names], total.item()


@needs_lab
def test_a_host_can_have_several_ranks():
    with Lab(hosts=2) as lab:
        found = run_ranks(host_and_place, 4, lab=lab)
    addresses, places, totals = zip(*found, strict=True)
    assert addresses[0] == addresses[1] != addresses[2] == addresses[3]
    assert list(places) == [["0", "2", "0"], ["1", "2", "0"], ["0", "2", "1"], ["1", "2", "1"]]
    assert totals == (6.0,) * 4


def test_a_link_with_a_delay_loses_the_frames_for_which_there_is_no_room(monkeypatch):
    monkeypatch.setattr(relay, "_MAX_WAITING", 2)
    (near, near_end), (far, far_end) = (socket.socketpair(type=socket.SOCK_SEQPACKET) for _ in range(2))
    parent, lifeline = os.pipe()
    with near, near_end, far, far_end:
        far.settimeout(60)
        ends = {near_end.fileno(): far_end.fileno(), far_end.fileno(): near_end.fileno()}
        for end in ends:
            os.set_blocking(end, False)
        for frame in (b"first", b"second", b"third"):
            near.send(frame)
        thread = threading.Thread(target=relay.relay, args=(ends, 0.01, parent), daemon=True)
        thread.start()
        assert [far.recv(16), far.recv(16)] == [b"first", b"second"]
        near.send(b"fourth")
        assert far.recv(16) == b"fourth"
        os.close(lifeline)
        thread.join()
    os.close(parent)
