//! What is not ours goes to the host; what is ours does not.

use std::path::PathBuf;
use std::sync::Arc;

use vnplug_filter::{Compiler, Program};
use vnplug_path::source::Queue;
use vnplug_path::source::af_xdp::{AfXdpConfig, Mode};

use crate::net::{self, Sender, ip, isolated, read_all, udp, until_seen};
use crate::{config, one, veth};

pub(crate) fn filter(expression: &str) -> Arc<Program> {
    let daemon = PathBuf::from(env!("CARGO_BIN_EXE_vnplugd"));
    let program = Compiler::new(daemon).compile(expression, 262_144, 1);
    Arc::new(program.expect("a filter"))
}

/// An ICMP echo request from 10.9.0.2 to 10.9.0.1, whose interface has the address 02:..:0a.
fn echo(seq: u16) -> Vec<u8> {
    let mut frame = vec![0_u8; 60];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 10, 2, 0, 0, 0, 0, 11, 8, 0]);
    frame[14..24].copy_from_slice(&[0x45, 0, 0, 46, 0, 0, 0, 0, 64, 1]);
    frame[26..34].copy_from_slice(&[10, 9, 0, 2, 10, 9, 0, 1]);
    let sum = checksum(&frame[14..34]);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    frame[34] = 8;
    frame[40..42].copy_from_slice(&seq.to_be_bytes());
    let sum = checksum(&frame[34..60]);
    frame[36..38].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let sum: u32 = words.sum();
    !((sum & 0xffff) + (sum >> 16)) as u16
}

/// Sends echo requests among datagrams; gives what the source took and how many replies came.
fn exchange(mode: Mode, take: Option<&str>) -> (Vec<Vec<u8>>, usize) {
    veth(1);
    ip("link set va address 02:00:00:00:00:0a");
    ip("addr add 10.9.0.1/24 dev va");
    ip("neigh add 10.9.0.2 lladdr 02:00:00:00:00:0b dev va");
    let mut queue: Box<dyn Queue> = one(AfXdpConfig {
        mode,
        take: take.map(filter),
        ..config("va")
    });
    let mut replies = net::open(net::rx("vb"));
    let sender = Sender::new("vb");
    let each = if take.is_some() { 1 } else { 2 };
    for seq in 0..COUNT {
        assert!(sender.send(&echo(seq)));
        assert!(sender.send(&udp(1000 + seq, 53)));
        // No faster than the driver hands them on.
        until_seen(
            std::slice::from_mut(&mut queue),
            (u64::from(seq) + 1) * each,
        );
    }
    let expected = COUNT * each as u16;
    let got = read_all(queue.as_mut(), expected.into());
    let got: Vec<Vec<u8>> = got.into_iter().map(|got| got.bytes).collect();
    let replies = read_all(
        replies.as_mut(),
        if take.is_some() { COUNT.into() } else { 0 },
    );
    let replies = replies
        .iter()
        .filter(|got| got.bytes[12..14] == [8, 0] && got.bytes[34] == 0);
    let counters = queue.counters();
    assert_eq!((counters.seen, counters.dropped), (got.len() as u64, 0));
    (got, replies.count())
}

#[test]
fn the_host_goes_on_with_what_the_filter_does_not_take() {
    for mode in [Mode::Native, Mode::Generic] {
        isolated(move || {
            let (got, replies) = exchange(mode, Some("udp port 53"));
            assert_eq!(
                replies,
                usize::from(COUNT),
                "the host answers every request"
            );
            let sent: Vec<_> = (0..COUNT).map(|seq| udp(1000 + seq, 53)).collect();
            assert!(got == sent, "{} frames", got.len());
        });
    }
}

#[test]
fn without_a_filter_the_host_gets_nothing() {
    isolated(|| {
        let (got, replies) = exchange(Mode::Native, None);
        assert_eq!((got.len(), replies), (2 * usize::from(COUNT), 0));
    });
}

const COUNT: u16 = 200;
