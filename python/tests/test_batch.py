"""Batches: what NumPy sees, and that no view outlives the memory it looks at."""

import gc
import struct
import unittest

import lab
import numpy as np
import vnplug

COUNT = 20000
GEN = f"lab=gen,pps=100000,count={COUNT},flows=16,size=60,run=7"
ENDLESS = "lab=gen,pps=20000,size=200,run=7"




class Batches(lab.Test):
    def whole(self, copy: bool, max: int) -> None:
        daemon = self.daemon(GEN, GEN.replace("lab", "twin"))
        frames, times, total, told = [], [], 0, 0
        with vnplug.open("lab", socket=daemon.socket, ring_bytes=1 << 16 if not copy else 0) as port:
            for batch in port.batches(max, copy=copy):
                self.assertLessEqual(len(batch), max)
                self.assertTrue(copy is batch.is_copy or len(batch) == 1)
                times += batch.ts_ns.tolist()
                frames += [bytes(frame) for frame in batch]
                total += sum(batch.wire_len)
                told += sum(batch.lost)
            stats = port.stats()
        self.assertEqual(len(times) + stats.lost, COUNT)
        self.assertEqual((total, len(frames)), (60 * len(times), len(times)))
        # Of losses after the last packet none tells.
        self.assertLessEqual(told, stats.lost)
        self.assertEqual(times, sorted(times))
        self.assertEqual(len(set(frames)), len(frames), "a packet came twice, or was overwritten")

    def test_every_packet_is_in_one_batch_where_it_lies(self) -> None:
        self.whole(copy=False, max=1000)

    def test_every_packet_is_in_one_batch_copied(self) -> None:
        self.whole(copy=True, max=1000)

    def test_several_rings_have_their_turns(self) -> None:
        daemon = self.daemon(GEN.replace("gen,", "gen,queues=2,"))
        queues: dict[int, int] = {}
        with vnplug.open("lab", socket=daemon.socket, ring_bytes=16 << 20) as port:
            self.assertEqual(port.rings, 2)
            for batch in port.batches():
                for queue in batch.queue:
                    queues[queue] = queues.get(queue, 0) + 1
        self.assertEqual(sum(queues.values()), COUNT)
        self.assertEqual(set(queues), {0, 1})

    def test_columns_are_arrays_without_a_copy(self) -> None:
        daemon = self.daemon(ENDLESS)
        with vnplug.open("lab", socket=daemon.socket) as port, self.some(port) as batch:
            records = np.asarray(batch.records)
            self.assertEqual(records.dtype.itemsize, 40)
            for name, kind in (
                ("ts_ns", "i8"), ("offset", "u8"), ("caplen", "u4"), ("wire_len", "u4"),
                ("flow_hash", "u4"), ("lost", "u4"), ("vlan", "u2"), ("flags", "u2"),
                ("source", "u2"), ("queue", "u2"),
            ):  # fmt: skip
                view = getattr(batch, name)
                column = np.asarray(view)
                self.assertEqual(column.dtype, np.dtype(kind), name)
                np.testing.assert_array_equal(column, records[name])
                self.assertEqual(view.tolist(), column.tolist())
                self.assertFalse(column.flags.writeable)
                # The same memory, not a copy of it.
                self.assertTrue(np.shares_memory(column, np.asarray(batch.records)), name)
            data = np.asarray(batch.data)
            self.assertEqual((data.dtype, data.ndim), (np.uint8, 1))
            for index in (0, len(batch) - 1, -1):
                start, length = int(batch.offset[index]), int(batch.caplen[index])
                frame = data[start : start + length].tobytes()
                self.assertEqual(frame, bytes(batch[index]))
                self.assertEqual(struct.unpack_from(">H", frame, 12), (0x0800,))
            for wrong in (len(batch), -len(batch) - 1):
                with self.assertRaises(IndexError):
                    batch[wrong]
            del data

    def test_a_vectorised_look_at_all_frames(self) -> None:
        daemon = self.daemon(ENDLESS)
        with vnplug.open("lab", socket=daemon.socket) as port, self.some(port) as batch:
            protocol = np.asarray(batch.data)[np.asarray(batch.offset) + 23]
            self.assertEqual(set(protocol.tolist()), {17})

    def test_nothing_goes_on_while_somebody_looks(self) -> None:
        daemon = self.daemon(ENDLESS)
        port = vnplug.open("lab", socket=daemon.socket)
        batch = self.some(port)
        array = np.asarray(batch.data)
        before = array.tobytes()
        for call in (port.next, port.batch, port.close, batch.release, lambda: next(iter(port))):
            with self.assertRaisesRegex(vnplug.LoanError, "look at packets"):
                call()
        self.assertFalse(port.closed)
        # What neither takes nor releases is allowed.
        self.assertGreater(port.stats().received, 0)
        port.set_filter("udp")
        self.assertEqual(array.tobytes(), before)
        part = array[:4]
        del array
        with self.assertRaises(BufferError):
            batch.release()
        del part
        batch.release()
        batch.release()
        self.assertTrue(batch.released)
        self.assertIn("released", repr(batch))
        for look in (lambda: batch.data, lambda: batch[0], batch.copy):
            with self.assertRaisesRegex(vnplug.LoanError, "released"):
                look()
        # The columns are the batch's own.
        self.assertEqual(len(batch.ts_ns), len(batch))
        port.close()

    def test_the_next_call_releases_a_batch_nobody_looks_at(self) -> None:
        daemon = self.daemon(ENDLESS)
        with vnplug.open("lab", socket=daemon.socket) as port:
            first = self.some(port)
            second = self.some(port)
            self.assertTrue(first.released)
            self.assertFalse(second.released)
            self.assertIsNotNone(port.next(lab.LIMIT))
            self.assertTrue(second.released)

    def test_leaving_with_while_somebody_looks_raises(self) -> None:
        daemon = self.daemon(ENDLESS)
        with vnplug.open("lab", socket=daemon.socket) as port:
            with self.assertRaises(vnplug.LoanError):
                with self.some(port) as batch:
                    view = batch[0]
            del view

    def test_a_view_outlives_batch_and_port(self) -> None:
        daemon = self.daemon(ENDLESS)
        port = vnplug.open("lab", socket=daemon.socket)
        batch = self.some(port)
        view, before = batch.data, bytes(batch.data)
        columns = np.asarray(batch.records)
        del batch, port
        gc.collect()
        daemon.kill()
        self.assertEqual(bytes(view), before)
        del view
        self.assertGreater(int(columns["ts_ns"][0]), 0)

    def test_copies_are_free_of_all_this(self) -> None:
        daemon = self.daemon(ENDLESS)
        port = vnplug.open("lab", socket=daemon.socket)
        lent = self.some(port)
        copy = lent.copy()
        self.assertEqual([bytes(frame) for frame in copy], [bytes(frame) for frame in lent])
        array = np.asarray(copy.data)
        direct = port.batch(timeout=lab.LIMIT, copy=True)
        self.assertTrue(copy.is_copy and direct.is_copy and len(direct))
        port.close()
        copy.release()
        self.assertEqual(array.tobytes(), bytes(copy.data))

    def test_an_empty_batch_means_that_the_time_is_over(self) -> None:
        daemon = self.daemon(ENDLESS)
        with vnplug.open("lab", socket=daemon.socket, filter="port 1 and port 2") as port:
            for copy in (False, True):
                batch = port.batch(timeout=0.05, copy=copy)
                self.assertEqual((len(batch), len(batch.data), list(batch)), (0, 0, []))
                self.assertEqual(len(np.asarray(batch.records)), 0)
                self.assertFalse(batch)
            with self.assertRaises(vnplug.InvalidError):
                port.batch(0)

    def test_a_release_gives_the_room_back(self) -> None:
        daemon = self.daemon(ENDLESS)
        with vnplug.open("lab", socket=daemon.socket, ring_bytes=1 << 16) as port:
            for _ in range(50):
                with self.some(port):
                    pass
            # A batch that is dropped releases, too; 50 of them are more than the ring holds.
            for _ in range(50):
                self.some(port)
            self.assertGreater(port.stats().received, 100)

    def some(self, port: vnplug.Port) -> vnplug.Batch:
        batch = port.batch(timeout=lab.LIMIT)
        # A batch of one packet may be a copy; such a one does not serve here.
        while batch.is_copy:
            batch = port.batch(timeout=lab.LIMIT)
        return batch


if __name__ == "__main__":
    unittest.main()
