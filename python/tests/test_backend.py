"""Third parties' back-ends and channels to them, against a real daemon."""

import os
import select
import threading
import time

import lab
import vnplug

SOURCE = "lab=gen,pps=100"
GRANT = "kv,id=85,uid=%d,open=*,memory=4M" % os.getuid()


class BackEnds(lab.Test):
    def start(self) -> tuple[lab.Daemon, vnplug.BackEnd]:
        daemon = self.daemon(SOURCE, backends=[GRANT])
        back = vnplug.BackEnd(85, "kv", version=7, events_in=4, events_out=4, socket=daemon.socket)
        self.addCleanup(back.close)
        return daemon, back

    def channel(self, daemon: lab.Daemon, label: str = "in Python") -> vnplug.Channel:
        channel = vnplug.Channel("kv", label=label, version=2, socket=daemon.socket)
        self.addCleanup(channel.close)
        return channel

    def news(self, end: vnplug.BackEnd | vnplug.Channel, kind: str) -> vnplug.News:
        news = end.next(lab.LIMIT)
        assert news is not None
        self.assertEqual(news.kind, kind)
        return news

    def test_messages_events_and_memory_go_between_both_ends(self) -> None:
        daemon, back = self.start()
        (info,) = vnplug.back_ends(socket=daemon.socket)
        self.assertEqual((info.id, info.name, info.is_there, info.version), (85, "kv", True, 7))
        program = self.channel(daemon)
        self.assertEqual(program.version, 7)
        joined = self.news(back, "joined")
        self.assertEqual((joined.text, joined.label, joined.version),
                         (f"uid:{os.getuid()}", "in Python", 2))  # fmt: skip
        self.assertEqual(back.channels, [joined.channel])
        for data in (b"", b"hello", bytes(65536)):
            program.send(data)
            self.assertEqual(self.news(back, "message").data, data)
            back.send(joined.channel, data)
            self.assertEqual(self.news(program, "message").data, data)
        for end in (lambda: program.send(bytes(65537)), lambda: back.send(99, b"x")):
            self.assertRaises(vnplug.InvalidError, end)
        back.event(joined.channel, 3, 5)
        event = self.news(program, "event")
        self.assertEqual((event.event, event.count), (3, 5))
        program.event(1)
        self.assertEqual(self.news(back, "event").channel, joined.channel)
        self.assertRaises(vnplug.InvalidError, program.event, 4)

        region = back.share(joined.channel, 1)
        both = back.share(joined.channel, 5000, writable=True)
        self.assertEqual(self.news(program, "shared").region, region)
        self.assertEqual(self.news(program, "shared").region, both)
        self.assertEqual(program.regions, [region, both])
        ours, theirs = back.memory(region), program.memory(region)
        self.assertEqual((len(ours), len(theirs), theirs.writable), (4096, 4096, False))
        ours.write(8, b"from the host")
        ours.store(0, 2)
        self.assertEqual((theirs.load(0), theirs.read(8, 13)), (2, b"from the host"))
        self.assertRaises(vnplug.InvalidError, theirs.write, 0, b"x")
        self.assertRaises(vnplug.InvalidError, theirs.read, 4090, 7)
        self.assertRaises(vnplug.InvalidError, theirs.read, 0, 1 << 62)
        self.assertRaises(vnplug.InvalidError, theirs.load, 4)
        self.assertRaises(OverflowError, theirs.read, -1, 1)
        program.memory(both).write(4999, b"x")
        self.assertEqual(back.memory(both).read(4999, 1), b"x")
        self.assertRaises(vnplug.LimitError, back.share, joined.channel, 1 << 30)
        # Taken back from one who does not listen: zeros, and never a fault.
        self.assertFalse(back.withdraw(both, 0.1))
        self.assertEqual(program.memory(both).read(4999, 1), b"\0")
        self.assertRaises(vnplug.InvalidError, back.memory, both)
        self.assertEqual(self.news(program, "withdraw").region, both)
        program.release(both)
        self.assertRaises(vnplug.InvalidError, program.memory, both)
        back.hang_up(joined.channel, "that is all")
        self.assertIn("that is all", self.news(program, "gone").text)
        self.assertEqual(theirs.load(0), 0)
        self.assertRaises(vnplug.UnreachableError, program.send, b"x")
        program.close()
        self.assertRaises(vnplug.ClosedError, theirs.load, 0)
        self.assertRaises(vnplug.ClosedError, program.next, 0)

    def test_a_restart_of_the_daemon_is_told_to_both(self) -> None:
        daemon, back = self.start()
        with self.channel(daemon) as program:
            first = self.news(back, "joined").channel
            daemon.kill()
            self.assertEqual(self.news(back, "left").channel, first)
            self.news(back, "gone")
            self.news(program, "gone")
            daemon.launch()
            self.news(back, "back")
            self.news(program, "back")
            self.news(back, "joined")

    def test_a_flood_is_refused_and_nothing_is_lost(self) -> None:
        daemon, back = self.start()
        program = self.channel(daemon)
        self.news(back, "joined")
        sent = 0
        with self.assertRaises(BlockingIOError):
            while True:
                program.send(sent.to_bytes(4, "little") * 1000)
                sent += 1
        self.assertGreater(sent, 50)
        for number in range(sent):
            self.assertEqual(self.news(back, "message").data[:4], number.to_bytes(4, "little"))
        program.send(b"again")

    def test_who_is_refused_learns_why(self) -> None:
        daemon, _back = self.start()
        with self.assertRaises(vnplug.DeniedError):
            vnplug.BackEnd(86, "other", socket=daemon.socket)
        with self.assertRaises(vnplug.NotFoundError):
            vnplug.Channel("other", socket=daemon.socket)
        with self.assertRaises(vnplug.InvalidError):
            vnplug.Channel(0, socket=daemon.socket)

    def test_a_wait_is_over_in_time_and_select_wakes(self) -> None:
        daemon, back = self.start()
        begin = time.monotonic()
        self.assertIsNone(back.next(0.25))
        self.assertGreaterEqual(time.monotonic() - begin, 0.25)
        self.assertEqual(select.select([back], [], [], 0), ([], [], []))
        self.channel(daemon)
        self.assertEqual(select.select([back], [], [], lab.LIMIT)[0], [back])
        self.news(back, "joined")

    def test_programs_in_threads_are_never_mixed(self) -> None:
        daemon, back = self.start()

        def ask(number: int) -> None:
            with vnplug.Channel(85, socket=daemon.socket) as program:
                for turn in range(200):
                    program.send(b"%d %d" % (number, turn))
                    wrong.append(self.news(program, "message").data != b"%d %d" % (number, turn))

        wrong: list[bool] = []
        threads = [threading.Thread(target=ask, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        left = 0
        for news in back:
            if news.kind == "message":
                back.send(news.channel, news.data)
            left += news.kind == "left"
            if left == 4:
                break
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [False] * 800)
