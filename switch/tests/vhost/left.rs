//! Long frames, whose rest is copied from guest to guest when nobody reads the switch (`tail.rs`): all of
//! their bytes come, once; and a sender that changes them after it sent them changes no more than that.

use std::sync::atomic::fence;

use super::*;

/// A long frame, every byte of which says which it is.
fn long(to: u8, from: u8, number: u32, len: usize) -> Vec<u8> {
    let mut frame = frame(to, from, number);
    let rest = (frame.len()..len).map(|at| (at as u32).wrapping_mul(31).wrapping_add(number) as u8);
    frame.extend(rest);
    frame
}

/// Frames are due to these stations' guests.
fn introduce(guests: &mut [&mut Guest], numbers: &[u8]) {
    for (guest, number) in guests.iter_mut().zip(numbers) {
        guest.send(&frame(0xee, *number, 0));
        eventually("it is known", || guest.has_sent());
    }
    for guest in guests {
        guest.drain();
    }
}

#[test]
fn frames_of_all_lengths_are_whole_for_one_guest_and_for_many() {
    let served = Served::here();
    let mut sender = served.guest(PLAIN);
    let mut guests = [(); 3].map(|()| served.guest(PLAIN));
    let mut number = 0;
    // Also in several buffers of the receiver.
    for len in (1000..1060)
        .chain(2020..2060)
        .chain([1514, 5000, 9018, 9238])
    {
        for round in 0..8 {
            number += 1;
            let sent = long(0xee, 1, number, len);
            match round % 2 {
                0 => sender.send(&sent),
                // In many parts, header and begin, too.
                _ => sender.send_in_parts(&sent, 1 + number % 700),
            }
            for guest in &mut guests {
                assert_eq!(guest.next().1, sent);
            }
            eventually("it is back", || sender.has_sent());
        }
    }
    assert_eq!(served.count("out_enqueued"), 3 * u64::from(number));
    served.check_alive();
}

#[test]
fn a_policed_port_pays_for_the_whole_length_of_a_frame() {
    // What it may send at once is 128 KiB, and in a second next to nothing.
    let served = Served::set("default.police=1000");
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    introduce(&mut [&mut other], &[2]);
    let mut came = 0;
    for number in 0..200 {
        sender.send(&long(2, 1, number, 1500));
        eventually("it is back", || sender.has_sent());
        came += other.drain();
    }
    let refused = served.count("in_dropped_police");
    came += other.drain();
    assert_eq!(came as u64 + refused, 200);
    let paid = (128 << 10) / 1500;
    assert!((paid - 2..paid + 3).contains(&came), "{came} of {paid}");
}

#[test]
fn who_waits_for_buffers_has_the_bytes_of_when_the_sender_had_its_own_back() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    introduce(&mut [&mut other], &[2]);
    let count = 2 * u32::from(SIZE);
    for number in 0..count {
        sender.send(&long(2, 1, number, 1500));
        eventually("it is back", || sender.has_sent());
        let at = u64::from((sender.sending.next - 1) % SIZE);
        sender.region.write(0x20_0000 + 0x8000 * at, &[0xff; 1512]);
    }
    for number in 0..count {
        assert_eq!(other.next().1, long(2, 1, number, 1500));
    }
    served.check_sums();
}

/// Sends long frames to station 2 until the time is over or `most` are sent, while another thread writes
/// into the buffers that were made available. Calls `look` between them. How many were sent.
fn rewritten(
    sender: &mut Guest,
    most: u64,
    rewrite: impl Fn(&Region, u64) + Sync,
    mut look: impl FnMut(),
) -> u64 {
    let mut sent = 0;
    let stop = AtomicBool::new(false);
    let region = sender.region.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for at in 0..16 * u64::from(SIZE) {
                    rewrite(&region, at % u64::from(SIZE));
                }
                // Other tests need the processors, too.
                std::thread::sleep(Duration::from_micros(1));
            }
        });
        let end = Instant::now() + Duration::from_secs(3);
        while sent < most && Instant::now() < end {
            for _ in 0..SIZE / 2 {
                sender.send(&long(2, 1, 0, 1500));
            }
            sent += u64::from(SIZE) / 2;
            eventually("all are taken", || {
                look();
                sender.has_sent()
            });
        }
        stop.store(true, Ordering::Relaxed);
    });
    sent
}

/// The number that was written last at this place, twice; none if what the sender has there is there, or a half of it.
fn written(bytes: &[u8], at: usize) -> Option<u8> {
    (bytes[at] == bytes[at + 1]).then_some(bytes[at])
}

#[test]
fn where_a_frame_goes_and_how_long_it_is_are_not_changed_after_it_was_sent() {
    let served = Served::here();
    let mut sender = served.guest(PLAIN);
    let [mut two, mut three, mut four] = [(); 3].map(|()| served.guest(PLAIN));
    introduce(&mut [&mut two, &mut three, &mut four], &[2, 3, 4]);
    let (mut came, mut changed) = ([0_u64; 2], 0_u64);
    // To whom it is, and the length that its descriptor says, to and fro; the rest to anything. Now it ends with this,
    // now with that, since most frames are taken while nobody writes.
    let all = [(3_u8, 1512_u32), (2, 60), (3, 0x8000), (2, 1512)];
    let turn = AtomicU64::new(0);
    let rewrite = |region: &Region, at: u64| {
        let frame = 0x20_000c + 0x8000 * at;
        let turn = turn.fetch_add(1, Ordering::Relaxed);
        let first = turn / (16 * u64::from(SIZE)) % 4;
        let parts = all.into_iter().cycle().skip(first as usize).take(4);
        for ((to, len), part) in parts.zip(0..) {
            // Of this buffer the next number: in what is copied first, and then in the rest.
            let number = (turn / u64::from(SIZE) * 4 + part) as u8;
            region.write(frame + 5, &[to]);
            region.write(frame + EARLY as u64, &[number; 2]);
            fence(Ordering::Release);
            region.write(frame + LATE as u64, &[number; 256]);
            let descriptor = 0x2_0000 + 16 * at;
            region.store_u32(descriptor + 8, len, Ordering::Relaxed);
        }
    };
    let mut look = || {
        for (guest, (to, came)) in [&mut two, &mut three].into_iter().zip((2..).zip(&mut came)) {
            while let Some((_, bytes)) = guest.received() {
                assert_eq!((bytes[5], bytes[11]), (to, 1), "decided by what is copied");
                assert!([48, 1500].contains(&bytes.len()), "{}", bytes.len());
                *came += 1;
                if bytes.len() == 1500
                    && let Some(early) = written(&bytes, EARLY)
                    && let Some(late) = written(&bytes, LATE)
                {
                    changed += u64::from((1..128).contains(&late.wrapping_sub(early)));
                }
            }
        }
        assert_eq!(four.drain(), 0, "no frame says that it is its");
        changed
    };
    let mut sent = 0;
    // The control: of some frames the rest is younger than what was decided by.
    eventually("frames change after their headers were taken", || {
        let most = 1_000_000;
        sent += rewritten(&mut sender, most, rewrite, || {
            look();
        });
        look() > 0
    });
    // Each of them came, or is counted.
    assert!(sent >= 1000, "{sent}");
    assert_eq!(served.count("entered"), 3 + sent);
    look();
    let dropped = served.count("out_dropped_full") + served.count("out_dropped_gone");
    assert!(came[0] > 0 && came[1] > 0, "{came:?}");
    assert_eq!(came[0] + came[1] + dropped, served.count("unicast"));
    // Those that were said to be longer than a frame without a segment size may be.
    assert!(served.count("in_dropped_long") > 0);
    served.check_alive();
}

/// Where numbers are written, in bytes of a frame: in what is copied before it is decided, and behind it.
const EARLY: usize = 64;
const LATE: usize = 1000;

#[test]
fn who_goes_while_its_frames_are_sent_leaves_nothing_and_harms_nobody() {
    let served = Served::here();
    let mut other = served.guest(PLAIN);
    introduce(&mut [&mut other], &[2]);
    let mut names = Vec::new();
    for round in 0..60_u32 {
        let mut sender = served.guest(PLAIN);
        names.push(sender.name.clone());
        let from = [5, 6, CUT][round as usize % 3];
        for number in 0..u32::from(SIZE) - 1 {
            sender.send(&long(2, from, number, 1500));
        }
        match round % 3 {
            // Its memory is another one, is gone, or has no bytes.
            0 => {
                let spare = memfd_create("spare", MemfdFlags::CLOEXEC).unwrap();
                ftruncate(&spare, LEN).unwrap();
                sender.front.table(&spare, LEN);
            }
            1 => {}
            _ => ftruncate(&sender.memory, 0x20_0000).unwrap(),
        }
        while let Some((_, bytes)) = other.received() {
            assert_eq!(bytes.len(), 1500);
            let number = u32::from_be_bytes(bytes[14..18].try_into().unwrap());
            // Zeroes where there was nothing any more.
            let is_cut = [0, CUT].contains(&bytes[11]);
            assert!(is_cut || bytes == long(2, bytes[11], number, 1500));
        }
        drop(sender);
    }
    other.drain();
    eventually("all memory is unmapped", || {
        names.iter().all(|name| uses(name) == (0, 0)) && uses("memfd:spare") == (0, 0)
    });
    served.check_alive();
}

/// The station of a guest whose memory is truncated.
const CUT: u8 = 7;
