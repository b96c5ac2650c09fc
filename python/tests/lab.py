"""A daemon for a test, and wires of its own. Needs the built programs, and root for wires."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import unittest

import vnplug

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = pathlib.Path(
    os.environ.get("VNPLUG_PROGRAMS")
    or pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "debug"
)
# The static `vnplug`, for guests.
GUEST = pathlib.Path(os.environ.get("VNPLUG_GUEST") or ROOT / "target" / "guest") / "bin" / "vnplug"
LIMIT = 60.0


class Daemon:
    """A running vnplugd; `kill` and `launch` restart it."""

    def __init__(
        self,
        sources: list[str],
        netns: str | None = None,
        backends: list[str] | None = None,
        config: str | None = None,
    ) -> None:
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="vnplug-python-"))
        self.socket = self.dir / "s"
        prefix = ["ip", "netns", "exec", netns] if netns else []
        self.command = prefix + [
            str(PROGRAMS / "vnplugd"), "--socket", str(self.socket), "--pool-dir", str(self.dir),
        ]  # fmt: skip
        for source in sources:
            self.command += ["--source", source]
        for backend in backends or []:
            self.command += ["--backend", backend]
        if config is not None:
            # For other users, too.
            self.dir.chmod(0o755)
            (self.dir / "config.toml").write_text(config)
            self.command += ["--config", str(self.dir / "config.toml")]
        self.process: subprocess.Popen[bytes] | None = None
        self.launch()

    def launch(self) -> None:
        with open(self.dir / "log", "ab") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stderr=log)
        deadline = time.monotonic() + LIMIT
        while True:
            try:
                vnplug.devices(socket=self.socket)
                return
            except vnplug.Error:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self.dir / "log").read_text()) from None
                time.sleep(0.02)

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.dir, ignore_errors=True)


class Test(unittest.TestCase):
    """A test with a daemon."""

    def daemon(
        self,
        *sources: str,
        netns: str | None = None,
        backends: list[str] | None = None,
        config: str | None = None,
    ) -> Daemon:
        daemon = Daemon(list(sources), netns, backends, config)
        self.addCleanup(daemon.close)
        return daemon

    def netns(self) -> str:
        """A network namespace with a silent wire, wire0 to wire1."""
        name = f"vnpy-{os.getpid()}-{id(self):x}"
        subprocess.run(["ip", "netns", "add", name], check=True)
        self.addCleanup(subprocess.run, ["ip", "netns", "delete", name])
        add = "link add wire0 type veth peer name wire1"
        for command in [add, *(f"link set wire{n} arp off multicast off up" for n in (0, 1))]:
            subprocess.run(["ip", "-n", name, *command.split()], check=True)
        return name

    def uml(self, daemon: Daemon, name: str, script: str) -> str:
        """What a guest of User-mode Linux prints that has the agent, and types this; README says how it is made."""
        image = daemon.dir / name
        for place in ("bin", "dev", "proc"):
            (image / place).mkdir(parents=True)
        shutil.copy("/bin/busybox", image / "bin")
        shutil.copy(GUEST, image / "bin")
        (image / "init").write_text(
            "#!/bin/busybox sh\n/bin/busybox --install -s /bin\nmount -t devtmpfs none /dev\n"
            "mount -t proc none /proc\nvnplug agent 2>/dev/null &\n"
            f"until vnplug list >/dev/null 2>&1; do sleep 0.2; done\n{script}\npoweroff -f\n"
        )
        (image / "init").chmod(0o755)
        archive = daemon.dir / f"{name}.img"
        pack = f"find . | busybox cpio -o -H newc >{archive}"
        subprocess.run(["sh", "-c", pack], cwd=image, check=True, stderr=subprocess.DEVNULL)
        attach = [str(GUEST), "--socket", str(daemon.socket), "attach", "uml", "--name", name, "--"]
        command = ["linux.uml", "mem=128M", f"initrd={archive}", "con=null", "con0=null,fd:1", "quiet"]
        guest = subprocess.run(
            attach + command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=2 * LIMIT, text=True, errors="replace", check=False,
        )  # fmt: skip
        return guest.stdout
