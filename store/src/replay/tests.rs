use std::cell::Cell;
use std::io;
use std::path::Path;

use super::*;
use crate::archive::tests::Lab;

/// A clock that jumps to where it is waited for, and oversleeps by `late`.
struct Fake {
    now: u64,
    late: u64,
    waits: u64,
}

impl Clock for Fake {
    fn now_ns(&mut self) -> u64 {
        self.now
    }

    fn wait(&mut self, until_ns: u64) {
        assert!(until_ns > self.now, "waits for what is past");
        self.waits += 1;
        // At most 50 ms at once, as the real one.
        let step = (until_ns - self.now).min(50_000_000);
        self.now += step;
        if self.now == until_ns {
            self.now += self.late;
        }
    }
}

fn clock(late: u64) -> Fake {
    Fake {
        now: 7_000_000,
        late,
        waits: 0,
    }
}

/// Keeps what is sent; takes `room` frames at once, after `full` refusals.
struct Memory {
    calls: Vec<Vec<Vec<u8>>>,
    room: usize,
    full: u64,
    broken: Option<io::ErrorKind>,
}

impl Exit for Memory {
    fn fits(&self, frame: &[u8]) -> bool {
        frame.len() <= 1514
    }

    fn send(&mut self, frames: &[&[u8]]) -> Result<usize, Obstacle> {
        if self.full > 0 {
            self.full -= 1;
            return Ok(0);
        }
        if frames[0][0] == 0xee {
            return Err(Obstacle::Frame(io::Error::other("no")));
        }
        if let Some(kind) = self.broken {
            let error = WireError::System("wire0".into(), kind.into());
            return Err(Obstacle::Gone(ExitError::Wire(error)));
        }
        let good = frames.iter().take_while(|frame| frame[0] != 0xee).count();
        let taken = good.min(self.room);
        self.calls
            .push(frames[..taken].iter().map(|frame| frame.to_vec()).collect());
        Ok(taken)
    }
}

fn memory() -> Memory {
    Memory {
        calls: Vec::new(),
        room: usize::MAX,
        full: 0,
        broken: None,
    }
}

/// A capture file that goes away.
struct Temporary(PathBuf);

impl Temporary {
    /// Classic pcap with nanoseconds: (time, recorded bytes, length on the wire).
    fn pcap(link_type: u32, frames: &[(u64, Vec<u8>, u32)]) -> Self {
        thread_local!(static NEXT: Cell<u32> = const { Cell::new(0) });
        let number = NEXT.replace(NEXT.get() + 1);
        let thread = format!("{:?}", std::thread::current().id());
        let name = format!(
            "vnplug-replay-{}-{thread}-{number}.pcap",
            std::process::id()
        );
        let mut bytes = 0xa1b2_3c4d_u32.to_le_bytes().to_vec();
        bytes.extend([2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0]);
        bytes.extend(link_type.to_le_bytes());
        for (ns, frame, wire_len) in frames {
            for word in [
                (ns / 1_000_000_000) as u32,
                (ns % 1_000_000_000) as u32,
                frame.len() as u32,
                *wire_len,
            ] {
                bytes.extend(word.to_le_bytes());
            }
            bytes.extend(frame);
        }
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }

    fn cut(&self, bytes: usize) {
        let whole = std::fs::read(&self.0).unwrap();
        std::fs::write(&self.0, &whole[..whole.len() - bytes]).unwrap();
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

fn frame(number: u8, len: usize) -> Vec<u8> {
    vec![number; len]
}

fn order(path: &Path, pace: Pace) -> Order {
    Order {
        files: files(&[path.to_owned()]).unwrap(),
        pace,
        rounds: Some(1),
        limit: None,
        snapped: Snapped::Refuse,
        keys: Keys::default(),
    }
}

fn spaced(count: u8, gap_ns: u64) -> Temporary {
    let frames: Vec<_> = (0..count)
        .map(|n| (u64::from(n) * gap_ns, frame(n, 60), 60))
        .collect();
    Temporary::pcap(1, &frames)
}

fn go(order: &Order, clock: &mut Fake, exit: &mut Memory) -> Report {
    let (report, result) = play(order, clock, exit, &|| false);
    result.unwrap();
    report
}

#[test]
fn every_frame_is_sent_once_in_order_when_it_is_due() {
    let file = spaced(100, 120_000_000);
    let (mut clock, mut exit) = (clock(40), memory());
    let report = go(&order(&file.0, Pace::RECORDED), &mut clock, &mut exit);
    assert_eq!(
        (report.frames, report.bytes, report.refused.total()),
        (100, 6000, 0)
    );
    let sent: Vec<Vec<u8>> = exit.calls.concat();
    assert_eq!(sent, (0..100).map(|n| frame(n, 60)).collect::<Vec<_>>());
    // Each by itself, three waits for each gap; 40 ns late, which the next does not inherit.
    assert_eq!((exit.calls.len(), clock.waits), (100, 99 * 3));
    assert_eq!(report.elapsed_ns, 99 * 120_000_000 + 40);
    assert_eq!(report.late.max_ns(), 40);
    assert_eq!(
        (report.gap_error.count(), report.gap_error.max_ns()),
        (99, 40)
    );
    assert_eq!(report.gap_error.permille_ns(500), 0);
}

#[test]
fn what_is_due_already_goes_together() {
    let file = spaced(200, 1000);
    let (mut clock, mut exit) = (clock(49_500), memory());
    let report = go(&order(&file.0, Pace::RECORDED), &mut clock, &mut exit);
    // Frame 0; then 1 is due, and 49.5 µs later 2 to 50 are, too.
    let calls: Vec<usize> = exit.calls.iter().map(Vec::len).collect();
    assert_eq!(calls[..2], [1, 50]);
    assert_eq!(report.frames, 200);
    let (mut clock, mut exit) = (self::clock(0), memory());
    go(&order(&file.0, Pace::Top), &mut clock, &mut exit);
    let calls: Vec<usize> = exit.calls.iter().map(Vec::len).collect();
    assert_eq!((calls, clock.waits), (vec![64, 64, 64, 8], 0));
}

#[test]
fn rates_hold_over_rounds_and_a_limit_ends_them() {
    let file = spaced(10, 1);
    let mut order = order(&file.0, Pace::Frames(1000));
    order.rounds = None;
    order.limit = Some(2001);
    let (mut clock, mut exit) = (clock(0), memory());
    let report = go(&order, &mut clock, &mut exit);
    assert_eq!((report.frames, report.elapsed_ns), (2001, 2_000_000_000));
    order.rounds = Some(3);
    order.pace = Pace::RECORDED;
    let (mut clock, mut exit) = (self::clock(0), memory());
    let report = go(&order, &mut clock, &mut exit);
    // Each round follows at once.
    assert_eq!(
        (report.frames, report.elapsed_ns, report.backwards),
        (30, 27, 0)
    );
}

#[test]
fn what_cannot_be_sent_is_refused_and_counted_by_reason() {
    let file = Temporary::pcap(
        1,
        &[
            (0, frame(1, 60), 60),
            (1, frame(2, 1515), 1515),
            (2, frame(3, 96), 1000),
            (3, frame(4, 13), 13),
            (4, frame(0xee, 60), 60),
            (5, frame(6, 14), 14),
        ],
    );
    let raw = Temporary::pcap(101, &[(0, frame(0x45, 60), 60)]);
    let mut order = order(&file.0, Pace::Top);
    order.files = files(&[file.0.clone(), raw.0.clone()]).unwrap();
    let mut exit = memory();
    let report = go(&order, &mut clock(0), &mut exit);
    let wanted = Refused {
        too_long: 1,
        snapped: 1,
        foreign: BTreeMap::from([(101, 1)]),
        short: 1,
        by_kernel: 1,
    };
    assert_eq!((report.frames, report.refused), (2, wanted));
    for (snapped, len) in [(Snapped::Cut, 96), (Snapped::Pad, 1000)] {
        order.snapped = snapped;
        let mut exit = memory();
        let report = go(&order, &mut clock(0), &mut exit);
        let sent = exit.calls.concat();
        assert_eq!((report.frames, sent[1].len(), sent[1][0]), (3, len, 3));
        assert!(sent[1][96..].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn without_room_frames_wait_and_none_is_skipped() {
    let file = spaced(100, 0);
    let mut exit = Memory {
        room: 3,
        full: 20,
        ..memory()
    };
    let report = go(&order(&file.0, Pace::Top), &mut clock(0), &mut exit);
    assert_eq!((report.frames, report.waits), (100, 20));
    assert_eq!(exit.calls.concat().len(), 100);
}

#[test]
fn a_broken_exit_and_a_damaged_file_end_it_and_the_report_stays() {
    let file = spaced(5, 0);
    let mut exit = Memory {
        broken: Some(io::ErrorKind::NetworkDown),
        ..memory()
    };
    let order = order(&file.0, Pace::Top);
    let (report, result) = play(&order, &mut clock(0), &mut exit, &|| false);
    assert_eq!(report.frames, 0);
    assert!(result.unwrap_err().to_string().contains("wire0"));

    file.cut(1);
    let mut exit = memory();
    let report = go(&order, &mut clock(0), &mut exit);
    assert_eq!((report.frames, report.torn.len()), (4, 1));

    let mut bytes = std::fs::read(&file.0).unwrap();
    bytes.extend([0xdd; 100]);
    std::fs::write(&file.0, bytes).unwrap();
    // The torn frame is filled up by the first bytes of what follows, and then comes damage.
    let mut exit = memory();
    let report = go(&order, &mut clock(0), &mut exit);
    assert_eq!((report.frames, report.failed.len()), (5, 1));
    assert!(report.failed[0].is_damage());
}

#[test]
fn files_behind_a_damaged_one_are_played_and_it_is_told_once() {
    let (damaged, good) = (spaced(5, 0), spaced(7, 0));
    let mut bytes = std::fs::read(&damaged.0).unwrap();
    bytes.extend([0xdd; 100]);
    std::fs::write(&damaged.0, bytes).unwrap();
    let mut order = order(&damaged.0, Pace::Top);
    order.files = files(&[damaged.0.clone(), good.0.clone()]).unwrap();
    order.rounds = Some(2);
    let report = go(&order, &mut clock(0), &mut memory());
    assert_eq!((report.frames, report.failed.len()), (24, 1));
    assert_eq!(report.failed[0].path, damaged.0);
}

#[test]
fn it_stops_when_told_also_in_a_long_gap() {
    let file = spaced(2, 3_600_000_000_000);
    let asked = Cell::new(0);
    let stop = || asked.replace(asked.get() + 1) > 5;
    let (mut clock, mut exit) = (clock(0), memory());
    let (report, result) = play(
        &order(&file.0, Pace::RECORDED),
        &mut clock,
        &mut exit,
        &stop,
    );
    result.unwrap();
    assert_eq!((report.frames, clock.now < 1_000_000_000), (1, true));
}

#[test]
fn it_stops_when_told_also_if_every_frame_is_refused() {
    let raw = Temporary::pcap(101, &[(0, frame(0x45, 60), 60)]);
    let mut order = order(&raw.0, Pace::Top);
    order.rounds = Some(1_000_000_000);
    let (report, result) = play(&order, &mut clock(0), &mut memory(), &|| true);
    result.unwrap();
    assert_eq!(report.refused.total(), 0);
}

#[test]
fn a_round_without_a_frame_that_is_sent_is_the_last() {
    for (link_type, bytes) in [
        (101, frame(0x45, 60)),
        (1, frame(1, 1515)),
        (1, frame(0xee, 60)),
    ] {
        let len = bytes.len() as u32;
        let file = Temporary::pcap(link_type, &[(0, bytes, len)]);
        let mut order = order(&file.0, Pace::Top);
        order.rounds = None;
        let report = go(&order, &mut clock(0), &mut memory());
        assert_eq!((report.frames, report.refused.total()), (0, 1));
    }
}

#[test]
fn an_encrypted_recording_is_played_by_who_has_its_key() {
    let lab = Lab::new("played");
    lab.record(0..2, 50);
    lab.pack(lab.how(Some(1), true));
    let mut order = order(&lab.place.0, Pace::Top);
    let report = go(&order, &mut clock(0), &mut memory());
    assert_eq!((report.frames, report.failed.len()), (0, 2));
    let why = report.failed[0].to_string();
    assert!(why.contains("--identity"), "{why}");
    order.keys = lab.keys.clone();
    let report = go(&order, &mut clock(0), &mut memory());
    assert_eq!((report.frames, report.failed.len()), (100, 0));
}
