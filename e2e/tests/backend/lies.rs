//! Who says too much, or what cannot be, loses its channel; nobody else loses anything.

use vnplug::{Heard, MAX_SAID, Told};
use vnplug_e2e::Lab;
use vnplug_e2e::raw::Raw;
use vnplug_ring::control::backend::{Register, WINDOW};
use vnplug_ring::control::{Backend, Message, code};

use super::{back_end, channel, daemon, heard, joined, told};

#[test]
fn floods_and_lies_end_a_channel_and_nobody_elses() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = back_end(&daemon, 85, "kv");
    let mut bystander = channel(&daemon, "kv");
    let own = joined(&mut back);
    let liar = |lie: &dyn Fn(u32) -> Vec<Backend>| {
        let (mut raw, channel) = Raw::program(&daemon.socket(), 85);
        for message in lie(channel) {
            raw.send(&Message::Backend(message).encode(0, 0)).unwrap();
        }
        let hung_up = loop {
            match raw.next() {
                Some((0, Message::Backend(Backend::Hangup { reason, .. }))) => break reason,
                Some(_) => {}
                None => panic!("the connection ended, and not the channel"),
            }
        };
        // The connection is as good as before.
        assert!(matches!(raw.ask(&Message::List, 0), Message::Devices(_)));
        hung_up
    };
    let say = |channel, len| Backend::Say {
        channel,
        bytes: vec![1; len],
    };
    let flood = |channel| {
        (0..=WINDOW / (64 << 10))
            .map(|_| say(channel, MAX_SAID))
            .collect()
    };
    assert!(liar(&flood).contains("took"));
    assert!(liar(&|channel| vec![Backend::Took { channel, cost: 1 }]).contains("given"));
    let events = |channel, totals: &[u64]| Backend::Events {
        channel,
        totals: totals.to_vec(),
    };
    assert!(liar(&|channel| vec![events(channel, &[0; 40])]).contains("events"));
    assert!(
        liar(&|channel| vec![events(channel, &[9; 4]), events(channel, &[8; 4])])
            .contains("events")
    );
    // Others' channels, regions and back-ends cannot be named.
    let mut raw = Raw::greeted(&daemon.socket());
    for message in [
        say(own, 3),
        Backend::Hangup {
            channel: own,
            reason: "mine".into(),
        },
        Backend::Withdraw {
            channel: own,
            region: 1,
            within_ms: 0,
        },
    ] {
        raw.send(&Message::Backend(message).encode(0, 0)).unwrap();
    }
    let asked = raw.ask(
        &Message::Backend(Backend::Region {
            channel: own,
            bytes: 1,
            writable: true,
        }),
        0,
    );
    assert!(matches!(
        asked,
        Message::Error {
            code: code::NOT_FOUND,
            ..
        }
    ));
    let again = Register {
        id: 85,
        name: "kv".into(),
        version: 0,
        events_in: 0,
        events_out: 0,
    };
    let asked = raw.ask(&Message::Backend(Backend::Register(again)), 0);
    assert!(matches!(
        asked,
        Message::Error {
            code: code::EXISTS,
            ..
        }
    ));
    bystander.send(b"still here").unwrap();
    loop {
        match heard(&mut back) {
            Heard::Message { channel, bytes } if channel == own => {
                assert_eq!(bytes, b"still here");
                break;
            }
            Heard::Joined { .. }
            | Heard::Left { .. }
            | Heard::Message { .. }
            | Heard::Event { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    // A program that takes nothing fills its window, and holds up nobody.
    let mut sent = 0;
    while back.send(own, &[0; 1000]).is_ok() {
        sent += 1;
    }
    assert!(sent >= 100, "{sent}");
    let mut other = channel(&daemon, "kv");
    let other_number = loop {
        if let Heard::Joined { channel, .. } = heard(&mut back) {
            break channel;
        }
    };
    back.send(other_number, b"for the other").unwrap();
    assert_eq!(told(&mut other), Told::Message(b"for the other".to_vec()));
    let mut taken = 0;
    while taken < sent {
        assert!(matches!(told(&mut bystander), Told::Message(bytes) if bytes.len() == 1000));
        taken += 1;
    }
    back.send(own, b"room again").unwrap();
}
