//! What somebody on a wire sends in tunnels: how it is shared by flow, and what is within.

use vnplug_frame::flow::{MAX_TUNNELS, flow_hash};
use vnplug_frame::headers::{IPV4, IPV6};
use vnplug_frame::tunnel::{GENEVE, Inner, VXLAN, inside};

use crate::Dice;

/// Checks it with these bytes: how many tunnels are put around a frame, which, and the frame.
pub fn check(bytes: &[u8]) {
    let mut dice = Dice(bytes);
    let (count, kinds) = (usize::from(dice.byte() % 5), dice.u32());
    let inner = dice.0;
    let mut frame = inner.to_vec();
    // Anything behind any protocol: the end of it, shorter each time.
    for protocol in 0..=u8::MAX {
        let mut rest = &frame[..];
        while let Some(found) = inside(protocol, rest) {
            let (Inner::Frame(end) | Inner::Packet(_, end)) = found;
            assert!(rest.ends_with(end));
            if let Inner::Packet(ethertype, _) = found {
                assert!([IPV4, IPV6].contains(&ethertype));
            }
            if protocol == 4 || protocol == 41 || end.len() == rest.len() {
                break;
            }
            rest = end;
        }
    }
    let own = flow_hash(&frame);
    let mut outers = vec![own];
    for at in 0..count {
        let kind = (kinds >> (at * 4) & 0xf) as u8;
        outers.push(flow_hash(&around(kind, at as u8, &[])));
        frame = around(kind, at as u8, &frame);
    }
    // By what is innermost, or by a tunnel whose inside is nothing that is known, or lies too deep.
    let hash = flow_hash(&frame);
    let is_deep = count + depth(inner) > MAX_TUNNELS;
    assert!(is_deep || outers.contains(&hash), "{outers:?} {hash}");
    // However much of it there is, and whatever it was.
    for cut in [frame.len() / 2, frame.len().saturating_sub(1)] {
        flow_hash(&frame[..cut]);
    }
}

/// Tunnels that a frame may have by itself, at most: any that is found anywhere.
fn depth(frame: &[u8]) -> usize {
    let is_one = |at: usize| {
        [4, 17, 41, 47]
            .into_iter()
            .any(|protocol| inside(protocol, &frame[at..]).is_some())
    };
    (0..frame.len()).filter(|at| is_one(*at)).count()
}

/// A tunnel of this kind around a frame, between two machines of its own.
fn around(kind: u8, number: u8, frame: &[u8]) -> Vec<u8> {
    let udp = |port: u16, head: &[u8]| {
        let mut bytes = vec![0xc0, number];
        bytes.extend(port.to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend(head);
        (17, bytes)
    };
    let (protocol, head) = match kind % 3 {
        0 => udp(VXLAN, &[8, 0, 0, 0, 0, 0, 7, 0]),
        1 => udp(GENEVE, &[0, 0, 0x65, 0x58, 0, 0, 7, 0]),
        _ => (47, vec![0, 0, 0x65, 0x58]),
    };
    let mut packet = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0];
    packet.extend(((20 + head.len() + frame.len()) as u16).to_be_bytes());
    packet.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
    packet.extend([192, 0, 2, number, 192, 0, 2, 100 + number]);
    packet.extend(head);
    packet.extend(frame);
    packet
}
