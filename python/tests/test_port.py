"""Ports and packets: every outcome, and every way to misuse them."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
import unittest

import lab
import vnplug

GEN = "lab=gen,pps=20000,count=20000,flows=16,size=128,protocols=udp4+tcp4,run=7"

SEND = """
import socket, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind(("wire0", 0))
for line in sys.stdin:
    s.send(bytes.fromhex(line))
"""


class Ports(lab.Test):
    def test_devices_are_listed(self) -> None:
        daemon = self.daemon("lab=gen,pps=10,queues=2")
        (device,) = vnplug.devices(socket=daemon.socket)
        self.assertEqual((device.name, device.kind, device.queues), ("host:lab", "gen", 2))
        self.assertIn("host:lab", repr(device))

    def test_iteration_gives_every_packet_and_ends_with_the_source(self) -> None:
        daemon = self.daemon(GEN)
        with vnplug.open("lab", socket=daemon.socket, ring_bytes=16 << 20) as port:
            self.assertEqual((port.device, port.link_type, port.rings), ("host:lab", 1, 1))
            times, flows = [], {}
            for packet in port:
                times.append(packet.ts_ns)
                flows[packet.flow_hash] = packet.data[26:38]
                self.assertEqual((packet.wire_len, packet.caplen, len(packet)), (128, 128, 128))
                self.assertEqual((packet.lost, packet.vlan, packet.flags), (0, None, 0))
            self.assertEqual(len(times), 20000)
            self.assertEqual(times, sorted(times))
            self.assertEqual(len(flows), 16)
            with self.assertRaises(vnplug.EndedError):
                port.next()
            stats = port.stats()
            self.assertEqual((stats.received, stats.bytes, stats.lost), (20000, 20000 * 128, 0))
            assert stats.host is not None
            self.assertEqual(stats.host["delivered"], 20000)
            self.assertIn("received=20000", repr(stats))
        self.assertTrue(port.closed)

    def test_the_members_of_a_group_read_one_copy(self) -> None:
        # Slow, so that the second one comes before the end.
        daemon = self.daemon(GEN.replace("pps=20000", "pps=2500"))

        def member(filter: str) -> vnplug.Port:
            return vnplug.open(
                "lab", socket=daemon.socket, group="ids", arena_bytes=16 << 20, filter=filter
            )

        with member("tcp") as tcp, member("udp") as udp:
            single = [bytes(packet) for packet in tcp]
            lent: list[bytes] = []
            for batch in udp.batches():
                lent += [bytes(data) for data in batch]
            self.assertEqual({packet[23] for packet in single}, {6})
            self.assertEqual({data[23] for data in lent}, {17})
            self.assertEqual(len(single) + tcp.stats().lost, 10000)
            # The source ran when it came.
            self.assertLessEqual(len(lent) + udp.stats().lost, 10000)
            self.assertGreater(min(len(single), len(lent)), 0)
            with self.assertRaisesRegex(vnplug.InvalidError, "the limit is"):
                vnplug.open("lab", socket=daemon.socket, group="huge", arena_bytes=1 << 40)

    def test_a_packet_owns_its_bytes(self) -> None:
        daemon = self.daemon(GEN)
        port = vnplug.open("lab", socket=daemon.socket)
        packet = port.next()
        assert packet is not None
        port.close()
        with memoryview(packet) as view:
            self.assertTrue(view.readonly)
            self.assertEqual(bytes(view), bytes(packet))
        self.assertEqual(packet.data, bytes(packet))
        self.assertAlmostEqual(packet.time, time.time(), delta=600)
        self.assertIn("wire_len=128", repr(packet))

    def test_the_bytes_are_those_of_the_wire(self) -> None:
        netns = self.netns()
        daemon = self.daemon("wire1", netns=netns)
        (device,) = vnplug.devices(socket=daemon.socket)
        self.assertEqual((device.mtu, device.link_type), (1500, 1))
        self.assertRegex(device.mac or "", "^([0-9a-f]{2}:){5}[0-9a-f]{2}$")
        frames = [
            bytes.fromhex("020000000001020000000002") + kind + bytes(range(50))
            for kind in (b"\x88\xb5", b"\x81\x00\xa0\x07\x88\xb5")
        ]
        with vnplug.open("host:wire1", socket=daemon.socket, snaplen=60) as port:
            sender = ["ip", "netns", "exec", netns, sys.executable, "-c", SEND]
            text = "\n".join(frame.hex() for frame in frames)
            subprocess.run(sender, input=text.encode(), check=True)
            plain, tagged = (port.next(lab.LIMIT) for _ in frames)
            assert plain and tagged
            self.assertEqual(plain.data, frames[0][:60])
            self.assertEqual(tagged.data, frames[1][:60])
            self.assertEqual((plain.vlan, tagged.vlan), (None, 0xA007))
            self.assertEqual((tagged.wire_len, tagged.caplen), (68, 60))
            self.assertTrue(tagged.flags & vnplug.Flag.VLAN)
            self.assertIsNone(port.next(0))

    def test_filters_run_in_the_daemon_and_are_replaced(self) -> None:
        daemon = self.daemon(GEN.replace("count=20000,", ""))
        with vnplug.open("lab", socket=daemon.socket, filter="udp") as port:
            self.assertEqual({port.next().data[23] for _ in range(100)}, {17})  # type: ignore[union-attr]
            port.set_filter("tcp")
            with self.assertRaisesRegex(vnplug.FilterError, "syntax error"):
                port.set_filter("tcp prot 80")
            kinds = [port.next().data[23] for _ in range(20000)]  # type: ignore[union-attr]
            first = kinds.index(6)
            self.assertEqual(set(kinds[first:]), {6})

    def test_a_timeout_is_kept_and_nothing_is_not_the_end(self) -> None:
        daemon = self.daemon(GEN)
        with vnplug.open("lab", socket=daemon.socket, filter="port 1 and port 2") as port:
            self.assertIsNone(port.next(0))
            start = time.monotonic()
            self.assertIsNone(port.next(timeout=0.3))
            self.assertGreaterEqual(time.monotonic() - start, 0.3)
            for wrong in (-1.0, float("nan")):
                with self.assertRaises(vnplug.InvalidError):
                    port.next(wrong)

    def test_errors_are_told_apart(self) -> None:
        daemon = self.daemon("lab=gen,pps=10,queues=2")

        def opens(device: str = "lab", **options: object) -> None:
            vnplug.open(device, **{"socket": daemon.socket, **options})  # type: ignore[arg-type]

        for error, base, options in (
            (vnplug.NotFoundError, LookupError, {"device": "eth9"}),
            (vnplug.FilterError, ValueError, {"filter": "tcp prot 80"}),
            (vnplug.InvalidError, ValueError, {"direction": "up"}),
            (vnplug.InvalidError, ValueError, {"balance": "even"}),
            (vnplug.InvalidError, ValueError, {"max_delay": -1.0}),
            (vnplug.UnreachableError, ConnectionError, {"socket": "/nonexistent/s"}),
        ):
            with self.subTest(options=options):
                with self.assertRaises(error) as raised:
                    opens(**options)
                self.assertIsInstance(raised.exception, vnplug.Error)
                self.assertIsInstance(raised.exception, base)
                self.assertGreater(len(str(raised.exception)), 10)
        with self.assertRaises((TypeError, OverflowError)):
            opens(snaplen=-1)

    def test_a_closed_port_says_so(self) -> None:
        daemon = self.daemon(GEN)
        port = vnplug.open("lab", socket=daemon.socket)
        port.close()
        port.close()
        for call in (port.next, port.batch, port.stats, port.fileno, lambda: port.set_filter("")):
            with self.assertRaises(vnplug.ClosedError):
                call()
        self.assertIn("closed", repr(port))

    def test_it_survives_a_killed_daemon_and_tells_of_the_gap(self) -> None:
        daemon = self.daemon("lab=gen,pps=5000")
        with vnplug.open("lab", socket=daemon.socket) as port:
            self.assertIsNotNone(port.next(lab.LIMIT))
            daemon.kill()
            deadline = time.monotonic() + lab.LIMIT
            while not port.away:
                port.next(0.1)
                self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(port.stats().host)
            daemon.launch()
            packet = port.next(lab.LIMIT)
            assert packet is not None
            self.assertTrue(packet.flags & vnplug.Flag.GAP)
            self.assertEqual(port.stats().reopened, 1)

    def test_without_reconnect_the_end_of_the_daemon_is_an_error(self) -> None:
        daemon = self.daemon("lab=gen,pps=5000")
        with vnplug.open("lab", socket=daemon.socket, reconnect=False) as port:
            self.assertIsNotNone(port.next(lab.LIMIT))
            daemon.kill()
            with self.assertRaises(vnplug.Error):
                for _ in port:
                    pass


class Waiting(lab.Test):
    def test_a_wait_lets_other_threads_run_and_close_ends_it(self) -> None:
        daemon = self.daemon("lab=gen,pps=1")
        port = vnplug.open("lab", socket=daemon.socket, filter="port 1 and port 2")
        raised: list[Exception] = []

        def wait() -> None:
            while not raised:
                try:
                    port.next()
                except vnplug.LoanError:
                    pass  # it is in the hands of the test
                except vnplug.Error as error:
                    raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        deadline = time.monotonic() + lab.LIMIT
        while True:  # until the other thread has the port
            try:
                port.next(0)
            except vnplug.LoanError as error:
                self.assertIn("another thread", str(error))
                break
            self.assertLess(time.monotonic(), deadline)
        port.close()
        thread.join(lab.LIMIT)
        self.assertIsInstance(raised[0], vnplug.ClosedError)

    def signal_when_waiting(self, port: vnplug.Port, number: signal.Signals) -> threading.Thread:
        """A thread that sends a signal once the main thread has the port."""

        def send() -> None:
            deadline = time.monotonic() + lab.LIMIT
            while time.monotonic() < deadline:
                try:
                    port.next(0)
                except vnplug.LoanError:
                    break
            os.kill(os.getpid(), number)

        return threading.Thread(target=send)

    def wait(self, port: vnplug.Port) -> None:
        """Waits for a packet until something is raised; the other thread looks at the port at times."""
        while True:
            try:
                port.next(lab.LIMIT)
            except vnplug.LoanError:
                pass

    def test_ctrl_c_interrupts_a_wait(self) -> None:
        # A shell that runs this in the background has it ignore the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        daemon = self.daemon("lab=gen,pps=1")
        with vnplug.open("lab", socket=daemon.socket, filter="port 1 and port 2") as port:
            thread = self.signal_when_waiting(port, signal.SIGINT)
            with self.assertRaises(KeyboardInterrupt):
                thread.start()
                self.wait(port)
            thread.join()

    def test_a_signals_handler_may_close_the_port_that_waits(self) -> None:
        daemon = self.daemon("lab=gen,pps=1")
        port = vnplug.open("lab", socket=daemon.socket, filter="port 1 and port 2")
        before = signal.signal(signal.SIGUSR1, lambda *_: port.close())
        self.addCleanup(signal.signal, signal.SIGUSR1, before)
        thread = self.signal_when_waiting(port, signal.SIGUSR1)
        thread.start()
        with self.assertRaises(vnplug.ClosedError):
            self.wait(port)
        thread.join()

    def test_the_descriptor_serves_select(self) -> None:
        daemon = self.daemon("lab=gen,pps=500,count=200")
        with vnplug.open("lab", socket=daemon.socket) as port:
            taken = 0
            with self.assertRaises(vnplug.EndedError):
                while True:
                    while port.next(0) is not None:
                        taken += 1
                    readable, _, _ = select.select([port], [], [], lab.LIMIT)
                    self.assertEqual(readable, [port])
            self.assertEqual(taken, 200)

    def test_the_descriptor_serves_asyncio(self) -> None:
        daemon = self.daemon("lab=gen,pps=500,count=200")

        async def count(port: vnplug.Port) -> int:
            loop, ready, taken = asyncio.get_running_loop(), asyncio.Event(), 0
            loop.add_reader(port.fileno(), ready.set)
            try:
                while True:
                    while port.next(0) is not None:
                        taken += 1
                    await asyncio.wait_for(ready.wait(), lab.LIMIT)
                    ready.clear()
            except vnplug.EndedError:
                return taken
            finally:
                loop.remove_reader(port.fileno())

        with vnplug.open("lab", socket=daemon.socket) as port:
            self.assertEqual(asyncio.run(count(port)), 200)


if __name__ == "__main__":
    unittest.main()
