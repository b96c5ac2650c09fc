//! What somebody on a wire says of addresses (DHCP): what is taken fits together.

use vnplug_sandbox::wire::dhcp::{Answer, Asker, Lease};

use crate::Dice;

/// Checks it with these bytes: an address and options, or a whole message.
pub fn check(bytes: &[u8]) {
    let asker = Asker {
        mac: [2, 0, 0, 0, 0, 9],
        number: 0x0102_0304,
    };
    let mut dice = Dice(bytes);
    let is_whole = dice.byte() & 1 == 1;
    let message = match is_whole {
        true => dice.0.to_vec(),
        false => {
            let mut message = asker.discover()[..240].to_vec();
            message[0] = 2;
            let address = dice.bytes(4);
            message[16..16 + address.len()].copy_from_slice(address);
            message.extend(dice.0);
            message
        }
    };
    let lease = match asker.read(&message) {
        None | Some(Answer::Refused) => return,
        Some(Answer::Offer(lease) | Answer::Ack(lease)) => lease,
    };
    fits(&lease);
    for own in [asker.request(&lease), asker.renew(&lease)] {
        assert!(own.len() >= 300 && asker.read(&own).is_none());
    }
}

fn fits(lease: &Lease) {
    assert!((8..=30).contains(&lease.bits));
    let hosts = u32::MAX >> lease.bits;
    let is_inside = |bits: u32| bits & hosts != 0 && bits & hosts != hosts;
    let own = lease.address.to_bits();
    assert!(is_inside(own), "{lease:?}");
    if let Some(router) = lease.router {
        assert!(is_inside(router.to_bits()) && router != lease.address);
        assert_eq!(router.to_bits() & !hosts, own & !hosts, "{lease:?}");
    }
    assert!(lease.dns.len() <= 3);
    for address in lease.dns.iter().chain([&lease.address, &lease.server]) {
        let odd = address.is_loopback() || address.is_multicast() || address.is_unspecified();
        assert!(!odd && !address.is_broadcast(), "{lease:?}");
    }
    assert!(lease.life.is_none_or(|life| life.as_secs() >= 60));
}
