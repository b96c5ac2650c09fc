//! Messages of the DNS: what a sandboxed program asks, and what a server somewhere answers.

use std::net::IpAddr;

use vnplug_sandbox::dns::message::{self, Query};
use vnplug_sandbox::learned::LONGEST;
use vnplug_sandbox::name::Name;

use crate::Dice;

/// Checks it with these bytes: a question, then an answer to it.
pub fn check(bytes: &[u8]) {
    let mut dice = Dice(bytes);
    let length = usize::from(dice.u16() % 600);
    let asked = dice.bytes(length);
    let query = match message::read(asked) {
        Ok(query) => query,
        Err(answer) => {
            if let Some(answer) = answer {
                answers(asked, &answer);
            }
            return;
        }
    };
    let name = Name::new(query.name.as_str()).expect("a name that was read is one");
    assert_eq!(name, query.name, "it is canonical");
    let id = dice.u16();
    let ours = query.forward(id);
    let again = message::read(&ours).expect("what we ask is a question");
    assert_eq!(again.name, name);
    assert_eq!(again.forward(id), ours, "nothing else goes out");
    let _ = query.reverse();
    answers(asked, &query.names(std::slice::from_ref(&name)));
    answered(asked, &query, id, &ours, &mut dice);
}

/// An answer of ours belongs to what was asked.
fn answers(asked: &[u8], answer: &[u8]) {
    assert!(answer.len() >= 12 && answer[..2] == asked[..2] && answer[2] & 0x80 != 0);
}

/// What comes back has the head and the question that we sent, and any records.
fn answered(asked: &[u8], query: &Query, id: u16, ours: &[u8], dice: &mut Dice<'_>) {
    let question = 12 + ours[12..].iter().position(|&byte| byte == 0).unwrap_or(0) + 5;
    let mut bytes = ours[..question].to_vec();
    let (flags, kept) = (dice.u16(), dice.byte());
    bytes[2..4].copy_from_slice(&(flags | 0x8000).to_be_bytes());
    for at in [7, 9, 11] {
        bytes[at] = dice.byte() % 8;
    }
    bytes.extend(dice.0);
    let keep = |address: IpAddr| match address {
        IpAddr::V4(address) => address.octets()[0] != kept,
        IpAddr::V6(address) => address.octets()[0] != kept,
    };
    let Some((reply, _)) = query.filter(id, &bytes, keep) else {
        return;
    };
    answers(asked, &reply.bytes);
    for &(address, life) in &reply.addresses {
        assert!(keep(address) && life <= LONGEST);
    }
    assert!(!reply.left_away.iter().any(|&address| keep(address)));
    let own = u16::from_be_bytes([asked[0], asked[1]]);
    // What the program is told are these addresses and no others. A reply that cannot be written is a head alone.
    if let Some((again, _)) = query.filter(own, &reply.bytes, |_| true) {
        assert_eq!(again.addresses, reply.addresses);
    } else {
        assert_eq!(reply.bytes.len(), 12);
    }
    let cut = query.fit(reply.bytes);
    assert!(cut.len() <= 1232);
    answers(asked, &cut);
}
