"""Two hosts on this machine: network namespaces joined by a veth pair, each with its own disk (a mount namespace).

Both hosts see their disk under the same path, `Hosts.disk`, as real hosts do; the tests see it as `Host.disk`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PORT = 29400
PATIENCE_SECONDS = 300  # until a deadlock is called one


@dataclass
class Host:
    """One of the hosts, as root of this machine sees it."""

    namespace: str
    address: str
    disk: Path
    path: Path
    """Where the host itself sees its disk."""
    processes: list = field(default_factory=list)

    def start(self, command, **environment):
        """Start a command on the host; its output is in files, so that no pipe fills up."""
        # Nobody answers at the machine's name server from here, and each look-up would wait six seconds for it.
        nobody = self.disk / "resolv.conf"
        nobody.write_text("nameserver 127.0.0.1\n")
        script = f'mount --bind "{nobody}" /etc/resolv.conf && mount --bind "{self.disk}" "{self.path}" '
        script += f'&& cd "{self.path}" && exec "$@"'
        alone = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--propagation", "private"]
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "XDG_CACHE_HOME": str(self.path / "cache")}
        # torchrun does not tell a host that joins later where its shared store is (torch 2.13).
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        log = self.disk / f"output-{time.monotonic_ns()}"
        with log.open("w") as file:
            process = subprocess.Popen(
                [*alone, "sh", "-c", script, "sh", *map(str, command)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | variables | environment,
                start_new_session=True,
            )
        process.log = log
        self.processes.append(process)
        return process

    def kill(self):
        """End all processes of the host at once, as if the power failed."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def output(process):
    """Wait for a process, and return what it wrote."""
    try:
        process.wait(PATIENCE_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.log.read_text()


def torchrun(host, hosts, *arguments, restarts=0):
    """Return the command that trains on one of the hosts."""
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
    where += ["--rdzv-endpoint", f"{hosts[0].address}:{PORT}", "--local-addr", host.address]
    where += ["--rdzv-conf", f"is_host={int(host is hosts[0])},keep_alive_interval=1,keep_alive_max_attempt=3"]
    runner = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", str(restarts), "--monitor-interval=0.1"]
    return [*runner, *where, "-m", "flatmin.cli", "train", *arguments]


@contextmanager
def two_hosts(folder):
    """Yield two hosts; skip the test where namespaces are not permitted. Everything is removed afterwards."""
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two hosts need Linux, root and iproute2 (`ip netns`)")
    path = folder / "disk"
    path.mkdir()
    names = [f"flatmin-{os.getpid()}-{i}" for i in (1, 2)]
    hosts = []
    try:
        for number, name in enumerate(names, start=1):
            disk = folder / f"disk-{number}"
            disk.mkdir()
            _ip("netns", "add", name)
            hosts.append(Host(name, f"10.77.0.{number}", disk, path))
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for host in hosts:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            # It leads nowhere, but Ray asks the routing table for the host's address.
            _ip("-n", host.namespace, "route", "add", "default", "dev", "eth0")
        probe = hosts[0].start(["true"])
        text = output(probe)
        if probe.returncode != 0:
            pytest.skip(f"mount namespaces are not permitted: {text}")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            for process in host.processes:
                process.wait()
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False)


def _ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"network namespaces are not permitted: ip {' '.join(arguments)}: {done.stderr}")
