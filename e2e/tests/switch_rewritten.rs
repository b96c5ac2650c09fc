//! A program on a switch writes into the frames of its ring while the switch reads them: each goes where the bytes that are
//! given say, and to nobody else. Guests by vhost-user do it in `switch/tests/vhost/left.rs`. With `VNPLUG_LONG=1` a million
//! frames, not 50,000.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use vnplug::{Next, Port};
use vnplug_e2e::Lab;
use vnplug_e2e::beside::Ends;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::raw::{Raw, open};
use vnplug_ring::control::{Message, Open};
use vnplug_ring::layout::{DATA_OFFSET, Life, Meta, RECORD_HEADER};
use vnplug_ring::{Producer, Region};
use vnplug_testing::{Deadline, eventually};

/// Bytes of a frame: with the header of its record there are 128, which divide the ring.
const LEN: usize = 96;
const RING: u64 = 1 << 16;

fn frame(to: u8, from: u8) -> [u8; LEN] {
    let mut frame = [0; LEN];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5]);
    frame
}

/// Counts what has come from station 1, and looks whether it is this station's.
fn take(port: &mut Port, own: u8) -> u64 {
    let mut came = 0;
    while let Next::Packet(packet) = port.next().unwrap() {
        if packet.bytes[11] == 1 {
            assert_eq!(packet.bytes[5], own, "it was for another");
            came += 1;
        }
    }
    came
}

/// Writes to whom each frame of the ring is, station 2 and station 3 in turns.
fn rewrite(ring: &Region, over: &AtomicBool) {
    for turn in 0_u64.. {
        if over.load(Ordering::Relaxed) {
            return;
        }
        for at in 0..RING / (RECORD_HEADER + LEN as u64) {
            let frame = DATA_OFFSET + at * (RECORD_HEADER + LEN as u64) + RECORD_HEADER;
            ring.write(frame + 5, &[2 + ((at + turn) % 2) as u8]);
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_frame_goes_where_its_bytes_say_although_its_sender_writes_others_meanwhile() {
    let count = match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 1_000_000,
        None => 50_000,
    };
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let mut stations = [2, 3, 4].map(|own| {
        let port = daemon.port("lan0").ring_bytes(1 << 24).join();
        let mut port = port.open().unwrap();
        assert!(port.send(&frame(0xff, own)).unwrap());
        (own, port, 0)
    });
    let known = || value(counted(&daemon.counters(), "source"), "stations");
    eventually("all are known", || known() == 3);
    let mut raw = Raw::greeted(&daemon.socket());
    let request = Message::Open(Open {
        transmit_bytes: RING,
        joins: true,
        ..open("lan0", 1 << 16)
    });
    let Message::Opened(opened) = raw.ask(&request, 0) else {
        panic!("refused");
    };
    let fds = raw.take_fds();
    let memory = vnplug::map_apart(fds[0].as_fd(), fds[1].as_fd(), &opened).unwrap();
    let place = opened.transmit;
    assert_eq!(place.len, DATA_OFFSET + RING);
    let region = memory.part(place.offset, place.len).unwrap();
    let mut ring = Producer::attach(region.clone()).unwrap();
    let mut kicks = UnixStream::from(fds[3].try_clone().unwrap());
    let over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let _over = Ends([&over; 2]);
        threads.spawn(|| rewrite(&region, &over));
        let deadline = Deadline::new("all are sent");
        let mut sent = 0;
        while sent < count && !deadline.is_over() {
            if ring.push(&Meta::default(), &frame(2, 1)) == Ok(true) {
                sent += 1;
                ring.publish();
                continue;
            }
            // Its host may sleep, or be kicked already.
            let _ = kicks.write(&[1]);
            for (own, port, came) in &mut stations {
                *came += take(port, *own);
            }
        }
        let _ = kicks.write(&[1]);
        over.store(true, Ordering::Relaxed);
        assert_eq!(sent, count);
    });
    assert_eq!(ring.life(), Life::Open);
    let lan0 = |name| value(counted(&daemon.counters(), "source"), name);
    eventually("all are taken", || lan0("entered") == 3 + count);
    eventually("each is somebody's", || {
        let all = stations.iter_mut().map(|(own, port, came)| {
            *came += take(port, *own);
            *came + port.dropped()
        });
        all.sum::<u64>() == count
    });
    let came = stations.map(|(.., came)| came);
    println!("{came:?} of {count}");
    // The control: the sender meant all for the first, and some were changed before they were read.
    assert!(came[0] > 0 && came[1] > 0 && came[2] == 0, "{came:?}");
    assert_eq!(lan0("unicast"), count);
    daemon.audit();
}
