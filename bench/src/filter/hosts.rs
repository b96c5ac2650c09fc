//! A wire of many hosts, and how long judging its packets takes.

use std::time::Duration;

use vnplug_frame::MAX_BATCH;

use super::processor_time;

/// Runs `some`, which says how many packets it took, for a while.
pub(super) fn per_packet(time: Duration, mut some: impl FnMut() -> usize) -> f64 {
    some();
    let (begin, mut packets) = (processor_time(), 0);
    loop {
        packets += some();
        let took = processor_time() - begin;
        if took >= time.as_nanos() as f64 {
            return took / packets as f64;
        }
    }
}

/// UDP packets of 60 bytes from hosts taken at random.
pub(super) fn packets() -> Vec<Vec<u8>> {
    let mut state = 0x5eed_u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 20) as usize % below
    };
    let mut packet = || {
        let host = random(HOSTS);
        let port = ((FIRST_PORT + host) as u16).to_be_bytes();
        let mut bytes = vec![2; 12];
        bytes.extend([8, 0, 0x45, 0, 0, 46, 0, 1, 0x40, 0, 64, 17, 0, 0]);
        bytes.extend([10, (host >> 8) as u8, host as u8, 1, 198, 18, 0, 1]);
        bytes.extend([port[0], port[1], 0, 9, 0, 26, 0, 0]);
        bytes.resize(60, 0);
        bytes
    };
    (0..FRAMES).map(|_| packet()).collect()
}

/// Hosts on the wire.
pub(super) const HOSTS: usize = 10_000;
/// The port number of the first; each has one of its own.
pub(super) const FIRST_PORT: usize = 10_000;
/// Different frames.
const FRAMES: usize = 16 * MAX_BATCH;
/// Bytes of a port's ring.
pub(super) const RING: u64 = 1 << 14;
/// Of filters that cannot all be looked up, one in this number.
pub(super) const NOT_EACH: usize = 20;
