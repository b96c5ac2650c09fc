//! Frames that lie where they were received: lent, recycled in time, copied where they must be.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vnplug_testing::Deadline;

use super::{EPOCH, bytes, geometry, meta};
use crate::arena::{ArenaReader, BufferGeometry, Buffers, arena_size, header};
use crate::layout::ring_size;
use crate::{Consumer, Producer, Region};

const BUFFER: u64 = 2048;
/// As an AF_XDP socket has it: the kernel's headroom and ours.
const FRAME_AT: u64 = 400;
const KEPT: u64 = 128;
/// What the kernel of these tests has to fill.
const FREE: u64 = 64;
const SPARE: u64 = 1 << 14;

/// A kernel that fills buffers in the order in which it got them, and the host beside it.
struct Wire {
    buffers: Buffers,
    region: Region,
    kept: std::collections::VecDeque<u64>,
    free: std::collections::VecDeque<u64>,
    number: u64,
}

impl Wire {
    fn new(start: u64) -> Self {
        let geometry = BufferGeometry {
            buffer: BUFFER,
            buffers: KEPT + FREE,
            kept: KEPT,
            spare: SPARE,
            epoch: EPOCH,
            queue: 0,
        };
        let region = Region::heap(arena_size(geometry.capacity()));
        let buffers = Buffers::create_at(region.clone(), geometry, start).expect("valid");
        Self {
            buffers,
            region,
            kept: (0..KEPT).collect(),
            free: (KEPT..KEPT + FREE).collect(),
            number: 0,
        }
    }

    fn member(&self, descriptors: u64) -> (Producer, Consumer) {
        let capacity = descriptors * 16;
        let region = Region::heap(ring_size(capacity));
        let snaplen = self.buffers.geometry().snaplen();
        let producer = Producer::create_descriptors(region.clone(), geometry(capacity, snaplen));
        let reader = ArenaReader::attach(self.region.clone()).expect("an arena");
        let consumer = Consumer::attach_group(region, reader).expect("a ring");
        (producer.expect("valid"), consumer)
    }

    /// Receives a turn of frames with these lengths; a long one takes several buffers and is joined
    /// elsewhere.
    fn turn(&mut self, lens: &[usize], members: &mut [&mut Producer]) {
        let (room, mut taken) = ((BUFFER - FRAME_AT) as usize, 0);
        for (nth, &len) in lens.iter().enumerate() {
            let frame = bytes(self.number, len);
            let mut address = frame.as_ptr().addr();
            for (piece, part) in frame.chunks(room).enumerate() {
                let buffer = self.free.pop_front().expect("the kernel has buffers");
                let at = self.buffers.geometry().buffers_at() + buffer * BUFFER + FRAME_AT;
                self.region.write(at, part);
                if piece == 0 && part.len() == len {
                    address = self.region.as_ptr().addr() + at as usize;
                }
                self.kept.push_back(buffer);
                taken += 1;
            }
            let meta = meta(self.number, len);
            let placed = self.buffers.place_at(nth as u64, &meta, address, &frame);
            for member in members.iter_mut() {
                if member.reserve_descriptor().expect("honest") {
                    member.describe(placed, false);
                }
            }
            self.number += 1;
        }
        members.iter_mut().for_each(|member| member.publish());
        self.buffers.turn(taken);
        let back = self.kept.len() - KEPT as usize;
        self.free.extend(self.kept.drain(..back));
    }
}

#[test]
fn a_frame_is_read_where_it_was_received() {
    let mut wire = Wire::new(0);
    let (mut one, mut reader) = wire.member(256);
    let (mut two, mut other) = wire.member(256);
    for number in 0..1000 {
        wire.turn(&[60 + number as usize], &mut [&mut one, &mut two]);
        for reader in [&mut reader, &mut other] {
            let packet = reader.next().unwrap().expect("published");
            let len = 60 + number as usize;
            assert_eq!(packet.meta, meta(number, len));
            assert_eq!(packet.bytes, bytes(number, len));
            reader.release();
        }
    }
    assert_eq!((wire.buffers.lent(), wire.buffers.copied()), (1000, 0));
    assert_eq!(reader.recycled() + other.recycled(), 0);
}

#[test]
fn a_reader_has_time_for_what_is_kept_and_then_is_told_of_its_loss() {
    for start in [0, 0_u64.wrapping_sub(500), (1 << 63) - 500] {
        let mut wire = Wire::new(start);
        let (mut producer, mut reader) = wire.member(4096);
        (0..40).for_each(|_| wire.turn(&[300; 50], &mut [&mut producer]));
        let (mut next, mut received) = (0, 0);
        while let Some(packet) = reader.next().unwrap() {
            next += u64::from(packet.meta.lost);
            assert_eq!(packet.meta.ts_ns, next);
            assert_eq!(packet.bytes, bytes(next, 300));
            (next, received) = (next + 1, received + 1);
        }
        assert_eq!((next, received + reader.dropped()), (2000, 2000));
        // Less the step of the floor.
        assert!((KEPT - 2..=KEPT).contains(&received), "{received}");
    }
}

/// The control of the test above: without the floor, readers would believe what came later.
#[test]
fn without_the_floor_recycled_frames_would_be_taken_for_others() {
    let mut wire = Wire::new(0);
    let (mut producer, mut reader) = wire.member(4096);
    for _ in 0..40 {
        wire.turn(&[300; 50], &mut [&mut producer]);
        wire.region.store_u64(header::FLOOR, 0, Ordering::Relaxed);
    }
    let (mut wrong, mut number) = (0, 0);
    while let Some(packet) = reader.next().unwrap() {
        wrong += u64::from(packet.bytes != bytes(number, 300));
        number += 1;
    }
    assert_eq!(number, 2000);
    assert!(wrong > 1000, "{wrong}");
}

#[test]
fn long_frames_are_copied_and_whole_or_lost() {
    let mut wire = Wire::new(0);
    let (mut producer, mut reader) = wire.member(4096);
    let lens = [100, 4000, 60, 1648, 1649, 3000, 1000];
    let (mut next, mut received, mut copied) = (0_u64, 0, 0);
    for turn in 0..300 {
        wire.turn(&lens, &mut [&mut producer]);
        copied += 3;
        // Lags for some turns: of what is joined less is there than of what is lent.
        if turn % 7 != 0 {
            continue;
        }
        while let Some(packet) = reader.next().unwrap() {
            next += u64::from(packet.meta.lost);
            let len = lens[next as usize % lens.len()];
            assert_eq!(packet.bytes, bytes(next, len));
            (next, received) = (next + 1, received + 1);
        }
    }
    assert_eq!(wire.buffers.copied(), copied);
    assert_eq!(received + reader.recycled() + reader.unread(), 2100);
    assert!(reader.recycled() > 100 && received > 500, "{received}");
}

#[test]
fn a_frame_without_room_before_it_or_out_of_step_is_copied() {
    let mut wire = Wire::new(0);
    let (mut producer, mut reader) = wire.member(256);
    let first = wire.region.as_ptr().addr() as u64 + wire.buffers.geometry().buffers_at();
    let last = first + BUFFER * (KEPT + FREE);
    let places = [
        first + 24,
        first + FRAME_AT + 4,
        last - 50,
        last,
        first - 8,
        8,
    ];
    for (nth, place) in places.into_iter().enumerate() {
        let number = nth as u64;
        let placed = wire.buffers.place_at(
            number,
            &meta(number, 100),
            place as usize,
            &bytes(number, 100),
        );
        producer.describe(placed, false);
    }
    producer.publish();
    for number in 0..places.len() as u64 {
        let packet = reader.next().unwrap().expect("published");
        assert_eq!(packet.bytes, bytes(number, 100));
    }
    assert_eq!((wire.buffers.lent(), wire.buffers.copied()), (0, 6));
}

#[test]
fn the_longest_frame_is_cut_to_what_the_spare_area_takes() {
    let mut wire = Wire::new(0);
    let (mut producer, mut reader) = wire.member(256);
    let snaplen = wire.buffers.geometry().snaplen() as usize;
    wire.turn(&[snaplen + 100], &mut [&mut producer]);
    let packet = reader.next().unwrap().expect("published");
    assert_eq!(packet.bytes, &bytes(0, snaplen + 100)[..snaplen]);
    assert_eq!(packet.meta.wire_len as usize, snaplen + 104);
}

#[test]
fn what_a_thread_reads_while_buffers_are_filled_again_is_whole_or_lost() {
    let enough = if cfg!(miri) { 20 } else { 5_000 };
    let deadline = Deadline::new("enough is read");
    let mut wire = Wire::new(0);
    let (mut producer, mut reader) = wire.member(256);
    let over = AtomicBool::new(false);
    let progress = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut next = 0;
            loop {
                // Acquire: pairs with the Release below; all is published then.
                let last = over.load(Ordering::Acquire);
                while let Some(packet) = reader.next().unwrap() {
                    next += u64::from(packet.meta.lost);
                    assert_eq!(packet.meta.ts_ns, next);
                    assert_eq!(packet.bytes, bytes(next, 600));
                    next += 1;
                    progress.fetch_add(1, Ordering::Relaxed);
                }
                reader.release();
                if last {
                    return reader.dropped();
                }
                std::hint::spin_loop();
            }
        });
        let mut turns = 0_u64;
        while progress.load(Ordering::Relaxed) < enough && !deadline.is_over() {
            wire.turn(&[600; 16], &mut [&mut producer]);
            turns += 1;
            // On one CPU the reader has its turns, too.
            if turns.is_multiple_of(16) {
                std::thread::yield_now();
            }
        }
        over.store(true, Ordering::Release);
        let dropped = reading.join().expect("a reader");
        let received = progress.load(Ordering::Relaxed);
        assert_eq!(received + dropped, 16 * turns);
        assert!(received >= enough, "{received}");
    });
}

#[test]
fn impossible_geometries_are_refused() {
    let good = *Wire::new(0).buffers.geometry();
    let wrong = [
        BufferGeometry {
            spare: 5000,
            ..good
        },
        BufferGeometry {
            buffer: 2044,
            ..good
        },
        BufferGeometry { buffer: 32, ..good },
        BufferGeometry {
            kept: good.buffers,
            ..good
        },
        BufferGeometry {
            buffers: u64::MAX / 8,
            ..good
        },
        BufferGeometry {
            buffers: good.buffers + 1,
            ..good
        },
        BufferGeometry { epoch: 0, ..good },
    ];
    for geometry in wrong {
        let region = Region::heap(arena_size(good.capacity()));
        assert!(Buffers::create(region, geometry).is_err(), "{geometry:?}");
    }
}
