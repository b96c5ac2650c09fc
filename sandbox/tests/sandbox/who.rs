//! F101, F102, F106: who made a call, also if processes come and go and their numbers are used again.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::support::{as_nobody, figure, often, open_dir, said, sandboxed};

#[test]
fn acts_are_of_the_process_that_made_them_though_process_numbers_are_used_again() {
    let dir = open_dir("sandbox-who");
    let log = dir.path("log");
    let goes_on = Arc::new(AtomicBool::new(true));
    // Every millisecond the kernel is told to give out the same numbers again (needs root).
    let control = Arc::clone(&goes_on);
    let turner = thread::spawn(move || {
        let last = "/proc/sys/kernel/ns_last_pid";
        let from = fs::read_to_string(last).unwrap();
        let mut is_turned = false;
        while control.load(Ordering::Relaxed) {
            is_turned = fs::write(last, from.trim()).is_ok();
            thread::sleep(Duration::from_millis(1));
        }
        is_turned
    });
    let count = often(1000, 10_000);
    let words = ["children", &count.to_string(), "20000", "3"];
    let option = format!("log={}", log.display());
    let text = said(&mut sandboxed(&["by-name", &option], &words));
    goes_on.store(false, Ordering::Relaxed);
    let is_turned = turner.join().unwrap();
    println!("{text}");
    // Each says a number that stands in its arguments; the gate allows no other one.
    assert_eq!(figure(&text, "refused"), 0, "{text}");
    let dead = figure(&text, "dead");
    assert!(figure(&text, "said") + dead == count && dead > 0, "{text}");
    let log = fs::read_to_string(&log).unwrap();
    let (mut acts, mut processes) = (0, std::collections::HashMap::<String, u64>::new());
    for line in log.lines() {
        let mut words = line.split(' ');
        *processes
            .entry(words.next().unwrap().to_string())
            .or_default() += 1;
        acts += 1;
        assert!(line.ends_with("Allow"), "{line}");
    }
    let again = processes.values().filter(|times| **times > 1).count();
    println!(
        "{acts} acts, {} process numbers, {again} of them used again",
        processes.len()
    );
    assert!(!is_turned || again > 0, "no number was used again");
}

#[test]
fn a_program_whose_long_file_is_read_again_and_again_does_not_hold_up_another() {
    let dir = open_dir("sandbox-long");
    let long = dir.path("long");
    fs::copy("/bin/bash", &long).unwrap();
    // It still runs; whoever may write it has it read for each process.
    let file = fs::File::options().write(true).open(&long).unwrap();
    file.set_len(250 << 20).unwrap();
    drop(file);
    let speaks = "exec 3<>/dev/udp/127.0.0.1/9";
    let crowd = often(30, 30);
    let script = format!(
        "for i in $(seq {crowd}); do ({long} -c '{speaks}' && echo long >&2) & done; sleep 0.3; \
         /bin/bash -c '{speaks}' && jobs -r | wc -l; kill $(jobs -p) 2>/dev/null; wait",
        long = long.display(),
    );
    let mut command = as_nobody(&["run", "all", "--", "/bin/bash", "-c", &script]);
    let waiting: u64 = said(&mut command).parse().unwrap();
    println!("{waiting} of {crowd} still wait when the other one has spoken");
    assert!(waiting > crowd / 2, "{waiting}");
}
