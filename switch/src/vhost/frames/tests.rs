use vnplug_frame::{offload, witness::seed};
use vnplug_ring::offload::gso;
use vnplug_testing::Dice;

use super::super::ring::Agreed;
use super::super::ring::tests::Driver;
use super::*;

fn head(len: usize, is_mergeable: bool) -> Head {
    let mut bytes = Offload::default().to_header(&[]);
    bytes[0] = 0x5a;
    Head {
        bytes,
        len,
        is_mergeable,
    }
}

fn out<'a>(head: &'a [u8], body: &'a [u8]) -> Out<'a> {
    Out {
        head,
        body,
        tail: None,
        offload: None,
        is_valid: false,
        merged: None,
    }
}

/// Buffers of these lengths, each a chain, 256 bytes apart.
fn buffers(driver: &Driver, lens: &[u32]) {
    for (at, len) in (0..).zip(lens) {
        driver.desc(at, (0x8000 + 256 * u64::from(at), *len, 2, 0));
        driver.offer(at);
    }
}

fn bytes_at<const N: usize>(driver: &Driver, at: u64) -> [u8; N] {
    let mut bytes = [0; N];
    driver.region.read(at, &mut bytes);
    bytes
}

#[test]
fn a_frame_takes_as_many_buffers_as_it_needs_and_its_header_says_so() {
    let driver = Driver::new(8);
    let mut ring = driver.ring(Agreed::default());
    // The header itself is spread over two.
    buffers(&driver, &[5, 20, 100, 100]);
    let mut scratch = Scratch::default();
    let put = put(
        &mut ring,
        &mut scratch,
        head(12, true),
        &out(&[1; 40], &[2; 30]),
    );
    assert_eq!(put, Ok(Put::Done));
    ring.publish();
    assert_eq!(driver.used(), 3);
    let lens: Vec<u32> = (0..3).map(|at| driver.element(at).1).collect();
    assert_eq!(lens, [5, 20, 57]);
    assert_eq!(bytes_at(&driver, 0x8000), [0x5a, 0, 0, 0, 0]);
    let second: [u8; 20] = bytes_at(&driver, 0x8100);
    assert_eq!(second[..8], [0, 0, 0, 0, 0, 3, 0, 1]);
    let third: [u8; 57] = bytes_at(&driver, 0x8200);
    assert_eq!((third[26], third[27]), (1, 2));
    assert_eq!(bytes_at(&driver, 0x8200 + 57), [0]);
}

#[test]
fn without_buffers_enough_a_frame_waits_and_nothing_is_taken() {
    let driver = Driver::new(8);
    let mut ring = driver.ring(Agreed::default());
    let mut scratch = Scratch::default();
    for (lens, what) in [(&[][..], Put::Full), (&[50, 50], Put::Short(100))] {
        buffers(&driver, lens);
        let waits = put(
            &mut ring,
            &mut scratch,
            head(12, true),
            &out(&[1; 200], &[]),
        );
        assert_eq!(waits, Ok(what));
        ring.publish();
        assert_eq!(driver.used(), 0);
    }
    driver.desc(2, (0x9000, 150, 2, 0));
    driver.offer(2);
    let done = put(
        &mut ring,
        &mut scratch,
        head(12, true),
        &out(&[1; 200], &[]),
    );
    assert_eq!(done, Ok(Put::Done));
}

#[test]
fn a_guest_without_mergeable_buffers_has_a_frame_in_one_or_not_at_all() {
    let driver = Driver::new(8);
    let mut ring = driver.ring(Agreed::default());
    let mut scratch = Scratch::default();
    buffers(&driver, &[40, 200]);
    let small = put(
        &mut ring,
        &mut scratch,
        head(10, false),
        &out(&[1; 100], &[]),
    );
    assert_eq!(small, Ok(Put::Never));
    let fits = put(
        &mut ring,
        &mut scratch,
        head(10, false),
        &out(&[1; 100], &[]),
    );
    assert_eq!(fits, Ok(Put::Done));
    ring.publish();
    assert_eq!((driver.element(0), driver.element(1)), ((0, 0), (1, 110)));
    // The header has no word of buffers.
    let bytes: [u8; 12] = bytes_at(&driver, 0x8100);
    assert_eq!(bytes[8..], [0, 0, 1, 1]);
}

#[test]
fn frames_are_taken_behind_short_and_long_headers() {
    for header in [10, 12] {
        let driver = Driver::new(8);
        let mut ring = driver.ring(Agreed::default());
        driver.region.write(0x8000, &[0; 12]);
        driver.region.write(0x8000 + header, &[7; 60]);
        driver.desc(0, (0x8000, header as u32 + 60, 0, 0));
        driver.offer(0);
        let (mut batch, mut parts) = (Batch::new(4, 1514), Vec::new());
        let more = take(
            &mut ring,
            &mut parts,
            header as usize,
            &mut batch,
            4,
            &mut 4096,
            None,
        );
        assert_eq!(more, Ok(false));
        assert_eq!((batch.len(), batch.get(0).bytes), (1, &[7; 60][..]));
    }
}

#[test]
fn a_long_frames_rest_is_copied_when_it_leaves_and_its_begin_when_it_came() {
    let (sender, receiver) = (Driver::new(8), Driver::new(8));
    let [mut from, mut to] = [&sender, &receiver].map(|it| it.ring(Agreed::default()));
    sender.region.write(0x8000, &[0; 12]);
    sender.region.write(0x800c, &[7; 1500]);
    // In parts, one of which ends within the begin, and one of which is empty.
    sender.desc(0, (0x8000, 70, 1, 1));
    sender.desc(1, (0x8046, 100, 1, 3));
    sender.desc(3, (0x80aa, 0, 1, 6));
    sender.desc(6, (0x80aa, 1342, 0, 0));
    sender.offer(0);
    let (mut batch, mut parts) = (Batch::new(4, 1514), Vec::new());
    batch.leaves = true;
    take(&mut from, &mut parts, 12, &mut batch, 4, &mut 4096, None).unwrap();
    let it = batch.get(0);
    assert_eq!((it.bytes, it.len()), (&[7; BEGIN][..], 1500));
    assert!(it.fault.is_none());
    sender.region.write(0x800c, &[8; 1500]);
    (0..6).for_each(|at| receiver.desc(at, (0x8000 + 300 * u64::from(at), 300, 2, 0)));
    (0..6).for_each(|at| receiver.offer(at));
    let out = Out {
        tail: it.tail,
        ..out(it.bytes, &[])
    };
    let put = put(&mut to, &mut Scratch::default(), head(12, true), &out);
    assert_eq!(put, Ok(Put::Done));
    to.publish();
    assert_eq!(receiver.used(), 6);
    let came: [u8; 1512] = bytes_at(&receiver, 0x8000);
    assert!(came[12..12 + BEGIN] == [7; BEGIN] && came[12 + BEGIN..] == [8; 1500 - BEGIN]);
    // Or whole, for others.
    batch.fetch(0);
    let it = batch.get(0);
    assert!(it.tail.is_none() && it.bytes.len() == 1500);
    assert!(it.bytes[..BEGIN] == [7; BEGIN] && it.bytes[BEGIN..] == [8; 1500 - BEGIN]);
}

#[test]
fn a_rest_that_is_not_in_memory_is_a_bad_chain() {
    let driver = Driver::new(8);
    let mut ring = driver.ring(Agreed::default());
    driver.desc(0, (0x10_0000 - 1000, 1512, 0, 0));
    driver.offer(0);
    let (mut batch, mut parts) = (Batch::new(4, 1514), Vec::new());
    batch.leaves = true;
    take(&mut ring, &mut parts, 12, &mut batch, 4, &mut 4096, None).unwrap();
    let it = batch.get(0);
    assert_eq!((it.fault, it.len()), (Some(Fault::Chain), 0));
}

#[test]
fn headers_beyond_the_begin_are_copied_before_they_are_judged() {
    let driver = Driver::new(8);
    let mut ring = driver.ring(Agreed::default());
    let offload = |csum_start| Offload {
        flags: flags::NEEDS_CSUM,
        csum_start,
        ..Offload::default()
    };
    for (at, start) in [(0, 34), (1, 1000), (2, 1499)] {
        let place = 0x8000 + 0x1000 * u64::from(at);
        driver.region.write(place, &offload(start).to_header(&[]));
        driver.desc(at, (place, 1512, 0, 0));
        driver.offer(at);
    }
    let (mut batch, mut parts) = (Batch::new(4, 1514), Vec::new());
    batch.leaves = true;
    take(&mut ring, &mut parts, 12, &mut batch, 4, &mut 4096, None).unwrap();
    let all: Vec<_> = batch
        .iter()
        .map(|it| (it.tail.is_some(), it.fault))
        .collect();
    let lie = Some(Fault::Lie);
    assert_eq!(all, [(true, None), (false, None), (false, lie)]);
}

#[test]
fn what_finds_no_room_stays_with_the_guest() {
    let driver = Driver::new(8);
    let mut ring = driver.ring(Agreed::default());
    driver.desc(0, (0x8000, 72, 0, 0));
    (0..4).for_each(|_| driver.offer(0));
    let (mut batch, mut parts) = (Batch::new(3, 1514), Vec::new());
    assert_eq!(
        take(&mut ring, &mut parts, 12, &mut batch, 64, &mut 4096, None),
        Ok(true)
    );
    assert_eq!(batch.len(), 3);
    ring.publish();
    assert_eq!(driver.used(), 3);
    batch.clear();
    assert_eq!(
        take(&mut ring, &mut parts, 12, &mut batch, 64, &mut 4096, None),
        Ok(false)
    );
    assert_eq!(batch.len(), 1);
}

#[test]
fn buffers_of_single_bytes_without_end_are_given_back() {
    let driver = Driver::new(128);
    let mut ring = driver.ring(Agreed::default());
    // 127 bytes in as many descriptors, again and again.
    for at in 0..127 {
        let next = if at < 126 { 3 } else { 2 };
        driver.desc(at, (0x8000, 1, next, at + 1));
    }
    (0..128).for_each(|_| driver.offer(0));
    let mut scratch = Scratch::default();
    let put = put(
        &mut ring,
        &mut scratch,
        head(12, true),
        &out(&[1; 9000], &[]),
    );
    assert_eq!(put, Ok(Put::Never));
    ring.publish();
    assert_eq!(u64::from(driver.used()), MAX_OF_FRAME as u64 / 127 + 1);
}

#[test]
fn buffers_that_are_too_few_are_walked_through_once_until_there_are_more() {
    let driver = Driver::new(64);
    let mut ring = driver.ring(Agreed::default());
    buffers(&driver, &[20; 40]);
    let mut scratch = Scratch::default();
    let mut walk = |ring: &mut Ring, len: usize| {
        let put = put(ring, &mut scratch, head(12, true), &out(&vec![1; len], &[]));
        (put.unwrap(), scratch.parts.len())
    };
    assert_eq!(walk(&mut ring, 1000), (Put::Short(800), 40));
    for len in [1000, 789, 9000] {
        assert_eq!(walk(&mut ring, len), (Put::Short(800), 0), "{len}");
    }
    // What fits is given, and then it is another ring.
    assert_eq!(walk(&mut ring, 28), (Put::Done, 2));
    assert_eq!(walk(&mut ring, 1000), (Put::Short(760), 38));
    // One more, which is seen although others were left.
    driver.desc(40, (0x4000, 500, 2, 0));
    driver.offer(40);
    assert_eq!(walk(&mut ring, 1000), (Put::Done, 39));
}

#[test]
fn whatever_descriptors_and_headers_say_each_chain_is_a_frame_that_is_right_or_counted_v9_v13() {
    let mut rolls = Dice(seed("descriptors and headers that lie"));
    let mut dice = |sides: u64| rolls.below(sides);
    let frame = tcp(false, 1000, 1400);
    let agreed = Agreed {
        indirect: true,
        ..Agreed::default()
    };
    let (mut batch, mut parts) = (Batch::new(16, 1514), Vec::new());
    let (mut right, mut counted, mut broken, mut full) = (0, 0, 0, 0);
    let mut there = None;
    for _ in 0..30_000 {
        let (driver, ring) = there.get_or_insert_with(|| {
            let driver = Driver::new(8);
            let ring = driver.ring(agreed);
            (driver, ring)
        });
        let mut says = Offload {
            flags: flags::NEEDS_CSUM,
            gso_type: gso::TCPV4,
            gso_size: 200,
            csum_start: 34,
            csum_offset: 16,
        };
        match dice(6) {
            0 => says.gso_size = dice(1 << 16) as u16,
            1 => says.gso_type = dice(256) as u8,
            2 => says.flags = dice(256) as u8,
            3 => says.csum_start = dice(1 << 16) as u16,
            4 => says = Offload::default(),
            _ => {}
        }
        driver.region.write(0x8000, &says.to_header(&frame));
        driver.region.write(0x800c, &frame);
        let need = 12 + frame.len() as u32;
        for at in 0..8 {
            let mut it = (0x8000, need, 0, dice(8) as u16);
            match dice(8) {
                0 => it.0 = [0x10_0000 - dice(2000), dice(u64::MAX)][dice(2) as usize],
                1 => it.1 = [dice(2000), dice(1 << 32)][dice(2) as usize] as u32,
                2 => it.2 = dice(1 << 16) as u16,
                3 => it.2 = dice(8) as u16,
                4 => (it.2, it.3) = (1, dice(1 << 16) as u16),
                _ => {}
            }
            driver.desc(at, it);
        }
        let count = dice(8) as u16;
        let first = driver.used();
        for _ in 0..count {
            let head = if dice(2000) == 0 { 8 } else { 0 };
            driver.offer(head + dice(8) as u16);
        }
        batch.clear();
        batch.leaves = dice(2) == 0;
        let taken = take(ring, &mut parts, 12, &mut batch, 16, &mut 4096, None);
        ring.publish();
        if taken.is_err() {
            (broken, there) = (broken + 1, None);
            continue;
        }
        let used = driver.used().wrapping_sub(first);
        if used < count && taken == Ok(true) && !batch.has_room(MAX_SUPER) {
            // Their packets are enough for a turn: the rest would be the next one's.
            (full, there) = (full + 1, None);
            continue;
        }
        // Each chain is given back, and is one frame.
        assert_eq!(used, count);
        assert_eq!(batch.len(), usize::from(count));
        for at in 0..batch.len() {
            batch.fetch(at);
            let it = batch.get(at);
            let work = it
                .offload
                .map(|left| offload::work(it.bytes, it.len() as u32, left));
            let longest = match work {
                Some(Ok(Some(work))) if work.longest() > 0 => work.longest(),
                Some(Err(_)) => usize::MAX,
                _ => it.len(),
            };
            match it.fault {
                None => assert!(longest <= 1514, "{it:?}"),
                Some(_) => counted += 1,
            }
            right += usize::from(it.fault.is_none());
        }
        // Who says the truth afterwards is heard.
        driver
            .region
            .write(0x8000, &Offload::default().to_header(&frame));
        driver.desc(0, (0x8000, need, 0, 0));
        driver.offer(0);
        batch.clear();
        assert_eq!(
            take(ring, &mut parts, 12, &mut batch, 16, &mut 4096, None),
            Ok(false)
        );
        ring.publish();
        batch.fetch(0);
        assert_eq!((batch.len(), batch.get(0).fault), (1, None));
        assert!(batch.get(0).bytes == frame);
    }
    assert!(
        right > 10_000 && counted > 10_000 && broken > 20 && full < 100,
        "{right} {counted} {broken} {full}"
    );
}

/// A segment of a flow, or the ACK for it, of IPv4 without options or a right checksum of TCP.
fn tcp(is_ack: bool, number: u32, payload: usize) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0];
    frame.extend((40 + payload as u16).to_be_bytes());
    frame.extend([0, 9, 0x40, 0, 64, 6, 0, 0]);
    let ends = [[10, 0, 0, 1], [10, 0, 0, 2]];
    let ports = [[0x1b, 0x58], [0x1b, 0x59]];
    let (from, to) = if is_ack { (1, 0) } else { (0, 1) };
    frame.extend([ends[from], ends[to]].concat());
    frame.extend([ports[from], ports[to]].concat());
    let [seq, ack] = if is_ack { [1, number] } else { [number, 1] };
    frame.extend([seq, ack].iter().flat_map(|it: &u32| it.to_be_bytes()));
    frame.extend([0x50, 0x10, 4, 0, 0, 0, 0, 0]);
    frame.resize(54 + payload, 0);
    frame
}

#[test]
fn an_ack_that_a_batch_has_too_little_room_for_has_fewer_before_it_and_is_not_lost() {
    // The batch's room, and the numbers of the ACKs of each turn.
    let (first, second) = ([2, 4, 6, 8, 10, 12, 14, 16, 18, 20], [22, 24, 26, 28, 30]);
    let whole = [&first[..], &second].concat();
    let cases: [(usize, &[&[u32]]); 6] = [
        (1, &[&[20], &[30]]),
        (2, &[&[2, 20], &[22, 30]]),
        (4, &[&[2, 4, 6, 20], &[22, 24, 26, 30]]),
        // The second one has what the first one left.
        (11, &[&[2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 30]]),
        (13, &[&[2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 30]]),
        (100, &[&whole]),
    ];
    for (room, turns) in cases {
        let driver = Driver::new(8);
        let mut ring = driver.ring(Agreed::default());
        let mut acks = Expansion::default();
        let given = |acks: &mut Expansion, first: u32, count: u32| {
            let payload = count as usize * 1000;
            let frame = tcp(false, first * 1000, payload);
            acks.given(&frame, &[], frame.len(), Some(1000));
        };
        // It has acknowledged all that it was given before.
        given(&mut acks, 0, 1);
        let mut batch = Batch::new(1, 1514);
        acks.expand(&tcp(true, 1000, 0), &Offload::default(), &mut batch);
        assert!(batch.is_empty());
        given(&mut acks, 1, 20);
        given(&mut acks, 21, 10);
        for (at, number) in [(0, 21_000), (1, 31_000)] {
            let buffer = 0x8000 + 256 * u64::from(at);
            driver.region.write(buffer, &[0; 12]);
            driver.region.write(buffer + 12, &tcp(true, number, 0));
            driver.desc(at, (buffer, 12 + 54, 0, 0));
            driver.offer(at);
        }
        let (mut parts, mut added) = (Vec::new(), 0);
        for (turn, expected) in turns.iter().enumerate() {
            let mut batch = Batch::new(room, 1514);
            let more = take(
                &mut ring,
                &mut parts,
                12,
                &mut batch,
                room,
                &mut 4096,
                Some(&mut acks),
            );
            assert!(more.is_ok(), "{room}");
            let numbers: Vec<u32> = (0..batch.len())
                .map(|at| batch.get(at).bytes)
                .map(|it| u32::from_be_bytes(it[42..46].try_into().unwrap()) / 1000 - 1)
                .collect();
            assert_eq!(numbers, **expected, "{room}: {turn}");
            added += numbers.len() as u64;
        }
        // Each of the guest's own is there once.
        assert_eq!(acks.added, added - 2, "{room}");
        ring.publish();
        assert_eq!(driver.used(), 2, "{room}");
    }
}

#[test]
fn a_frame_in_one_buffer_is_the_same_as_over_several() {
    let (frame, more) = ([1; 40], [2; 30]);
    for body in [&more[..], &[]] {
        let need = (12 + frame.len() + body.len()) as u32;
        // Just enough in one, more than that, and one byte too few.
        let ways: [&[u32]; 3] = [&[need], &[need + 100], &[need - 1, 5]];
        let all = ways.map(|lens| {
            let driver = Driver::new(8);
            let mut ring = driver.ring(Agreed::default());
            buffers(&driver, lens);
            let out = out(&frame, body);
            let put = put(&mut ring, &mut Scratch::default(), head(12, true), &out);
            assert_eq!(put, Ok(Put::Done));
            ring.publish();
            let given: Vec<(u32, u32)> = (0..driver.used()).map(|at| driver.element(at)).collect();
            let bytes = given.iter().flat_map(|(at, len)| {
                let mut bytes = vec![0; *len as usize];
                driver
                    .region
                    .read(0x8000 + 256 * u64::from(*at), &mut bytes);
                bytes
            });
            (given.len(), bytes.collect::<Vec<u8>>())
        });
        let [(1, just), (1, more), (2, over)] = all else {
            panic!("{all:?}");
        };
        assert_eq!(just, more);
        assert_eq!(just[10..12], [1, 0], "buffers that it takes");
        assert_eq!((&just[..10], &just[12..]), (&over[..10], &over[12..]));
    }
}
