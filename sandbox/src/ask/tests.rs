//! A gate that asks: one question per rule, one answer for all that wait, and what nobody answers is refused.

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use vnplug_testing::{TestDir, eventually};

use crate::act::{Act, Doing, Target, Transport, Who};
use crate::ask::{Answer, Event, Life, OPEN, Question, offers};
use crate::gate::{Gate, NotAnswered, Setup, Verdict};
use crate::learned::By;
use crate::name::Name;
use crate::rules::{Policy, Say, edit, file};

pub(crate) fn who(pid: u32, program: &str) -> Arc<Who> {
    Arc::new(Who {
        pid,
        started: u64::from(pid),
        program: program.into(),
        hash: None,
        arguments: vec!["x".into()],
        ancestors: Vec::new(),
    })
}

pub(crate) fn connect(pid: u32, to: &str) -> Act {
    Act {
        who: who(pid, "/usr/bin/curl"),
        doing: Doing::Connect,
        transport: Transport::Tcp,
        target: Target::Internet(to.parse::<SocketAddr>().unwrap()),
    }
}

fn resolve(pid: u32, name: &str) -> Act {
    Act {
        doing: Doing::Resolve,
        transport: Transport::Udp,
        target: Target::Name(name.to_owned()),
        ..connect(pid, "0.0.0.0:0")
    }
}

pub(crate) fn asking(timeout: Duration) -> Gate {
    Gate::new(Policy {
        default: Say::Ask,
        timeout,
        ..Policy::default()
    })
}

const LONG: Duration = Duration::from_secs(100);
const YES: Answer = Answer {
    allow: true,
    life: Life::Session,
    offer: 0,
};

fn judge(gate: &Gate, act: &Act, told: &Sender<(u32, Verdict)>) {
    let (pid, told) = (act.who.pid, told.clone());
    // Whoever asked in passing does not listen any more.
    gate.judge(act, move |verdict| {
        let _ = told.send((pid, verdict));
    });
}

/// What is decided at once.
fn now(gate: &Gate, act: &Act) -> Option<Verdict> {
    let (told, verdicts) = channel();
    judge(gate, act, &told);
    verdicts.try_recv().ok().map(|(_, verdict)| verdict)
}

/// The next question.
pub(crate) fn asked(events: &Receiver<Event>) -> Arc<Question> {
    loop {
        if let Event::Asked(question) = events.recv_timeout(LONG).unwrap() {
            return question;
        }
    }
}

#[test]
fn equal_questions_are_one_and_none_holds_up_others() {
    let gate = asking(LONG);
    let events = gate.subscribe();
    let (told, verdicts) = channel();
    for pid in 1..=5 {
        judge(&gate, &connect(pid, "192.0.2.1:443"), &told);
    }
    judge(&gate, &connect(6, "192.0.2.2:443"), &told);
    let (first, second) = (asked(&events), asked(&events));
    assert!(events.try_recv().is_err() && verdicts.try_recv().is_err());
    assert_eq!((first.id, second.id), (1, 2));
    // The second is answered first.
    gate.answer(
        2,
        Answer {
            allow: false,
            ..YES
        },
        "terminal",
    )
    .unwrap();
    assert_eq!(verdicts.recv().unwrap(), (6, Verdict::Deny));
    gate.answer(1, YES, "terminal").unwrap();
    let mut all: Vec<_> = verdicts.try_iter().collect();
    all.sort_by_key(|(pid, _)| *pid);
    assert_eq!(
        all,
        (1..=5).map(|pid| (pid, Verdict::Allow)).collect::<Vec<_>>()
    );
    // From now on nobody is asked about either.
    assert_eq!(
        now(&gate, &connect(9, "192.0.2.1:443")),
        Some(Verdict::Allow)
    );
    assert_eq!(
        now(&gate, &connect(9, "192.0.2.2:443")),
        Some(Verdict::Deny)
    );
    assert!(matches!(
        gate.answer(1, YES, "terminal"),
        Err(NotAnswered::Late(1))
    ));
}

#[test]
fn what_nobody_answers_in_time_is_refused_and_not_asked_again_at_once() {
    let gate = asking(Duration::from_millis(50));
    let events = gate.subscribe();
    let (told, verdicts) = channel();
    let began = Instant::now();
    judge(&gate, &connect(1, "192.0.2.1:443"), &told);
    assert_eq!(verdicts.recv_timeout(LONG).unwrap(), (1, Verdict::Deny));
    assert!(began.elapsed() >= Duration::from_millis(50));
    assert_eq!(asked(&events).id, 1);
    assert!(matches!(
        events.recv_timeout(LONG).unwrap(),
        Event::Settled {
            id: 1,
            allow: false,
            by: "time"
        }
    ));
    assert_eq!(
        now(&gate, &connect(1, "192.0.2.1:443")),
        Some(Verdict::Deny)
    );
    // Another process is.
    assert_eq!(now(&gate, &connect(2, "192.0.2.1:443")), None);
    // A deadline that a later question has before an earlier one is kept, too: the thread lives on.
    judge(&gate, &connect(3, "192.0.2.3:443"), &told);
    assert_eq!(verdicts.recv_timeout(LONG).unwrap(), (3, Verdict::Deny));
}

#[test]
fn without_anybody_to_ask_there_is_no_wait() {
    let gate = asking(LONG);
    assert_eq!(
        now(&gate, &connect(1, "192.0.2.1:443")),
        Some(Verdict::Deny)
    );
    drop(gate.subscribe());
    assert_eq!(
        now(&gate, &connect(2, "192.0.2.2:443")),
        Some(Verdict::Deny)
    );
    assert_eq!(gate.open_questions(), 0);
    let policy = Policy {
        default: Say::Ask,
        timeout: LONG,
        ..Policy::default()
    };
    let gate = Gate::with(Setup {
        policy,
        waits_for_fronts: true,
        ..Setup::default()
    });
    let (told, verdicts) = channel();
    judge(&gate, &connect(1, "192.0.2.1:443"), &told);
    let events = gate.subscribe();
    gate.answer(asked(&events).id, YES, "socket").unwrap();
    assert_eq!(verdicts.recv().unwrap(), (1, Verdict::Allow));
}

#[test]
fn one_question_covers_a_name_and_what_is_connected_by_it() {
    let gate = asking(LONG);
    let events = gate.subscribe();
    let (told, verdicts) = channel();
    // Both families at once, and in another process: one question.
    judge(&gate, &resolve(1, "example.org"), &told);
    judge(&gate, &resolve(1, "EXAMPLE.org."), &told);
    judge(&gate, &resolve(2, "example.org"), &told);
    let question = asked(&events);
    assert!(events.try_recv().is_err());
    gate.answer(question.id, YES, "terminal").unwrap();
    assert_eq!(
        verdicts
            .try_iter()
            .filter(|&(_, verdict)| verdict == Verdict::Allow)
            .count(),
        3
    );
    // An address that nobody gave for the name is another question.
    assert_eq!(now(&gate, &connect(1, "192.0.2.1:443")), None);
    let name = Name::new("example.org").unwrap();
    gate.learned().note(
        &name,
        "192.0.2.7".parse().unwrap(),
        Duration::from_secs(5),
        &By::default(),
    );
    assert_eq!(
        now(&gate, &connect(1, "192.0.2.7:443")),
        Some(Verdict::Allow)
    );
    assert_eq!(
        now(&gate, &connect(3, "192.0.2.7:80")),
        Some(Verdict::Allow)
    );
    // On the floor a name opens nothing.
    gate.learned().note(
        &name,
        "10.0.0.1".parse().unwrap(),
        Duration::from_secs(5),
        &By::default(),
    );
    assert_eq!(now(&gate, &connect(1, "10.0.0.1:443")), Some(Verdict::Deny));
}

#[test]
fn once_is_for_one_process() {
    let gate = asking(LONG);
    let events = gate.subscribe();
    let (told, verdicts) = channel();
    judge(&gate, &connect(1, "192.0.2.1:443"), &told);
    gate.answer(
        asked(&events).id,
        Answer {
            life: Life::Once,
            ..YES
        },
        "terminal",
    )
    .unwrap();
    assert_eq!(verdicts.recv().unwrap(), (1, Verdict::Allow));
    assert_eq!(
        now(&gate, &connect(1, "192.0.2.1:443")),
        Some(Verdict::Allow)
    );
    assert_eq!(now(&gate, &connect(2, "192.0.2.1:443")), None);
}

#[test]
fn an_answer_settles_all_questions_that_its_rule_is_about() {
    let gate = asking(LONG);
    let events = gate.subscribe();
    let (told, verdicts) = channel();
    for port in 1..=10 {
        judge(&gate, &connect(port, &format!("192.0.2.1:{port}")), &told);
    }
    let questions: Vec<_> = (0..10).map(|_| asked(&events)).collect();
    // The second offer leaves the port away.
    assert!(questions[3].offers[1].ports.is_empty());
    gate.answer(questions[3].id, Answer { offer: 1, ..YES }, "terminal")
        .unwrap();
    assert_eq!(
        verdicts
            .try_iter()
            .filter(|&(_, verdict)| verdict == Verdict::Allow)
            .count(),
        10
    );
    let settled = events
        .try_iter()
        .filter(|event| matches!(event, Event::Settled { allow: true, .. }))
        .count();
    assert_eq!(settled, 10);
    assert!(matches!(
        gate.answer(questions[3].id, Answer { offer: 9, ..YES }, "terminal"),
        Err(NotAnswered::Late(_))
    ));
}

#[test]
fn always_is_a_rule_in_a_file() {
    let dir = TestDir::new("sandbox-answers");
    let answers = dir.path("answers/default.toml");
    let policy = Policy {
        default: Say::Ask,
        timeout: LONG,
        ..Policy::default()
    };
    let gate = Gate::with(Setup {
        policy,
        answers: Some(answers.clone()),
        ..Setup::default()
    });
    let events = gate.subscribe();
    let (told, verdicts) = channel();
    let file = answers.clone();
    gate.judge(&connect(1, "192.0.2.1:443"), move |verdict| {
        told.send((verdict, file.exists())).unwrap();
    });
    gate.answer(
        asked(&events).id,
        Answer {
            life: Life::Always,
            ..YES
        },
        "terminal",
    )
    .unwrap();
    // A program that ends at once takes no answer with it.
    assert_eq!(verdicts.recv().unwrap(), (Verdict::Allow, true));
    let (told, _verdicts) = channel();
    judge(&gate, &connect(1, "192.0.2.2:443"), &told);
    gate.answer(
        asked(&events).id,
        Answer {
            life: Life::Always,
            allow: false,
            ..YES
        },
        "terminal",
    )
    .unwrap();
    // A sandbox of another day.
    let policy = Policy {
        default: Say::Ask,
        answers: file::read(&answers).unwrap().rules,
        ..Policy::default()
    };
    let next = Gate::new(policy);
    assert_eq!(
        now(&next, &connect(8, "192.0.2.1:443")),
        Some(Verdict::Allow)
    );
    assert_eq!(
        now(&next, &connect(8, "192.0.2.2:443")),
        Some(Verdict::Deny)
    );
    // A program on the floor is asked about if a rule by hand says so, and each time anew.
    let text = "default = 'ask'\n[[rule]]\nsay = 'ask'\nto = 'private'\n";
    let rules = file::parse(text, |_, _| crate::rules::Origin::Given)
        .unwrap()
        .rules;
    let policy = Policy {
        rules,
        default: Say::Ask,
        timeout: LONG,
        ..Policy::default()
    };
    let gate = Gate::with(Setup {
        policy,
        answers: Some(answers.clone()),
        ..Setup::default()
    });
    let events = gate.subscribe();
    judge(&gate, &connect(1, "10.0.0.1:22"), &told);
    let question = asked(&events);
    assert!(!question.lasts);
    gate.answer(
        question.id,
        Answer {
            life: Life::Always,
            ..YES
        },
        "terminal",
    )
    .unwrap();
    assert_eq!(now(&gate, &connect(1, "10.0.0.1:22")), None);
    assert_eq!(file::read(&answers).unwrap().rules.len(), 2);
}

#[test]
fn each_offer_allows_the_act_and_is_written_as_it_is_read() {
    let names = [Name::new("www.example.org").unwrap()];
    let path = |doing, transport, path: &str| Act {
        doing,
        transport,
        target: Target::Path(path.into()),
        ..connect(1, "0.0.0.0:0")
    };
    for (act, names) in [
        (connect(1, "192.0.2.1:443"), &[][..]),
        (connect(1, "192.0.2.1:443"), &names),
        (connect(1, "[2001:db8::1]:443"), &[]),
        (
            Act {
                transport: Transport::Other(132),
                ..connect(1, "192.0.2.1:443")
            },
            &[],
        ),
        (
            Act {
                transport: Transport::Raw,
                ..connect(1, "192.0.2.1:0")
            },
            &[],
        ),
        (
            Act {
                doing: Doing::Bind,
                ..connect(1, "0.0.0.0:80")
            },
            &[],
        ),
        (
            Act {
                doing: Doing::Accept,
                ..connect(1, "10.0.0.1:80")
            },
            &[],
        ),
        (resolve(1, "www.example.org"), &[]),
        (
            Act {
                doing: Doing::Create,
                transport: Transport::Packet,
                target: Target::Nobody,
                ..connect(1, "0.0.0.0:0")
            },
            &[],
        ),
        (
            Act {
                transport: Transport::Unix,
                target: Target::Abstract(b"a b".to_vec()),
                ..connect(1, "0.0.0.0:0")
            },
            &[],
        ),
        (
            Act {
                transport: Transport::Vsock,
                target: Target::Vsock { cid: 2, port: 70 },
                ..connect(1, "0.0.0.0:0")
            },
            &[],
        ),
        (path(Doing::Connect, Transport::Unix, "/run/x y/s"), &[]),
        (path(Doing::Write, Transport::File, "/etc/passwd"), &[]),
        (path(Doing::Execute, Transport::File, "/bin/ls"), &[]),
    ] {
        let (offers, lasts) = offers(&act, names);
        assert!(lasts && offers.len() >= 2, "{act:?}");
        for offer in offers {
            let text = edit::write(&offer);
            let read = file::parse(&text, |_, _| crate::rules::Origin::Given)
                .unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(*read.rules[0], offer, "{text}");
            assert!(
                offer.matches(&act, names, std::time::SystemTime::now()),
                "{text} on {act:?}"
            );
        }
    }
}

#[test]
fn a_program_cannot_write_a_rule_by_its_name() {
    for program in ["/tmp/*", "/tmp/a?b", ""] {
        let act = Act {
            who: who(1, program),
            ..connect(1, "192.0.2.1:1")
        };
        assert!(!offers(&act, &[]).1, "{program}");
    }
    let act = Act {
        transport: Transport::Unix,
        target: Target::Path("/run/*".into()),
        ..connect(1, "0.0.0.0:0")
    };
    assert!(!offers(&act, &[]).1);
    let act = Act {
        who: who(1, "/tmp/x\"\n[[rule]]\nsay = \"allow\""),
        ..connect(1, "192.0.2.1:1")
    };
    let text = edit::write(&offers(&act, &[]).0[0]);
    assert_eq!(
        file::parse(&text, |_, _| crate::rules::Origin::Given)
            .unwrap()
            .rules
            .len(),
        1
    );
}

#[test]
fn a_flood_of_questions_is_bounded_and_each_act_is_told_once() {
    let gate = asking(Duration::from_millis(300));
    let _events = gate.subscribe();
    let (told, verdicts) = channel();
    let threads = 8;
    let barrier = Arc::new(Barrier::new(threads));
    let count = 500;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (gate, told, barrier) = (&gate, told.clone(), barrier.clone());
            scope.spawn(move || {
                barrier.wait();
                for number in 0..count {
                    let to = format!("198.51.{}.{}:443", number / 250, number % 250 + 1);
                    judge(
                        gate,
                        &connect(u32::try_from(thread * count + number).unwrap(), &to),
                        &told,
                    );
                }
            });
        }
    });
    assert!(gate.open_questions() <= OPEN);
    let mut seen = vec![0; threads * count];
    for _ in 0..threads * count {
        let (pid, verdict) = verdicts.recv_timeout(LONG).unwrap();
        assert_eq!(verdict, Verdict::Deny);
        seen[usize::try_from(pid).unwrap()] += 1;
    }
    assert!(seen.iter().all(|&count| count == 1));
    assert!(verdicts.recv_timeout(Duration::from_millis(50)).is_err());
}

#[test]
fn a_gate_that_goes_refuses_what_waits() {
    let gate = asking(LONG);
    let _events = gate.subscribe();
    let (told, verdicts) = channel();
    judge(&gate, &connect(1, "192.0.2.1:443"), &told);
    drop(gate);
    assert_eq!(verdicts.recv_timeout(LONG).unwrap(), (1, Verdict::Deny));
    eventually("everybody was told", || verdicts.try_recv().is_err());
}

#[test]
fn the_sockets_of_front_ends_are_out_of_reach() {
    let policy = Policy {
        default: Say::Allow,
        ..Policy::default()
    };
    let gate = Gate::with(Setup {
        policy,
        private: vec!["/run/user/0/vnplug/sandbox".into()],
        ..Setup::default()
    });
    let unix = |path: &str| Act {
        transport: Transport::Unix,
        target: Target::Path(path.into()),
        ..connect(1, "0.0.0.0:0")
    };
    assert_eq!(
        now(&gate, &unix("/run/user/0/vnplug/sandbox/7.sock")),
        Some(Verdict::Deny)
    );
    assert_eq!(now(&gate, &unix("/run/user/0/x")), Some(Verdict::Allow));
}

#[test]
fn a_socket_of_front_ends_is_known_by_its_file_wherever_it_lies() {
    use std::os::unix::fs::MetadataExt;
    let dir = vnplug_testing::TestDir::new("sandbox-private");
    let private = dir.path("private");
    std::fs::create_dir(&private).unwrap();
    let gate = Gate::with(Setup {
        private: vec![private.clone()],
        ..Setup::default()
    });
    let listen = |name: &str| std::os::unix::net::UnixListener::bind(private.join(name)).unwrap();
    let _others = (listen("1.sock"), listen("2.sock"));
    gate.keep_private(&private.join("2.sock"));
    let moved = dir.path("moved");
    std::fs::rename(&private, &moved).unwrap();
    std::fs::rename(moved.join("2.sock"), dir.path("away")).unwrap();
    let found = |path: std::path::PathBuf| {
        let file = std::fs::metadata(path).unwrap();
        gate.private_file((file.dev(), file.ino()))
    };
    assert_eq!(found(moved.join("1.sock")), Some(private.join("1.sock")));
    assert_eq!(found(dir.path("away")), Some(private.join("2.sock")));
    assert_eq!(found(dir.0.clone()), None);
}
