"""A real Slurm with two nodes on this machine: a controller, two slurmd, munge.

Each node has two GPUs, for which plain files stand; Slurm gives them to processes all the same.
"""

import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, closing

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdParameters=config_overrides
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
GresTypes=gpu
NodeName=DEFAULT CPUs=4 RealMemory=1000 Gres=gpu:2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first_port}
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={second_port}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Environment in which `srun` reaches the cluster; CI must have Slurm, others may."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        reason = f"needs root and Debian's slurm-wlm and munge; missing: {', '.join(missing)}"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    ports = dict(zip(("controller_port", "first_port", "second_port"), free_ports(3), strict=True))
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(folder=folder, **ports))
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-1]\n")
    for name in ("gpu0", "gpu1"):
        (folder / name).touch()
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
    munge = [f"--{option}={folder}/munge.{ending}" for option, ending in names.items()]
    daemons = [
        ["munged", "--foreground", "--force", f"--seed-file={folder}/munge.seed", *munge],
        ["slurmctld", "-D", "-f", configuration],
        ["slurmd", "-D", "-f", configuration, "-N", "n1"],
        ["slurmd", "-D", "-f", configuration, "-N", "n2"],
    ]
    # The nodes' names have no address, so ranks meet where the test says.
    environment = {**os.environ, "SLURM_CONF": str(configuration), "MASTER_ADDR": "127.0.0.1"}
    with ExitStack() as stack:
        for daemon in daemons:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            process = subprocess.Popen(daemon, env=environment, **quiet)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            if daemon[0] == "munged":
                wait_until((folder / "munge.socket").exists)
        wait_until(lambda: idle_nodes(environment) == 2)
        yield environment


def idle_nodes(environment):
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    listed = subprocess.run(command, env=environment, capture_output=True, text=True)
    return len(listed.stdout.split())


def wait_until(is_true, seconds=30):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "Slurm did not start"
        time.sleep(0.1)
