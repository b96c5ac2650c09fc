//! Of a long frame that goes nowhere no byte behind its first 128 is read in order to decide what becomes of it.
//!
//! The sender's file ends behind those bytes, so that the rest of the frame is on pages that are not there. Who reads there is
//! found out: the memory is lost, and its port is closed.

use super::*;

/// Bytes that are read.
const BEGIN: usize = 128;
/// Where the file ends, far from rings and buffers.
const END: u64 = 0x30_0000;

/// A guest, alone or beside another, on a switch that nobody reads.
struct Site {
    served: Served,
    guest: Guest,
    other: Option<Guest>,
}

impl Site {
    fn new(settings: &str, has_other: bool) -> Self {
        let served = Served::set(settings);
        served.reads.store(false, Ordering::Relaxed);
        // A turn that began before has ended.
        served.count("entered");
        let guest = served.guest(PLAIN);
        let other = has_other.then(|| {
            let mut other = served.guest(PLAIN);
            other.send(&frame(0xee, 2, 0));
            eventually("it is known", || served.count("entered") == 1);
            other
        });
        ftruncate(&guest.memory, END).unwrap();
        Self {
            served,
            guest,
            other,
        }
    }

    /// Sends a frame of which the first `there` bytes are there.
    fn sends(&mut self, frame: &[u8], offload: &Offload, there: usize) {
        let guest = &mut self.guest;
        let at = guest.sending.next % SIZE;
        let buffer = END - (12 + there) as u64;
        guest.region.write(buffer, &offload.to_header(frame));
        guest.region.write(buffer + 12, &frame[..there]);
        let len = 12 + frame.len() as u32;
        guest.sending.desc(&guest.region, at, (buffer, len, 0, 0));
        guest.sending.offer(&guest.region, at);
        guest.sending.kick();
    }

    /// It was seen that somebody read what is not there.
    fn is_seen(&mut self) -> bool {
        let ports = 1 + u64::from(self.other.is_some());
        let other = &mut self.other;
        eventually("its port is closed", || {
            // Whatever comes to it shows that its memory is lost.
            self.guest.sending.kick();
            if let Some(other) = other {
                other.drain();
            }
            self.served.count("switch_ports") == ports - 1
        });
        self.guest.front.is_closed()
    }
}

fn long(to: u8, from: u8) -> Vec<u8> {
    let mut long = frame(to, from, 7);
    long.resize(1514, 0x5a);
    long
}

fn tagged(to: u8, from: u8) -> Vec<u8> {
    let mut tagged = long(to, from);
    tagged.splice(12..12, [0x81, 0, 0, 7]);
    tagged.truncate(1514);
    tagged
}

fn of_a_group() -> Vec<u8> {
    let mut frame = long(2, 1);
    frame[6] = 3;
    frame
}

#[test]
fn what_becomes_of_a_frame_that_goes_nowhere_is_decided_by_its_first_bytes() {
    let (whole, left) = super_frame(2, 1, 30_000);
    let none = Offload::default();
    let cases = [
        ("", false, long(2, 1), none, "consumed"),
        ("", false, whole, left, "consumed"),
        ("", true, of_a_group(), none, "in_dropped_source"),
        (
            "default.lock=02:00:00:00:00:09",
            true,
            long(2, 1),
            none,
            "in_dropped_lock",
        ),
        (
            "default.vlan=5",
            true,
            tagged(2, 1),
            none,
            "in_dropped_vlan",
        ),
        (
            "default.isolated=yes",
            true,
            long(2, 1),
            none,
            "in_dropped_isolated",
        ),
    ];
    for (settings, has_other, frame, offload, fate) in cases {
        let mut site = Site::new(settings, has_other);
        let before = site.served.count(fate);
        for number in 1..=4 {
            site.sends(&frame, &offload, BEGIN);
            eventually(fate, || site.served.count(fate) == before + number);
            eventually("it is back", || site.guest.has_sent());
        }
        // What it sends from memory that is there still comes.
        site.guest.send(&super::frame(0xee, 1, 1));
        eventually("it is back", || site.guest.has_sent());
        let ports = 1 + u64::from(site.other.is_some());
        assert_eq!(site.served.count("switch_ports"), ports, "{fate}");
    }
}

#[test]
fn a_read_behind_them_is_seen() {
    let none = Offload::default();
    // One that is not there of the bytes that are read.
    let mut site = Site::new("", false);
    site.sends(&long(2, 1), &none, BEGIN - 1);
    assert!(site.is_seen());
    // A frame that goes somewhere is read whole.
    let mut site = Site::new("", true);
    site.sends(&long(2, 1), &none, BEGIN);
    assert!(site.is_seen());
    // A shorter one is copied whole as it comes.
    let mut site = Site::new("", false);
    site.sends(&long(2, 1)[..1000], &none, BEGIN);
    assert!(site.is_seen());
    // So is one for which somebody may read the switch.
    let mut site = Site::new("", false);
    site.served.reads.store(true, Ordering::Relaxed);
    // One after the other, as only some turns are such.
    for _ in 0..1000 {
        site.sends(&long(2, 1), &none, BEGIN);
        let is_gone = || site.served.count("switch_ports") == 0;
        eventually("it is back", || is_gone() || site.guest.has_sent());
        if is_gone() {
            break;
        }
    }
    assert!(site.is_seen());
}
