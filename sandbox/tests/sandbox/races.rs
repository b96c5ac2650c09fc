//! F98, F99, F105: arguments that change while a call is judged.
//!
//! Each kind runs twice with the same attack: below a supervisor that looks at the arguments and lets the program's
//! call go on, which must be got past, and in the sandbox, which must not.

use crate::support::{Port, as_nobody, figure, free_port, often, said, sandboxed};

/// Kinds, and how many calls of 100,000 each gets.
const KINDS: &[(&str, u64)] = &[
    ("connect-tcp", 10_000),
    ("connect-udp", 15_000),
    ("bind", 10_000),
    ("sendto", 15_000),
    ("sendmsg-address", 15_000),
    ("sendmsg-pointer", 15_000),
    ("sendmmsg", 15_000),
    ("fastopen", 5_000),
];

#[test]
fn no_call_of_eight_kinds_gets_past_while_its_arguments_change_and_a_naive_supervisor_is_passed() {
    let times = often(1, 10);
    let (mut calls, mut naive_bad, mut naive_calls) = (0, 0, 0);
    for (kind, count) in KINDS {
        // An even number flips by a thread, an odd one by a process.
        for flipped_by in 0..2 {
            let count = count * times / 2 + flipped_by;
            let (refused, bad) = race(kind, count, true);
            assert_eq!(bad, 0, "{kind}: {bad} of {count} got past");
            assert!(refused > 0, "{kind}: the arguments did not change");
            calls += count;
            let count = 3000 + flipped_by;
            let (_, bad) = race(kind, count, false);
            naive_bad += bad;
            naive_calls += count;
            println!(
                "{kind} flipped by {}: naive {bad} of {count}",
                ["thread", "process"][flipped_by as usize]
            );
        }
    }
    println!("0 of {calls} raced calls got past; naive: {naive_bad} of {naive_calls}");
    assert!(
        naive_bad > 0,
        "the control was not got past: the attack is none"
    );
}

#[test]
fn a_socket_that_is_replaced_is_judged_as_what_it_is_done_on() {
    let port = Port::new();
    let bad = port.number.to_string();
    let count = often(10_000, 100_000).to_string();
    let words = ["race", "dup2", &count, "0", &bad];
    let allowed = format!("udp/127.0.0.1:{bad}");
    let text = said(&mut sandboxed(&[&allowed], &words));
    println!("{text}");
    assert_eq!(figure(&text, "bad"), 0);
    assert!(
        figure(&text, "refused") > 0 && figure(&text, "done") > 0,
        "{text}"
    );
    let tcp = &port.connections;
    assert_eq!(tcp.load(std::sync::atomic::Ordering::Relaxed), 0);
    let inside = as_nobody(&[]).get_program().to_str().unwrap().to_string();
    let naive = [
        "naive", "0", "--", &inside, "race", "dup2", "5000", "0", &bad,
    ];
    let text = said(&mut as_nobody(&naive));
    println!("naive: {text}");
    assert!(
        figure(&text, "bad") > 0,
        "the control was not got past: {text}"
    );
}

#[test]
fn memory_that_is_taken_away_is_no_way_past() {
    let (good, bad) = (Port::new(), Port::new());
    let ports = [good.number.to_string(), bad.number.to_string()];
    let count = often(5000, 50_000).to_string();
    let words = ["race", "unmapped", &count, &ports[0], &ports[1]];
    let text = said(&mut sandboxed(&[&good.name()], &words));
    println!("{text}");
    assert!(
        figure(&text, "failed") > 0,
        "the memory was always there: {text}"
    );
    assert_eq!(bad.arrived(), 0);
    let inside = as_nobody(&[]).get_program().to_str().unwrap().to_string();
    let naive = [
        "naive", &ports[0], "--", &inside, "race", "unmapped", "5000", &ports[0], &ports[1],
    ];
    // On a busy machine not each of them finds the moment.
    let mut controls = (0..10).map(|_| said(&mut as_nobody(&naive)));
    let past = controls.find(|text| {
        println!("naive: {text}");
        bad.arrived() > 0
    });
    assert!(past.is_some(), "the control was not got past");
}

/// Runs one race; how many calls were refused, and how many got to the bad port.
fn race(kind: &str, calls: u64, is_sandbox: bool) -> (u64, u64) {
    let (good, bad) = (Port::new(), Port::new());
    // bind wants ports that are free.
    let (good_number, bad_number) = match kind {
        "bind" => (free_port(), free_port()),
        _ => (good.number, bad.number),
    };
    let [calls, good_word, bad_word] =
        [calls, good_number.into(), bad_number.into()].map(|it: u64| it.to_string());
    let words = ["race", kind, &calls, &good_word, &bad_word];
    let text = if is_sandbox {
        said(&mut sandboxed(&[&format!("127.0.0.1:{good_word}")], &words))
    } else {
        let inside = as_nobody(&[]).get_program().to_str().unwrap().to_string();
        let naive = [&["naive", &good_word, "--", &inside][..], &words[..]].concat();
        said(&mut as_nobody(&naive))
    };
    if is_sandbox {
        println!("{text}");
        assert!(figure(&text, "done") > 0, "{text}");
    }
    (
        figure(&text, "refused"),
        figure(&text, "bad") + bad.arrived(),
    )
}
