"""The example examples/kv, as an ordinary user, with several programs at once."""

import json
import os
import subprocess
import sys
import threading
import time
import unittest

import lab
import vnplug

USER, OTHER = 54_321, 54_322
# Interpreters may be in root's home: it becomes the user when all is loaded.
AS_USER = """
import os, sys, time, vnplug
uid = int(sys.argv[1])
sys.argv[:2] = []
with open(sys.argv[0]) as file:
    code = compile(file.read(), sys.argv[0], "exec")
os.setgid(uid)
os.setuid(uid)
exec(code, {"__name__": "__main__"})
"""
ASK = """
import sys, vnplug
with vnplug.Channel("kv", socket=sys.argv[1]) as kv:
    for words in sys.argv[2:]:
        kv.send(words.encode())
        for news in kv:
            if news.kind == "message":
                print(news.data.decode())
                break
"""


def metrics(page: vnplug.Memory) -> list[int]:
    while True:
        before = page.load(0)
        words = [page.load(8 * number) for number in range(1, 7)]
        if before % 2 == 0 and page.load(0) == before:
            return words


@unittest.skipUnless(os.getuid() == 0, "root becomes other users")
class KeyValue(lab.Test):
    def run_as(self, uid: int, *args: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", AS_USER, str(uid), *args]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def start(self, more: str = "") -> tuple[lab.Daemon, "subprocess.Popen[str]"]:
        grant = f'[[backend]]\nid = 85\nname = "kv"\nuid = {USER}\nopen = ["*"]\nmemory = "1MiB"\n'
        grant += more
        daemon = self.daemon("lab=gen,pps=100", config="socket_mode = 0o666\n" + grant)
        return daemon, self.serve(daemon)

    def serve(self, daemon: lab.Daemon) -> "subprocess.Popen[str]":
        script = str(lab.ROOT / "examples/kv/kv.py")
        server = self.run_as(USER, script, "85", "kv", str(daemon.socket))
        assert server.stdout
        self.assertEqual(server.stdout.readline(), "ready\n")
        return server

    def answer(self, kv: vnplug.Channel, words: bytes) -> bytes:
        kv.send(words)
        while True:
            news = kv.next(lab.LIMIT)
            assert news is not None
            if news.kind == "message":
                return news.data

    def test_values_are_kept_by_user_and_changes_are_told(self) -> None:
        daemon, _server = self.start()
        with (
            vnplug.Channel("kv", socket=daemon.socket) as kv,
            vnplug.Channel("kv", socket=daemon.socket) as other,
        ):
            shared = kv.next(lab.LIMIT)
            assert shared is not None and shared.kind == "shared"
            page = kv.memory(shared.region)
            for words, answer in [
                (b"get a", b"none"), (b"set a 1 2", b"ok"), (b"get a", b"value 1 2"),
                (b"set b \0\xff", b"ok"), (b"keys", b"keys a b"), (b"del b", b"ok"),
                (b"del b", b"none"), (b"watch a", b"ok"), (b"set c " + b"x" * 60_000, b"ok"),
                (b"get c", b"value " + b"x" * 60_000),
            ]:  # fmt: skip
                self.assertEqual(self.answer(kv, words), answer, words[:20])
            for words in (b"", b"nonsense", b"get", b"get a b", b"set " + b"k" * 257,
                          b"set k " + b"v" * 60_001, b"\xff\0 x"):  # fmt: skip
                self.assertTrue(self.answer(kv, words).startswith(b"error"), words[:20])
            # Too much is refused, and there is room again afterwards.
            for number in range(16):
                self.assertEqual(self.answer(kv, b"set %d " % number + b"x" * 60_000), b"ok")
            self.assertEqual(self.answer(kv, b"set 16 " + b"x" * 60_000), b"full")
            self.assertEqual(self.answer(kv, b"del 3"), b"ok")
            self.assertEqual(self.answer(kv, b"set 16 " + b"x" * 60_000), b"ok")
            # Another program of the same user.
            self.assertEqual(self.answer(other, b"set a 3"), b"ok")
            counts = {0: 0, 1: 0}
            deadline = time.monotonic() + lab.LIMIT
            while not counts[0]:
                self.assertLess(time.monotonic(), deadline)
                news = kv.next(1)
                if news is not None and news.kind == "event":
                    counts[news.event] += news.count
            self.assertEqual(counts[0], 1)
            while metrics(page)[4] < 22:
                self.assertLess(time.monotonic(), deadline)
            self.assertEqual(metrics(page)[:2], [2, 18])
            # Another user has none of them.
            ask = lab.ROOT / "target" / f"ask-{os.getpid()}.py"
            ask.write_text(ASK)
            self.addCleanup(ask.unlink)
            lines = ["get a", "set a theirs", "get a"]
            asks = self.run_as(OTHER, str(ask), str(daemon.socket), *lines)
            self.assertEqual(asks.communicate()[0], "none\nok\nvalue theirs\n")
            self.assertEqual(self.answer(kv, b"get a"), b"value 3")

    def test_several_programs_at_once_have_their_answers_in_order(self) -> None:
        daemon, _server = self.start()
        done: list[int] = []

        def ask(name: int) -> None:
            with vnplug.Channel("kv", socket=daemon.socket) as kv:
                for turn in range(200):
                    want = b"%d" % turn
                    if self.answer(kv, b"set p%d %d" % (name, turn)) != b"ok":
                        return
                    if self.answer(kv, b"get p%d" % name) != b"value " + want:
                        return
                done.append(name)

        threads = [threading.Thread(target=ask, args=[name]) for name in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(sorted(done), list(range(6)))

    def test_a_guest_keeps_values_and_reads_the_page(self) -> None:
        daemon, _server = self.start("pool = true\n")
        with vnplug.Channel("kv", socket=daemon.socket) as kv:
            self.assertEqual(self.answer(kv, b"set a here"), b"ok")
            say = "vnplug channel kv -c 1 --say"
            console = self.uml(daemon, "probe", "\n".join([
                f"{say} 'set greeting from the guest'",
                f"{say} 'get greeting'",
                f"{say} 'get a'",
                # The page is written within 50 ms, and each change says so by an event.
                "vnplug channel kv --dump 56 --json --say 'set more x' --duration 1s",
            ]))  # fmt: skip
            lines = [line.rstrip() for line in console.splitlines()]
            said = [line for line in lines if not line.startswith("#")]
            at = said.index("ok")
            # Its own values, and not those of the host's user.
            self.assertEqual(said[at : at + 3], ["ok", "value from the guest", "none"], console)
            news = [json.loads(line) for line in said[at + 3 :] if line.startswith("{")]
            self.assertIn({"message": "ok"}, news, console)
            # What the host wrote into memory that both map: two are connected, three values are kept.
            page = [it["begins"] for it in news if "begins" in it][-1]
            self.assertEqual((ord(page[8]), ord(page[16])), (2, 3), console)
            # The host's user sees in its own page what the guest did.
            self.assertEqual(metrics(kv.memory(kv.regions[0]))[4], 3)

    def test_a_dead_server_is_told_and_its_page_is_zeros(self) -> None:
        daemon, server = self.start()
        with vnplug.Channel("kv", socket=daemon.socket) as kv:
            self.assertEqual(self.answer(kv, b"set a 1"), b"ok")
            page = kv.memory(kv.regions[0])
            server.kill()
            news = kv.next(lab.LIMIT)
            while news is not None and news.kind != "gone":
                news = kv.next(lab.LIMIT)
            assert news is not None
            self.assertEqual(metrics(page), [0] * 6)
            self.serve(daemon)
            news = kv.next(lab.LIMIT)
            assert news is not None and news.kind == "back"
            self.assertEqual(self.answer(kv, b"get a"), b"none")


if __name__ == "__main__":
    unittest.main()
