"""A stage whose host vanishes: nothing ends its connection, so TCP has to find out. Two network namespaces and a cable that is cut."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENDS = """
import subprocess, sys, time
import numpy as np
from runtime.stage_link import Link, StageLost, accept, connect, listen
if sys.argv[1] == "other":
    link = Link(connect("10.9.0.1", 5555, 10.0), "stage 0", 60.0)
    time.sleep(60)
link = Link(accept(listen("10.9.0.1", 5555), lambda: None)[0], "stage 1", 60.0)
time.sleep(1.0)
subprocess.run(["ip", "link", "set", "va", "down"], check=True)
begun = time.monotonic()
try:
    if sys.argv[1] == "idle":
        while link.lost() is None:
            time.sleep(0.05)
        raise StageLost(link.lost())
    if sys.argv[1] == "send":
        link.send(5, np.zeros(1000, np.uint8))
    link.receive()
except StageLost as lost:
    print(f"{time.monotonic() - begun:.1f} s: {lost}")
"""
CABLE = """
set -e
ip link set lo up
unshare -n sleep 60 & there=$!
sleep 0.3
ip link add va type veth peer name vb
ip link set vb netns $there
ip addr add 10.9.0.1/24 dev va; ip link set va up
nsenter -t $there -n sh -c "ip addr add 10.9.0.2/24 dev vb; ip link set vb up"
"$1" -c "$2" "$3" & here=$!
nsenter -t $there -n "$1" -c "$2" other & far=$!
wait $here
kill $far $there
"""


def can_unshare() -> bool:
    tools = all(shutil.which(name) for name in ("ip", "unshare", "nsenter"))
    return tools and subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False, timeout=10).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="needs the right to make network namespaces, and ip")
@pytest.mark.parametrize("how", ["idle", "wait", "send"])
def test_a_host_that_vanishes_is_noticed_within_7_s(how: str) -> None:
    command = ["unshare", "-n", "bash", "-c", CABLE, "bash", sys.executable, ENDS, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=ROOT, check=False)
    seconds, _, why = done.stdout.partition(" s: ")
    print(done.stdout + done.stderr)
    assert float(seconds) < 7 and "stage 1 has gone" in why
