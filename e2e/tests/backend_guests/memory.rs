//! Memory that a back-end shares with a program in a guest, and wants back.

use std::time::{Duration, Instant};

use vnplug::{BackEnd, Error, Heard};
use vnplug_e2e::Guest;
use vnplug_e2e::times::Times;
use vnplug_testing::PATIENCE;

use super::{heard, joined, shows};

/// How often memory is withdrawn where that needs no device.
const WITHDRAWALS: usize = 11;

/// Memory that a program sees change, and lets go of when it is asked.
pub(crate) fn shares(guest: &Guest, back: &mut BackEnd, whose: &str) {
    for (writable, how) in [(false, "to read"), (true, "to write")] {
        let program = guest
            .spawn("vnplug channel kv --dump 32 -c 1 <>/tmp/quiet 2>&1")
            .unwrap();
        let channel = joined(back, whose);
        let began = Instant::now();
        let region = back.share(channel, 1 << 20, writable).unwrap();
        eprintln!("{whose}: 1 MiB {how} shared in {:?}", began.elapsed());
        back.memory(region)
            .unwrap()
            .write(0, b"metrics: 1")
            .unwrap();
        let shown = |text: &str| shows(&program, text);
        back.event(channel, 0, 1).unwrap();
        shown("metrics: 1");
        assert!(
            program.peek(8192).unwrap().contains(how),
            "{}",
            program.peek(8192).unwrap()
        );
        back.memory(region).unwrap().write(9, b"2").unwrap();
        back.event(channel, 0, 1).unwrap();
        shown("metrics: 2");
        let mut withdrawn = Times::default();
        lets_go(back, region, &mut withdrawn);
        eprintln!("{whose}: withdrawn in {:?}", withdrawn.all());
        shown("is released");
        back.send(channel, b"bye").unwrap();
        let said = program.wait(PATIENCE).unwrap();
        assert!(said.text().trim_end().ends_with("bye"), "{}", said.text());
        loop {
            if matches!(heard(back), Heard::Left { .. }) {
                break;
            }
        }
    }
}

/// Memory is withdrawn from a program that lets go of it when it is asked: how long that takes.
pub(crate) fn lets_go(back: &mut BackEnd, region: u32, times: &mut Times) {
    let began = Instant::now();
    assert!(back.withdraw(region, Duration::from_secs(30)).unwrap());
    times.push(began.elapsed());
}

/// Memory that costs no device is shared and withdrawn, again and again.
pub(crate) fn is_withdrawn(guest: &Guest, back: &mut BackEnd, whose: &str) {
    let program = guest.spawn("vnplug channel kv <>/tmp/quiet 2>&1").unwrap();
    let channel = joined(back, whose);
    let mut withdrawn = Times::default();
    for _ in 0..WITHDRAWALS {
        let region = back.share(channel, 4096, true).unwrap();
        lets_go(back, region, &mut withdrawn);
    }
    let what = format!("{whose}: to withdraw memory from a program");
    withdrawn.are_within(Duration::from_millis(100), &what);
    program.signal("KILL").unwrap();
    assert!(matches!(heard(back), Heard::Left { channel: of, .. } if of == channel));
}

/// A program that is stopped does not let go: its memory is emptied, and when it goes on it sees zeros.
pub(crate) fn is_emptied(guest: &Guest, back: &mut BackEnd, whose: &str) {
    let command = "vnplug channel kv --dump 32 -c 1 <>/tmp/quiet 2>&1";
    let program = guest.spawn(command).unwrap();
    let channel = joined(back, whose);
    let region = back.share(channel, 4096, true).unwrap();
    back.memory(region).unwrap().write(0, b"secret").unwrap();
    back.event(channel, 0, 1).unwrap();
    shows(&program, "secret");
    let stopped = guest.run(
        "kill -STOP $(pidof vnplug | tr ' ' '\\n' | sort -n | tail -1)",
        PATIENCE,
    );
    assert_eq!(stopped.unwrap().status, 0);
    back.event(channel, 1, 1).unwrap();
    assert!(!back.withdraw(region, Duration::from_millis(500)).unwrap());
    let goes_on = guest.run(
        "kill -CONT $(pidof vnplug | tr ' ' '\\n' | sort -n | tail -1)",
        PATIENCE,
    );
    assert_eq!(goes_on.unwrap().status, 0);
    back.send(channel, b"bye").unwrap();
    let said = program.wait(PATIENCE).unwrap();
    // The event that came while it was stopped shows what it maps then.
    let last = said
        .text()
        .lines()
        .rfind(|line| line.contains("begins"))
        .unwrap()
        .to_owned();
    assert!(last.trim_end().ends_with("begins:"), "{}", said.text());
    loop {
        if matches!(heard(back), Heard::Left { .. }) {
            break;
        }
    }
}

/// A program writes memory that it may write, and none that it may only read; what it writes into memory that was taken
/// from it nobody sees.
pub(crate) fn writes(guest: &Guest, back: &mut BackEnd, whose: &str) {
    const TEXT: &[u8; 4] = b"mine";
    let program = guest.spawn("pen kv mine 2>&1").unwrap();
    let channel = joined(back, whose);
    let begins = |back: &BackEnd, region| {
        let mut bytes = [0; TEXT.len()];
        back.memory(region).unwrap().read(0, &mut bytes).unwrap();
        bytes
    };
    let read = shares_again(back, channel, 4096, false);
    shows(&program, &format!("memory {read}: refused"));
    assert_eq!(begins(back, read), [0; 4]);
    let region = shares_again(back, channel, 4096, true);
    shows(&program, &format!("memory {region}: written"));
    assert_eq!(begins(back, region), *TEXT);
    // It does not let go, and writes on.
    assert!(!back.withdraw(region, Duration::from_millis(500)).unwrap());
    let next = shares_again(back, channel, 4096, false);
    shows(&program, &format!("memory {next}: refused"));
    back.event(channel, 0, 1).unwrap();
    shows(&program, "all are written again");
    assert_eq!([read, next].map(|it| begins(back, it)), [[0; 4]; 2]);
    program.signal("KILL").unwrap();
    assert!(matches!(heard(back), Heard::Left { channel: of, .. } if of == channel));
}

/// Shares so much as soon as what was there before is taken out, or who plugs is there again.
pub(crate) fn shares_again(back: &mut BackEnd, channel: u32, bytes: u64, writable: bool) -> u32 {
    let began = Instant::now();
    loop {
        match back.share(channel, bytes, writable) {
            Ok(region) => return region,
            Err(Error::Refused { .. }) if began.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Memory in a device is its program's alone: one of another user that has memory, too, maps none of it, and one that looks for it
/// gets no descriptor.
pub(crate) fn is_apart(guest: &Guest, back: &mut BackEnd, whose: &str) {
    const USERS: [&str; 3] = ["first", "second", "third"];
    let said = |command: &str| guest.run(command, PATIENCE).unwrap().text().to_string();
    for (at, user) in USERS.iter().enumerate() {
        let number = 65_500 + at;
        said(&format!(
            "echo {user}:x:{number}:{number}::/:/bin/sh >>/etc/passwd"
        ));
    }
    let programs = [USERS[0], USERS[1]].map(|user| {
        let exec = "exec vnplug channel kv --dump 32";
        let command = format!("exec su -s /bin/sh {user} -c '{exec}' <>/tmp/quiet 2>&1");
        let program = guest.spawn(&command).unwrap();
        let channel = joined(back, whose);
        let region = shares_again(back, channel, 4096, true);
        let memory = back.memory(region).unwrap();
        memory.write(0, user.as_bytes()).unwrap();
        back.event(channel, 0, 1).unwrap();
        shows(&program, &format!("begins: {user}"));
        program
    });
    // The control: each maps a device, and no two the same.
    let maps = "for p in $(pidof vnplug); do grep -q channel /proc/$p/cmdline && \
                grep -o '/sys[^ ]*/resource2[^ ]*' /proc/$p/maps | sort -u; done";
    let mapped = said(maps);
    let [one, other] = mapped.split_whitespace().collect::<Vec<_>>()[..] else {
        panic!("{mapped}");
    };
    assert_ne!(one, other);
    // Not by the file, which is there: root opens it.
    for device in [one, other] {
        for user in USERS {
            let open = format!("su -s /bin/sh {user} -c 'exec 3<{device} && echo opened' 2>&1");
            let refused = said(&open);
            assert!(refused.contains("ermission denied"), "{user}: {refused}");
        }
        let opened = said(&format!("exec 3<>{device} && echo opened"));
        assert!(opened.contains("opened"), "{opened}");
    }
    // Nor by the descriptors of the processes. The control: those of a user's own program it does open.
    let opens = |user: &str| {
        let each = "for p in $(pidof vnplug); do for f in /proc/$p/fd/*; do (exec 3<$f) && echo got; done; done";
        let count = said(&format!(
            "su -s /bin/sh {user} -c '{each}' 2>/dev/null | grep -c got"
        ));
        count.trim().parse::<u32>().unwrap()
    };
    assert_eq!((opens(USERS[2]), opens(USERS[0]) > 0), (0, true));
    for program in programs {
        program.signal("KILL").unwrap();
        assert!(matches!(heard(back), Heard::Left { .. }));
    }
}
