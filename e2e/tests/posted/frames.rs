//! The frames of these tests: numbered, each byte known.

use vnplug::{Next, Port};

/// The stations at the three ports: who sends, who sends on, who receives.
pub(crate) const FIRST: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(crate) const MIDDLE: [u8; 6] = [2, 0, 0, 0, 0, 2];
pub(crate) const LAST: [u8; 6] = [2, 0, 0, 0, 0, 3];
/// Of the second port of one program.
pub(crate) const SENDS: [u8; 6] = [2, 0, 0, 0, 0, 4];
pub(crate) const HEADER: usize = 14;

/// A numbered frame whose every byte depends on its number.
pub(crate) fn frame(to: [u8; 6], from: [u8; 6], number: u32, len: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from, &[0x88, 0xb5], &number.to_be_bytes()].concat();
    let rest = (frame.len()..len).map(|at| ((number as usize * 31) ^ (at * 7)) as u8);
    frame.extend(rest.collect::<Vec<_>>());
    frame
}

pub(crate) fn len_of(number: u32) -> usize {
    60 + (number as usize * 97) % 1455
}

/// The numbers of the frames that are there, each of which is as it was sent.
pub(crate) fn numbers(port: &mut Port) -> Vec<u32> {
    let mut all = Vec::new();
    while let Next::Packet(packet) = port.next().unwrap() {
        if packet.bytes[..6] != LAST || packet.bytes[6..12] != MIDDLE {
            continue;
        }
        let number = packet.bytes[14..18].try_into().map(u32::from_be_bytes);
        let number = number.unwrap();
        let expected = frame(LAST, MIDDLE, number, len_of(number));
        assert!(packet.bytes == expected, "frame {number} is another one");
        all.push(number);
    }
    all
}
