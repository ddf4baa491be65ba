"""`flatmin reproduce --engine ray` on two hosts that share no file system, one of which dies."""

import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'flatmin[ray]'")

from two_hosts import output, two_hosts

PORT = 6379
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start"]
NODE = ["--num-cpus=1", f"--object-store-memory={80 * 2**20}", "--disable-usage-stats", "--block"]
# Several hosts need a token that both know. Workers at a low priority would wait for whatever else runs here.
VARIABLES = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "RAY_worker_niceness": "0"}
REPRODUCE = [sys.executable, "-m", "flatmin.cli", "reproduce", "label-noise", "--scale", "smoke", "--runs", "runs"]


@pytest.fixture
def hosts():
    # Not in pytest's directory: Ray's sockets are in it, and their paths must not be long.
    with tempfile.TemporaryDirectory(prefix="fm-") as folder, two_hosts(Path(folder)) as found:
        yield found


def start_ray(host, *arguments):
    settings = VARIABLES | {"TMPDIR": str(host.path)}
    process = host.start([*RAY, f"--node-ip-address={host.address}", *arguments, *NODE], **settings)
    while "Ray runtime started" not in process.log.read_text():
        assert process.poll() is None, process.log.read_text()
        time.sleep(0.05)


def test_results_come_back_from_a_host_that_dies(hosts, tmp_path):
    first, second = hosts
    start_ray(first, "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={first.path}/ray")
    start_ray(second, f"--address={first.address}:{PORT}")
    runs = first.disk / "runs"
    seen = set()  # names of runs that the second host worked on

    def has_finished_one_and_works_on_another():
        now = {path.name for path in second.disk.glob("flatmin-*/*")}
        seen.update(now)
        return bool(now) and any((runs / name / "result.json").exists() for name in seen - now)

    sweep = first.start([*REPRODUCE, "--engine", "ray", "--address", f"{first.address}:{PORT}"], **VARIABLES)
    while not has_finished_one_and_works_on_another():
        assert sweep.poll() is None, sweep.log.read_text()
        time.sleep(0.002)
    second.kill()
    text = output(sweep)
    assert sweep.returncode == 0, text
    assert (runs / "report-smoke/index.html").exists()
    assert not (second.disk / "runs").exists()

    local = first.start([*REPRODUCE, "--processes", "1"], tmp_path)
    text = output(local)
    assert local.returncode == 0, text
    whole = {path.parent.name: path.read_bytes() for path in tmp_path.glob("runs/*/metrics.jsonl")}
    assert {path.parent.name: path.read_bytes() for path in runs.glob("*/metrics.jsonl")} == whole
    assert seen <= whole.keys()
    finished = {path.parent.name for path in runs.glob("*/result.json")}
    assert finished == whole.keys()
