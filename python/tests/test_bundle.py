"""Many ports that are waited for together."""

import threading
import time

import lab
import vnplug

GEN = "lab=gen,pps=2000,size=128,flows=4,run=1"


class Bundles(lab.Test):
    def open(self, daemon: lab.Daemon, bundle: vnplug.Bundle, filter: str = "") -> vnplug.Port:
        return vnplug.open(
            "lab", bundle=bundle, socket=daemon.socket, ring_bytes=1 << 16, filter=filter
        )

    def read_all(self, bundle: vnplug.Bundle) -> None:
        """Until every port has given a packet."""
        missing = set(bundle.ports)
        deadline = time.monotonic() + lab.LIMIT
        while missing:
            self.assertLess(time.monotonic(), deadline)
            if bundle.wait(1.0):
                for port in bundle.ready():
                    if len(port.batch(64, timeout=0)):
                        missing.discard(port)

    def test_its_ports_are_read_closed_and_gone_together(self) -> None:
        daemon = self.daemon(GEN)
        with vnplug.Bundle() as bundle:
            ports = [self.open(daemon, bundle) for _ in range(20)]
            self.assertEqual((len(bundle), bundle.ports), (20, ports))
            self.read_all(bundle)
            ports[3].close()
            self.assertEqual(bundle.ports, ports[:3] + ports[4:])
            self.assertEqual(repr(bundle), "<vnplug.Bundle of 19>")
            self.read_all(bundle)
            (device,) = vnplug.devices(socket=daemon.socket)
            self.assertEqual(device.ports, 19)
        self.assertTrue(bundle.closed and all(port.closed for port in ports))
        deadline = time.monotonic() + lab.LIMIT
        while vnplug.devices(socket=daemon.socket)[0].ports:
            self.assertLess(time.monotonic(), deadline)
        with self.assertRaisesRegex(vnplug.ClosedError, "the bundle is closed"):
            bundle.wait()
        with self.assertRaisesRegex(vnplug.ClosedError, "the bundle is closed"):
            self.open(daemon, bundle)
        bundle.close()

    def test_only_ports_with_news_are_ready(self) -> None:
        daemon = self.daemon(GEN)
        with vnplug.Bundle() as bundle:
            idle = [self.open(daemon, bundle, filter="host 192.0.2.77") for _ in range(50)]
            busy = self.open(daemon, bundle)
            # Each is looked at once, and then sleeps.
            bundle.wait(0.2)
            for port in bundle.ready():
                port.batch(64, timeout=0)
            for _ in range(3):
                self.assertTrue(bundle.wait(lab.LIMIT))
                self.assertEqual(bundle.ready(), [busy])
                self.assertEqual(bundle.ready(), [])
                busy.batch(64, timeout=0)
            # One that another takes the place of.
            idle[7].close()
            other = self.open(daemon, bundle)
            deadline = time.monotonic() + lab.LIMIT
            seen: set[vnplug.Port] = set()
            while seen != {busy, other}:
                self.assertLess(time.monotonic(), deadline)
                bundle.wait(1.0)
                for port in bundle.ready():
                    if len(port.batch(64, timeout=0)):
                        seen.add(port)

    def test_it_waits_as_long_as_it_is_told(self) -> None:
        daemon = self.daemon(GEN)
        with vnplug.Bundle() as bundle:
            self.assertFalse(bundle.wait(0))
            self.open(daemon, bundle, filter="host 192.0.2.77")
            begin = time.monotonic()
            self.assertFalse(bundle.wait(0.25))
            self.assertGreaterEqual(time.monotonic() - begin, 0.25)
            with self.assertRaisesRegex(vnplug.InvalidError, "timeout is -1"):
                bundle.wait(-1)

    def test_a_wait_ends_the_loans_of_its_ports(self) -> None:
        daemon = self.daemon(GEN)
        with vnplug.Bundle() as bundle:
            port = self.open(daemon, bundle)
            batch = port.batch(timeout=lab.LIMIT)
            view = batch[0]
            with self.assertRaisesRegex(vnplug.LoanError, "memoryviews"):
                bundle.wait(0)
            del view
            self.assertTrue(bundle.wait(lab.LIMIT))
            with self.assertRaisesRegex(vnplug.LoanError, "released"):
                batch[0]

    def test_it_is_closed_with_all_its_ports_or_not_at_all(self) -> None:
        daemon = self.daemon(GEN)
        bundle = vnplug.Bundle()
        ports = [self.open(daemon, bundle) for _ in range(20)]
        batch = ports[7].batch(timeout=lab.LIMIT)
        view = memoryview(batch[0])
        with self.assertRaisesRegex(vnplug.LoanError, "memoryviews"):
            bundle.close()
        self.assertFalse(bundle.closed or any(port.closed for port in ports))
        self.assertEqual((len(bundle), len(bytes(view))), (20, 128))
        view.release()
        self.read_all(bundle)
        bundle.close()
        self.assertTrue(bundle.closed and all(port.closed for port in ports))
        deadline = time.monotonic() + lab.LIMIT
        while vnplug.devices(socket=daemon.socket)[0].ports:
            self.assertLess(time.monotonic(), deadline)

    def test_another_thread_is_refused_while_it_waits(self) -> None:
        daemon = self.daemon(GEN)
        with vnplug.Bundle() as bundle:
            port = self.open(daemon, bundle, filter="host 192.0.2.77")
            refused = threading.Event()

            def wait() -> None:
                while not refused.is_set():
                    try:
                        bundle.wait(0.5)
                    except vnplug.LoanError:
                        pass  # a port is in the hands of the test

            thread = threading.Thread(target=wait)
            thread.start()
            deadline = time.monotonic() + lab.LIMIT
            while not refused.is_set():
                try:
                    port.next(0)
                except vnplug.LoanError:
                    refused.set()
                if time.monotonic() > deadline:
                    refused.set()
                    self.fail("another thread is never refused")
                time.sleep(0.01)
            thread.join()

    def test_a_port_outlives_a_bundle_that_nobody_has(self) -> None:
        daemon = self.daemon(GEN)
        bundle = vnplug.Bundle()
        with self.open(daemon, bundle) as port:
            del bundle
            self.assertIsNotNone(port.next(lab.LIMIT))
        deadline = time.monotonic() + lab.LIMIT
        while vnplug.devices(socket=daemon.socket)[0].ports:
            self.assertLess(time.monotonic(), deadline)

    def test_all_are_back_after_a_restart(self) -> None:
        daemon = self.daemon(GEN)
        with vnplug.Bundle() as bundle:
            for _ in range(5):
                self.open(daemon, bundle)
            self.read_all(bundle)
            daemon.kill()
            daemon.launch()
            deadline = time.monotonic() + lab.LIMIT
            while not all(port.stats().reopened for port in bundle):
                self.assertLess(time.monotonic(), deadline)
                bundle.wait(0.1)
                for port in bundle:
                    port.batch(64, timeout=0)
            self.read_all(bundle)
