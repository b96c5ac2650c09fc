//! The first packets of QUIC, as a sandboxed program says them, and the messages that they carry.

use vnplug_sandbox::wire::hello::{Client, Hello, whole};
use vnplug_sandbox::wire::initial::{self, Keys};

use crate::Dice;

/// Checks it with these bytes, once as a datagram, once as what a packet carries, and once as a client's messages.
pub fn check(bytes: &[u8]) {
    let mut dice = Dice(bytes);
    let how = dice.byte();
    match how % 3 {
        0 => {
            for packet in initial::initials(dice.0).unwrap_or_default() {
                assert!(packet.to.len() <= 20);
                let opened = Keys::of(packet.to).and_then(|keys| keys.open(&packet));
                assert!(opened.is_none_or(|text| text.len() < dice.0.len()));
            }
        }
        1 => {
            let pieces = initial::pieces(dice.0).unwrap_or_default();
            let said: usize = pieces.iter().map(|(_, piece)| piece.len()).sum();
            assert!(said <= dice.0.len());
        }
        _ => messages(dice.0),
    }
}

/// A message is the same as in a record of TLS over TCP.
fn messages(stream: &[u8]) {
    let Some((hello, length)) = whole(stream) else {
        return;
    };
    assert!(length <= stream.len());
    if hello == Hello::Wrong {
        return;
    }
    let mut record = vec![22, 3, 1];
    record.extend((length as u16).to_be_bytes());
    record.extend(&stream[..length]);
    assert_eq!(Client::default().read(&mut &record[..]), Some(hello));
}
