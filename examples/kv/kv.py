#!/usr/bin/env python3
"""A back-end that keeps values for programs in guests, containers and elsewhere, and a page of metrics.

    kv.py ID NAME [SOCKET]        for example: kv.py 85 kv

A message is a line of words; every question has one answer, in order:

    set KEY VALUE    "ok", or "full"; the value is the rest of the message, and any bytes
    get KEY          "value …", or "none"
    del KEY          "ok", or "none"
    keys             "keys …", as many as fit
    watch KEY        "ok"; from then on event 0 counts each change of this key by anybody

Each user and each VM has values of its own, which all its programs share: who that is the daemon says. Anything else
is answered by "error …". A program that does not take its answers is hung up on.

Everybody who connects is given a page of metrics to read, in which numbers change without a message:

    0   a sequence, odd while the page is written: load it, load the rest word by word, load it again
    8   programs that are connected     16  values that are kept      24  their bytes
    32  questions answered              40  changes of values         48  time of the last one, ns since 1970

Event 1 says that a value changed somewhere, at most 20 times a second.
"""

import sys
import time

import vnplug

KEY, VALUE = 256, 60_000  # the longest, in bytes
OWN = 1 << 20  # the most bytes that one user or VM keeps, with
EACH = 64  # for every key
WATCHED = 64  # keys that a program may watch
PAGE = 7 * 8
CHANGED, SOMEWHERE = 0, 1
PAUSE = 0.05


class Program:
    """Somebody who is connected."""

    def __init__(self, who: str, region: int) -> None:
        self.who = who
        self.region = region
        self.watched: set[bytes] = set()


class Store:
    """The values, and who is connected."""

    def __init__(self, back: vnplug.BackEnd) -> None:
        self.back = back
        self.programs: dict[int, Program] = {}
        self.values: dict[str, dict[bytes, bytes]] = {}
        self.used: dict[str, int] = {}
        self.sequence = 0
        self.answered = self.changes = self.last_ns = 0
        self.is_stale = False
        self.told_changes = 0

    def join(self, channel: int, who: str) -> None:
        try:
            region = self.back.share(channel, PAGE)
        except vnplug.Error as error:  # the grant's memory is used up, or it is gone already
            self.hang_up(channel, str(error))
            return
        self.programs[channel] = Program(who, region)
        self.is_stale = True

    def leave(self, channel: int) -> None:
        self.programs.pop(channel, None)
        self.is_stale = True

    def hang_up(self, channel: int, why: str) -> None:
        try:
            self.back.hang_up(channel, why[:200])
        except vnplug.Error:
            pass  # gone by itself
        self.leave(channel)

    def hear(self, channel: int, message: bytes) -> None:
        program = self.programs.get(channel)
        if program is None:
            return
        answer = self.answer(program, message)
        self.answered += 1
        self.is_stale = True
        try:
            self.back.send(channel, answer)
        except vnplug.FullError:
            self.hang_up(channel, "answers are not taken")
        except vnplug.Error:
            pass  # it is gone, which is told next

    def answer(self, program: Program, message: bytes) -> bytes:
        command, _, rest = message.partition(b" ")
        values = self.values.setdefault(program.who, {})
        if command == b"keys" and not rest:
            listed = b"keys"
            for key in sorted(values):
                if len(listed) + len(key) >= VALUE:
                    break
                listed += b" " + key
            return listed
        key, _, value = rest.partition(b" ")
        if not key or len(key) > KEY or len(value) > VALUE or (value and command != b"set"):
            return b"error: set KEY VALUE, get KEY, del KEY, keys, watch KEY"
        if command == b"get":
            return b"value " + values[key] if key in values else b"none"
        if command == b"set":
            return b"ok" if self.change(program.who, key, value) else b"full"
        if command == b"del":
            return b"ok" if key in values and self.change(program.who, key, None) else b"none"
        if command == b"watch":
            if len(program.watched) >= WATCHED and key not in program.watched:
                return b"full"
            program.watched.add(key)
            return b"ok"
        return b"error: no such command"

    def change(self, who: str, key: bytes, value: bytes | None) -> bool:
        values = self.values[who]
        size = 0 if value is None else EACH + len(key) + len(value)
        before = EACH + len(key) + len(values[key]) if key in values else 0
        used = self.used.get(who, 0) + size - before
        if used > OWN and size > before:
            return False
        self.used[who] = used
        if value is None:
            del values[key]
        else:
            values[key] = value
        self.changes += 1
        self.last_ns = time.time_ns()
        self.is_stale = True
        for channel, program in self.programs.items():
            if program.who == who and key in program.watched:
                self.event(channel, CHANGED)
        return True

    def event(self, channel: int, event: int) -> None:
        try:
            self.back.event(channel, event)
        except vnplug.Error:
            pass  # it is gone, which is told next

    def publish(self) -> None:
        """Writes everybody's page, and says so if a value changed."""
        self.is_stale = False
        kept, used = sum(map(len, self.values.values())), sum(self.used.values())
        words = [len(self.programs), kept, used, self.answered, self.changes, self.last_ns]
        self.sequence += 2
        for channel, program in self.programs.items():
            try:
                memory = self.back.memory(program.region)
                memory.store(0, self.sequence - 1)
                for number, word in enumerate(words, start=1):
                    memory.store(8 * number, word)
                memory.store(0, self.sequence)
            except vnplug.Error:
                continue
            if self.changes != self.told_changes:
                self.event(channel, SOMEWHERE)
        self.told_changes = self.changes


def serve(back: vnplug.BackEnd) -> None:
    store = Store(back)
    due = 0.0
    while True:
        left = max(0.0, due - time.monotonic()) if store.is_stale else None
        news = back.next(left)
        if news is None:
            pass
        elif news.kind == "joined":
            store.join(news.channel, news.text)
        elif news.kind == "message":
            store.hear(news.channel, news.data)
        elif news.kind == "left":
            store.leave(news.channel)
        elif news.kind == "gone":
            print("the daemon is gone:", ascii(news.text), file=sys.stderr)
        if store.is_stale and time.monotonic() >= due:
            store.publish()
            due = time.monotonic() + PAUSE


def main() -> None:
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: kv.py ID NAME [SOCKET]")
    socket = sys.argv[3] if len(sys.argv) == 4 else None
    try:
        with vnplug.BackEnd(
            int(sys.argv[1]), sys.argv[2], version=1, events_out=2, socket=socket
        ) as back:
            print("ready", flush=True)
            serve(back)
    except vnplug.Error as error:
        sys.exit(f"kv: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
