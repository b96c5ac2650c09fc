"""An operator's program before a port: what it makes of packets, and that others have them as they were."""

import os
import pathlib
import subprocess
import tempfile
import unittest

import lab
import vnplug

# Behind the UDP header the program cuts; of each IPv4 address it makes the last number 0.
WHOLE, HEADERS = 100, 14 + 20 + 8
SOURCE, TARGET = 14 + 12 + 3, 14 + 16 + 3
GEN = f"lab=gen,pps=5000,flows=4,size={WHOLE},protocols=udp4+udp6"


class Programs(lab.Test):
    def program(self) -> pathlib.Path:
        """The rewriter of the examples, compiled as its first lines say."""
        folder = tempfile.TemporaryDirectory(prefix="vnplug-python-")
        self.addCleanup(folder.cleanup)
        made = pathlib.Path(folder.name) / "headers.o"
        source = lab.ROOT / "examples" / "programs" / "headers.c"
        include = f"/usr/include/{os.uname().machine}-linux-gnu"
        command = ["clang", "-O2", "-g", "-target", "bpf", "-I", include, "-c", str(source), "-o", str(made)]
        subprocess.run(command, check=True)
        return made

    def test_packets_go_through_the_program_that_a_port_names(self) -> None:
        config = f'[[program]]\nname = "headers"\nfile = "{self.program()}"\n'
        daemon = self.daemon(GEN, config=config)

        def port(program: str) -> vnplug.Port:
            return vnplug.open("lab", socket=daemon.socket, program=program)

        with port("headers") as through, port("") as plain:
            for _ in range(200):
                packet = next(through)
                self.assertEqual((packet.caplen, packet.data[12:14]), (HEADERS, b"\x08\x00"))
                self.assertEqual((packet.data[SOURCE], packet.data[TARGET]), (0, 0))
            last = set()
            for _ in range(200):
                packet = next(plain)
                self.assertEqual(packet.caplen, WHOLE)
                last |= {packet.data[SOURCE], packet.data[TARGET]}
            # The control: there was something to hide.
            self.assertNotEqual(last, {0})
            hosts = through.stats().host, plain.stats().host
            assert hosts[0] is not None and hosts[1] is not None
            # What it dropped is not IPv4.
            self.assertGreaterEqual(hosts[0]["program"], 100)
            self.assertEqual(hosts[1]["program"], 0)
        with self.assertRaisesRegex(vnplug.NotFoundError, "nothing"):
            port("nothing")


if __name__ == "__main__":
    unittest.main()
