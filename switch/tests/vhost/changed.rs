//! What is merged while tags are changed, while settings of the port change, and while the guest says that it
//! takes it no more.

use super::*;

/// What a guest with several rings to receive in was given: the frames of the wire of each flow, by the port
/// it comes from, and in which ring they were.
#[derive(Default)]
struct Flows {
    wire: Vec<(u16, Vec<Vec<u8>>)>,
    rings: Vec<(u16, u32)>,
    /// Frames that it was given.
    count: usize,
}

impl Flows {
    /// Takes what is in the ring that the guest receives in.
    fn take(&mut self, guest: &mut Guest, ports_at: usize) {
        while let Some((header, frame)) = guest.received() {
            self.count += 1;
            let port = u16::from_be_bytes([frame[ports_at], frame[ports_at + 1]]);
            let ring = (port, guest.receiving.number);
            if !self.rings.contains(&ring) {
                self.rings.push(ring);
            }
            let it = self.wire.iter().position(|it| it.0 == port);
            let at = it.unwrap_or_else(|| {
                self.wire.push((port, Vec::new()));
                self.wire.len() - 1
            });
            self.wire[at].1.extend(cut(&header, frame));
        }
    }

    fn len(&self) -> usize {
        self.wire.iter().map(|it| it.1.len()).sum()
    }
}

fn tagged(frame: &[u8], vlan: u8) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame.splice(12..12, [0x81, 0, 0, vlan]);
    frame
}

#[test]
fn what_has_its_tag_put_in_or_taken_out_is_merged_and_each_flow_stays_whole_in_one_ring() {
    for is_access in [true, false] {
        let served = Served::here();
        let mut sender = served.guest(PLAIN);
        let features = PLAIN | GUEST_CSUM | GUEST_TSO4;
        let mut takes = Guest::with(Front::connect(&served.path), features);
        takes.start();
        let mut second = Ring::new(2, 0x3_0000);
        second.buffers = 0x18_0000;
        let other = Ring::new(3, 0x4_0000);
        assert!(takes.front.start(&second) && takes.front.start(&other));
        std::mem::swap(&mut takes.receiving, &mut second);
        (0..SIZE).for_each(|at| takes.post(at));
        takes.receiving.kick();
        // The tag is taken out before the guest has it, or put in.
        let kinds = ["trunk=10", "vlan=10"];
        let (from, to) = if is_access { (0, 1) } else { (1, 0) };
        let set = |port, text: &str| served.board.set(Some(port), text).unwrap();
        set(1, kinds[from]);
        set(2, kinds[to]);
        set(2, "gro=20");
        served.count("entered");
        let ports_at = if is_access { 34 } else { 38 };
        let ports: Vec<u16> = (7000..7008).collect();
        let (mut flows, mut sent) = (Flows::default(), 0);
        for round in 0..40 {
            // Of each flow a few, in turns.
            let parts = (0..2).flat_map(|part| ports.iter().map(move |port| (part, *port)));
            let frames =
                parts.flat_map(|(part, port)| segments_from(port, round * 6 + part * 3, 3, 1000));
            let frames: Vec<Vec<u8>> = frames
                .map(|frame| match is_access {
                    true => tagged(&frame, 10),
                    false => frame,
                })
                .collect();
            frames.iter().for_each(|frame| sender.send(frame));
            sent += frames.len();
            eventually("all came", || {
                for _ in 0..2 {
                    flows.take(&mut takes, ports_at);
                    std::mem::swap(&mut takes.receiving, &mut second);
                }
                flows.len() == sent && sender.has_sent()
            });
        }
        for (port, wire) in &flows.wire {
            let expected = segments_from(*port, 0, 240, 1000);
            let expected = expected.iter().map(|frame| match is_access {
                true => frame.clone(),
                false => tagged(frame, 10),
            });
            assert!(expected.eq(wire.iter().cloned()), "{is_access}: {port}");
        }
        // Each is in one ring, and both are used.
        assert_eq!(flows.rings.len(), ports.len(), "{:?}", flows.rings);
        let of_first = flows.rings.iter().filter(|it| it.1 == 0).count();
        assert!((1..8).contains(&of_first), "{:?}", flows.rings);
        assert!(flows.count < sent, "{}", flows.count);
        assert_eq!(served.count("out_merged"), (sent - flows.count) as u64);
        served.check_sums();
    }
}

#[test]
fn merged_frames_that_wait_when_the_guest_takes_none_any_more_are_dropped_and_others_that_wait_come()
 {
    let served = Served::set("default.gro=20");
    let mut sender = served.guest(PLAIN);
    let wants = PLAIN | GUEST_CSUM | GUEST_TSO4 | CTRL_VQ | GUEST_OFFLOADS;
    let mut takes = served.guest(wants);
    let mut control = Ring::new(2, 0x3_0000);
    assert!(takes.front.start(&control));
    // More than all its buffers; it takes none of them back. Between them are frames that no offload is for.
    let (mut others, mut sent) = (0, 0);
    for round in 0..10 {
        for frame in segments(round * 40, 40, 1448) {
            sender.send(&frame);
            sent += 1;
        }
        sender.send(&frame(0xee, 1, round));
        others += 1;
        eventually("all came back", || sender.has_sent());
    }
    assert!(served.count("out_merged") > 0);
    assert_eq!(served.count("out_dropped_gone"), 0);
    served.check_sums();
    let region = takes.region.clone();
    region.write(0x8_0000, &[&[5, 0][..], &GUEST_CSUM.to_le_bytes()].concat());
    control.desc(&region, 0, (0x8_0000, 10, 1, 1));
    control.desc(&region, 1, (0x8_1000, 1, 2, 0));
    control.offer(&region, 0);
    control.kick();
    eventually("it is answered", || control.back(&region).is_some());
    // What it has already it has as it was; what comes from now on is single.
    let (mut wire, mut singles) = (Vec::new(), 0);
    let mut is_from_before = usize::from(SIZE);
    while singles < others {
        let (header, bytes) = takes.next();
        let used = bytes.len().div_ceil(2048).max(1);
        let offload = Offload::from_header(header.first_chunk().unwrap());
        assert!(
            !offload.is_super_frame() || is_from_before > 0,
            "a merged one came"
        );
        is_from_before = is_from_before.saturating_sub(used);
        match bytes[12..14] == [0x88, 0xb5] {
            true => {
                assert_eq!(bytes, frame(0xee, 1, singles));
                singles += 1;
            }
            false => wire.extend(cut(&header, bytes)),
        }
    }
    // In order, with what was dropped left out.
    let all = segments(0, sent, 1448);
    let mut left = all.iter();
    assert!(wire.iter().all(|it| left.any(|other| other == it)));
    assert!(served.count("out_dropped_gone") > 0);
    let merged = served.count("out_merged");
    let after = segments(sent, 40, 1448);
    for frame in &after {
        sender.send(frame);
    }
    assert!(after.iter().all(|frame| takes.next().1 == *frame));
    assert_eq!(served.count("out_merged"), merged);
    served.check_sums();
    served.check_alive();
}

#[test]
fn a_wire_that_becomes_slow_and_fast_again_while_segments_are_merged_keeps_their_order() {
    let served = Served::set("default.gro=20");
    let mut sender = served.guest(PLAIN);
    let mut takes = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
    // One after the other: each is there beside what was before.
    let changes = [
        "delay=3ms",
        "delay=0",
        "rate=200M",
        "rate=1G delay=1ms",
        "default",
        "gro=2",
        "gro=44",
    ];
    let (mut at, mut wire, mut frames) = (0, Vec::new(), 0);
    let mut merged = Vec::new();
    for round in 0..7 * 10 {
        for half in 0..2 {
            for frame in segments(at + half * 20, 20, 1000) {
                sender.send(&frame);
            }
            // Half of it is on its way, or not yet taken.
            if half == 0 {
                let text = changes[round % changes.len()];
                served.board.set(Some(2), text).unwrap();
                served.board.set(Some(2), "gro=20").unwrap();
            }
            while let Some((header, frame)) = takes.received() {
                frames += 1;
                wire.extend(cut(&header, frame));
            }
        }
        at += 40;
        eventually("all came back", || sender.has_sent());
        if round % 7 == 6 {
            while wire.len() < at as usize {
                let (header, frame) = takes.next();
                frames += 1;
                wire.extend(cut(&header, frame));
            }
            merged.push(served.count("out_merged"));
            served.check_sums();
        }
    }
    assert!(wire == segments(0, at, 1000));
    assert_eq!(*merged.last().unwrap(), u64::from(at) - frames);
    // A slow wire carries single frames, and one that is fast again has them merged.
    assert!(merged.last() > merged.first(), "{merged:?}");
    served.check_sums();
    served.check_alive();
}
