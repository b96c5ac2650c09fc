//! Programs of one guest that speak to two back-ends at once: what each is told is its own.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::thread;
use std::time::Duration;

use vnplug::{BackEnd, BackEndOptions, Heard};
use vnplug_e2e::Lab;
use vnplug_e2e::attached::{AttachedUml, agent, everything, image};
use vnplug_e2e::daemon::Daemon;
use vnplug_testing::PATIENCE;

const BACK_ENDS: [(u32, &str); 2] = [(85, "one"), (86, "two")];
/// Programs of each back-end, and what each says.
const PROGRAMS: usize = 3;
const MESSAGES: usize = 200;

/// Answers with its name until all programs have left.
fn serves(mut back: BackEnd, name: &str) {
    let mut left = 0;
    while left < PROGRAMS {
        let heard = back.next(Some(Duration::from_secs(60))).unwrap();
        match heard.expect("it hears something") {
            Heard::Joined { who, .. } => assert_eq!(who, "vm:uml"),
            Heard::Message { channel, bytes } => {
                let answer = [name.as_bytes(), b" to ", &bytes].concat();
                back.send(channel, &answer).unwrap();
            }
            Heard::Left { .. } => left += 1,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn programs_of_one_guest_speak_to_two_back_ends_at_once_and_nothing_is_mixed() {
    let lab = Lab::new().unwrap();
    let specs = BACK_ENDS.map(|(id, name)| format!("{name},id={id},uid=0,open=vm:*"));
    let source = ["--source", "lab=gen,pps=100"];
    let args = ["--backend", &specs[0], "--backend", &specs[1]];
    let daemon = Daemon::start(&lab, None, &[&source[..], &args].concat()).unwrap();
    let uml = AttachedUml::boot(&lab, &daemon, "uml", everything(), image().unwrap());
    let uml = uml.unwrap_or_else(|error| panic!("{error}"));
    let _agent = agent(&uml.guest).unwrap();
    thread::scope(|threads| {
        for (id, name) in BACK_ENDS {
            let options = BackEndOptions::new(id, name).socket(daemon.socket());
            let back = options.register().unwrap();
            threads.spawn(move || serves(back, name));
        }
        let mut programs = Vec::new();
        for at in 0..PROGRAMS {
            for (_, name) in BACK_ENDS {
                let own = format!("{name}-{at}");
                let lines = format!("for n in $(seq {MESSAGES}); do echo {own}-$n; done");
                let command = format!("{lines} | vnplug channel {name} -c {MESSAGES} 2>&1");
                programs.push((name, own, uml.guest.spawn(&command).unwrap()));
            }
        }
        for (name, own, program) in programs {
            let said = program.wait(PATIENCE).unwrap();
            let due = (1..=MESSAGES).map(|n| format!("{name} to {own}-{n}"));
            assert_eq!(said.text(), due.collect::<Vec<_>>().join("\n"), "{own}");
        }
    });
}
