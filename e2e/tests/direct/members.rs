//! Members of a trust group, and frames between them.

use std::time::Duration;

use vnplug::{Next, Port};
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_testing::eventually;

/// A member on `lan0`.
pub(crate) fn open(daemon: &Daemon) -> Port {
    daemon.port("lan0").direct().open().unwrap()
}

pub(crate) fn frame(to: u8, from: u8, number: u32) -> Vec<u8> {
    let mut frame = vec![0x5a; 60];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5]);
    frame[14..18].copy_from_slice(&number.to_be_bytes());
    frame
}

/// Frames that entered the switch.
pub(crate) fn entered(daemon: &Daemon) -> u64 {
    value(counted(&daemon.counters(), "source"), "entered")
}

/// The numbers of the frames that came, in order.
pub(crate) fn take(port: &mut Port) -> Vec<u32> {
    let mut numbers = Vec::new();
    while let Next::Packet(packet) = port.next().unwrap() {
        numbers.push(u32::from_be_bytes(packet.bytes[14..18].try_into().unwrap()));
    }
    numbers
}

/// Sends until frames of `from` to `to` do not enter the switch any more.
pub(crate) fn become_direct(daemon: &Daemon, from: (u8, &mut Port), to: (u8, &mut Port)) {
    let ((from, sender), (to, reader)) = (from, to);
    // Both are heard.
    assert!(reader.send(&frame(0xff, to, 0)).unwrap());
    eventually("frames go directly", || {
        let before = entered(daemon);
        assert!(sender.send(&frame(to, from, 0)).unwrap());
        std::thread::sleep(Duration::from_millis(10));
        let _ = (take(sender), take(reader));
        entered(daemon) == before
    });
}
