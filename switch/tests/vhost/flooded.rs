//! A flood of what cannot be merged, to a guest for which segments are: they are hardly looked for then.

use super::*;

/// Two stations that send to a third, for which segments are merged, a batch at a time.
struct Flood {
    served: Served,
    /// Sends a stream, and another sends what cannot be merged.
    stream: Guest,
    other: Guest,
    takes: Guest,
    /// Segments of the stream that were sent.
    at: u32,
}

impl Flood {
    fn begin() -> Self {
        // Batches are taken by one thread.
        let served = Served::open("default.gro=20", 0, |_| Vec::new());
        let mut takes = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
        let (mut stream, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
        // All is for it alone.
        takes.send(&frame(1, 2, 0));
        for sender in [&mut stream, &mut other] {
            assert_eq!(sender.next().1, frame(1, 2, 0));
        }
        Self {
            served,
            stream,
            other,
            takes,
            at: 0,
        }
    }

    /// A batch of segments of 64 connections, one of each.
    fn flood(&mut self) {
        let single = |port| {
            let mut frame = segments_from(port, 0, 1, 100).remove(0);
            frame[11] = 3;
            frame
        };
        let frames: Vec<_> = (10_000..10_000 + 64).map(single).collect();
        assert_eq!(pass(&mut self.other, &mut self.takes, &frames), 64);
    }

    /// A batch of segments that follow each other: whether it was merged.
    fn stream(&mut self) -> bool {
        let frames = segments_from(7000, self.at, 32, 1000);
        self.at += 32;
        match pass(&mut self.stream, &mut self.takes, &frames) {
            32 => false,
            2 => true,
            count => panic!("it was given in {count} frames"),
        }
    }

    /// As many batches of the stream as are not merged; the one that is follows them. The flood's come `before` or after
    /// each of them, or not at all.
    fn until_merged(&mut self, before: Option<bool>) -> usize {
        let is_merged = |_: &usize| {
            if before == Some(true) {
                self.flood();
            }
            let is_merged = self.stream();
            if before == Some(false) {
                self.flood();
            }
            is_merged
        };
        (0..1_000).find(is_merged).expect("it is merged some time")
    }

    /// As many frames as it takes until segments are hardly looked for.
    fn flood_for_long(&mut self) {
        (0..1024 / 64).for_each(|_| self.flood());
    }
}

/// A batch from one to the other, which has it as it was; in how many frames.
fn pass(sender: &mut Guest, takes: &mut Guest, frames: &[Vec<u8>]) -> usize {
    sender.send_all(frames);
    let (mut wire, mut count) = (Vec::new(), 0);
    while wire.len() < frames.len() {
        let (header, frame) = takes.next();
        wire.extend(cut(&header, frame));
        count += 1;
    }
    assert!(wire == frames);
    eventually("all came back", || sender.has_sent());
    count
}

#[test]
fn a_stream_is_merged_again_some_batches_after_a_flood_has_ended() {
    let mut all = Flood::begin();
    // The control: a flood that is shorter by a batch changes nothing.
    for _ in 0..3 {
        assert!(all.stream());
        (1..1024 / 64).for_each(|_| all.flood());
        assert!(all.stream());
    }
    for _ in 0..20 {
        all.flood_for_long();
        // The distances are 8 to 24 batches; the last of them is the one that is looked at.
        let unmerged = all.until_merged(None);
        assert!((7..24).contains(&unmerged), "{unmerged}");
        // From then on all are.
        assert!((0..50).all(|_| all.stream()));
    }
    all.served.check_sums();
    all.served.check_alive();
}

#[test]
fn a_stream_is_merged_while_the_flood_of_another_goes_on() {
    let mut all = Flood::begin();
    let mut most = 0;
    for round in 0..20 {
        all.flood_for_long();
        // Every second batch is the stream's, whichever is first.
        let before = round % 2 == 0;
        let unmerged = all.until_merged(Some(before));
        assert!(unmerged >= 3, "{unmerged}");
        most = most.max(unmerged);
        for _ in 0..50 {
            all.flood();
            assert!(all.stream());
        }
    }
    assert!(most < 100, "{most}");
    all.served.check_sums();
    all.served.check_alive();
}

#[test]
fn a_port_that_is_set_is_looked_at_again() {
    let mut all = Flood::begin();
    for text in ["gro=20", "gro=44", "default", "gro=20"] {
        all.flood_for_long();
        assert!(!all.stream());
        all.served.board.set(Some(1), text).unwrap();
        all.served.count("entered");
        let frames = segments_from(7000, all.at, 32, 1000);
        all.at += 32;
        let count = pass(&mut all.stream, &mut all.takes, &frames);
        assert!(count <= 2, "{text}: {count}");
    }
    all.served.check_sums();
}
