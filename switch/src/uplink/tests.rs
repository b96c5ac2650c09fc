use vnplug_path::source::Wake;
use vnplug_ring::offload::flags;

use super::*;

#[test]
fn a_frame_that_was_cut_or_lied_about_is_there_to_be_counted_only() {
    let bytes = [2_u8; 200];
    let frame = |len: usize, wire_len: u32, offload: Offload| Frame {
        bytes: &bytes[..len],
        wire_len,
        offload,
        ..Frame::default()
    };
    let plain = Offload::default();
    let lie = Offload {
        flags: flags::NEEDS_CSUM,
        csum_start: 300,
        ..plain
    };
    for (frame, fault) in [
        (frame(100, 100, plain), None),
        (frame(100, 101, plain), Some(Fault::Long)),
        (frame(101, 101, plain), Some(Fault::Long)),
        (frame(100, 100, lie), Some(Fault::Lie)),
    ] {
        let entered = entered(3, &frame, 100);
        assert_eq!((entered.from, entered.fault), (3, fault));
    }
}

#[test]
fn a_super_frame_in_packets_that_are_too_long_is_there_to_be_counted_only() {
    let mut bytes = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0];
    bytes.extend(2000_u16.to_be_bytes());
    bytes.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    bytes.extend([0; 12]);
    bytes.extend([0x50, 0x18, 4, 0, 0, 0, 0, 0]);
    bytes.resize(14 + 2000, 7);
    for (gso_size, fault) in [(1460, None), (1461, Some(Fault::Long))] {
        let frame = Frame {
            bytes: &bytes,
            wire_len: bytes.len() as u32,
            offload: Offload {
                flags: flags::NEEDS_CSUM,
                gso_type: gso::TCPV4,
                gso_size,
                csum_start: 34,
                csum_offset: 16,
            },
            ..Frame::default()
        };
        assert_eq!(entered(3, &frame, 1514).fault, fault, "{gso_size}");
    }
}

/// A queue that has one frame, then fails.
struct Failing(bool);

impl Queue for Failing {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        if std::mem::replace(&mut self.0, true) {
            return Err(SourceError::new("as the test wants"));
        }
        sink(&[Frame::default()]);
        Ok(Received::Frames(1))
    }

    fn arm(&mut self) -> Wake<'_> {
        Wake::NOW
    }

    fn woke(&mut self, _: Seen) {}

    fn counters(&mut self) -> QueueCounters {
        QueueCounters {
            seen: 3,
            waiting: 2,
            ..QueueCounters::default()
        }
    }

    fn state(&self) -> &'static str {
        "up"
    }
}

#[test]
fn a_queue_that_fails_is_opened_again_and_its_frames_are_accounted_for() {
    let mut uplinks = Uplinks::new("lan0").unwrap();
    let mut opened = 0;
    let open: OpenUplink = Box::new(move || {
        opened += 1;
        // It is not there at first, nor when it has failed.
        let queues = || vec![Box::new(Failing(false)) as Box<dyn Queue>];
        Ok((opened % 2 == 0).then(queues))
    });
    let uplink = Uplink {
        interface: "eth1".into(),
        text: "eth1".into(),
        how: "a test",
        is_twin: false,
        open,
    };
    uplinks.add(uplink, 1).unwrap();
    let again = |uplinks: &mut Uplinks| {
        locked(&uplinks.all[0]).again = Instant::now();
        uplinks.woke(false);
    };
    let up = |uplinks: &mut Uplinks| {
        uplinks.count();
        uplinks.up
    };
    assert_eq!(up(&mut uplinks), 0);
    let all = |uplinks: &mut Uplinks| {
        let mut frames = 0;
        while uplinks.receive(&mut |_, it| frames += it.len()).is_some() {}
        frames
    };
    for _ in 0..2 {
        assert_eq!(all(&mut uplinks), 0);
        assert!(uplinks.arm().is_some());
        again(&mut uplinks);
        if up(&mut uplinks) == 0 {
            again(&mut uplinks);
        }
        assert_eq!((up(&mut uplinks), all(&mut uplinks)), (1, 1));
        assert_eq!((all(&mut uplinks), up(&mut uplinks)), (0, 0));
    }
    let named = uplinks.named();
    let value = |name: &str| named.iter().find(|it| it.0 == name).map(|it| it.1);
    let parts = ["entered", "kernel_dropped", "in_kernel"];
    let parts = parts.map(|part| value(&format!("uplink_{part}")).unwrap());
    assert_eq!((value("uplink_seen"), parts), (Some(6), [2, 4, 0]));
    // When it goes what it counted stays.
    assert!(uplinks.unplug(2).is_none());
    again(&mut uplinks);
    if up(&mut uplinks) == 0 {
        again(&mut uplinks);
    }
    assert!(uplinks.unplug(1).is_some() && uplinks.is_empty());
    assert_eq!(all(&mut uplinks), 0);
    uplinks.count();
    let named = uplinks.named();
    let value = |name: &str| named.iter().find(|it| it.0 == name).map(|it| it.1);
    let parts = ["uplinks_up", "uplink_seen", "uplink_kernel_dropped"];
    assert_eq!(parts.map(value), [Some(0), Some(9), Some(6)]);
}
