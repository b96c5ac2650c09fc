//! Messages and events between programs in a guest and a back-end.

use std::collections::BTreeSet;
use std::time::Duration;

use vnplug::{BackEnd, Error, Heard};
use vnplug_e2e::{Guest, Job};
use vnplug_testing::{PATIENCE, eventually};

use super::{SOON, heard, joined};

/// Messages both ways, from several programs at once, and events.
pub(crate) fn speaks(guest: &Guest, back: &mut BackEnd, whose: &str) {
    // Somewhere to read that says nothing and does not end.
    guest.run("mkfifo /tmp/quiet", PATIENCE).unwrap();
    let listed = guest.run("vnplug backends", PATIENCE).unwrap();
    assert!(
        listed.text().contains("kv") && !listed.text().contains("none"),
        "{}",
        listed.text()
    );
    let refused = guest
        .run("vnplug channel none --say x 2>&1", PATIENCE)
        .unwrap();
    assert!(
        refused.status != 0 && refused.text().contains("no back-end"),
        "{}",
        refused.text()
    );
    // Three programs; each has its own answers alone.
    let job = |name: &str| {
        let says: String = (0..20).map(|at| format!(" --say {name}-{at}")).collect();
        guest
            .spawn(&format!("vnplug channel kv -c 20 --event 2=7{says} 2>&1"))
            .unwrap()
    };
    let jobs = ["red", "green", "blue"].map(|name| (name, job(name)));
    let (mut open, mut left, mut events) = (BTreeSet::new(), 0, 0);
    while left < 3 {
        match heard(back) {
            Heard::Joined { channel, who, .. } => {
                assert_eq!(who, whose);
                assert!(open.insert(channel));
            }
            Heard::Message { channel, bytes } => {
                let answer = [b"to ", &bytes[..]].concat();
                back.send(channel, &answer).unwrap();
            }
            Heard::Event { event, count, .. } => {
                assert_eq!(event, 2);
                events += count;
            }
            Heard::Left { channel, .. } => {
                assert!(open.remove(&channel));
                left += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(events, 21);
    for (name, job) in jobs {
        let said = job.wait(PATIENCE).unwrap();
        let expected: String = (0..20).map(|at| format!("to {name}-{at}\n")).collect();
        assert_eq!(said.text().trim_end(), expected.trim_end());
    }
    // The longest message, both ways, by whatever the channel is made of.
    let len = vnplug::MAX_SAID;
    let long =
        format!("awk 'BEGIN {{ printf \"%{len}s\\n\", \"x\" }}' | vnplug channel kv -c 1 | wc -c");
    let long = guest.spawn(&long).unwrap();
    let channel = joined(back, whose);
    let Heard::Message { bytes, .. } = heard(back) else {
        panic!("no message");
    };
    assert!(bytes.len() == len && bytes.ends_with(b" x"));
    back.send(channel, &bytes).unwrap();
    let said = long.wait(PATIENCE).unwrap();
    assert_eq!(said.text().trim(), (len + 1).to_string());
    assert!(matches!(heard(back), Heard::Left { .. }));
}

/// Events of four kinds, each way: however they are put together, their sums are what happened.
pub(crate) fn counts(guest: &Guest, back: &mut BackEnd, whose: &str) {
    const EACH: u64 = 250;
    let happens = "--event 0 --event 1 --event 2 --event 3";
    let program = guest.spawn(&format!(
        "vnplug channel kv -c 1 $(for i in $(seq {EACH}); do echo {happens}; done) <>/tmp/quiet 2>&1"
    ));
    let program = program.unwrap();
    let channel = joined(back, whose);
    let mut events = [0; 4];
    while events != [EACH; 4] {
        match heard(back) {
            Heard::Event { event, count, .. } => events[usize::from(event)] += count,
            other => panic!("{other:?}"),
        }
        assert!(events.iter().all(|count| *count <= EACH), "{events:?}");
    }
    for _ in 0..EACH {
        (0..4).for_each(|event| back.event(channel, event, 1).unwrap());
    }
    let told = |said: &str| {
        let sum = |event: u8| {
            let begin = format!("# event {event}: ");
            let counts = said.lines().filter_map(|line| line.strip_prefix(&begin));
            counts.map(|it| it.parse::<u64>().unwrap()).sum::<u64>()
        };
        [0, 1, 2, 3].map(sum)
    };
    let all = || {
        program
            .peek(1 << 16)
            .is_ok_and(|said| told(&said) == [EACH; 4])
    };
    eventually("all events are told", all);
    // And no more of them until it ends.
    back.send(channel, b"bye").unwrap();
    assert_eq!(told(&program.wait(PATIENCE).unwrap().text()), [EACH; 4]);
    assert!(matches!(heard(back), Heard::Left { .. }));
}

/// Long messages both ways on several channels at once, more than a guest's line holds: nobody is cut off.
pub(crate) fn floods(guest: &Guest, back: &mut BackEnd) {
    const LINES: usize = 20;
    const LEN: usize = 60_000;
    let flood = format!(
        "awk 'BEGIN {{ s = sprintf(\"%{LEN}s\", \"x\"); for (i = 0; i < {LINES}; i++) print s }}' | \
         vnplug channel kv -c {LINES} | wc -c"
    );
    let jobs: Vec<Job> = (0..4).map(|_| guest.spawn(&flood).unwrap()).collect();
    let mut waits: Vec<(u32, Vec<u8>)> = Vec::new();
    let mut left = 0;
    while left < jobs.len() {
        let limit = match waits.is_empty() {
            true => SOON,
            false => Some(Duration::from_millis(1)),
        };
        match back.next(limit).unwrap() {
            Some(Heard::Message { channel, bytes }) => waits.push((channel, bytes)),
            Some(Heard::Left { .. }) => left += 1,
            Some(Heard::Joined { .. }) => {}
            None => assert!(!waits.is_empty(), "nothing comes any more"),
            Some(other) => panic!("{other:?}"),
        }
        waits.retain(|(channel, bytes)| match back.send(*channel, bytes) {
            Ok(()) => false,
            Err(Error::Full) => true,
            Err(error) => panic!("{error}"),
        });
    }
    for job in jobs {
        let said = job.wait(PATIENCE).unwrap();
        assert_eq!(said.text().trim(), (LINES * (LEN + 1)).to_string());
    }
}
