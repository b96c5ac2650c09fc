//! Running programs while the path changes. `GOOD` and `BAD` differ in the last letter; the good one ends with 0, the
//! bad one with 1.

use std::process::ExitCode;
use std::ptr;
use std::sync::atomic::Ordering;

use crate::sys::{self, Arena, PATH, call};

/// Prints how often the good one ran, the bad one did, the call was refused, and the process was killed.
pub(crate) fn race(words: &[String]) -> ExitCode {
    let [count, good, bad] = words else {
        return ExitCode::from(2);
    };
    let count: u64 = count.parse().unwrap();
    let arena = Arena::new(0, 0);
    arena.put_path(good.as_bytes());
    let last = good.len() - 1;
    assert_eq!(good[..last], bad[..last]);
    let letters = [good, bad].map(|path| path.as_bytes()[last]);
    let flipper = match sys::fork() {
        0 => loop {
            for letter in letters {
                arena.byte(PATH + last).store(letter, Ordering::Relaxed);
                for _ in 0..(sys::now_ns() % 64) * 64 {
                    std::hint::spin_loop();
                }
            }
        },
        pid => pid,
    };
    let mut sum = [0_u64; 4];
    for _ in 0..count {
        let child = sys::fork();
        if child == 0 {
            sys::leave(-(execute(&arena) as i32));
        }
        let status = sys::status_of(child);
        let place = match libc::WEXITSTATUS(status) {
            _ if libc::WIFSIGNALED(status) => 3,
            0 => 0,
            1 => 1,
            libc::EACCES => 2,
            other => panic!("{other}"),
        };
        sum[place] += 1;
    }
    sys::end(flipper);
    println!(
        "good={} bad={} refused={} killed={}",
        sum[0], sum[1], sum[2], sum[3]
    );
    ExitCode::SUCCESS
}

/// execve of the path in the arena, with no arguments to speak of. Returns only the error.
fn execute(arena: &Arena) -> i64 {
    let words = [arena.at(PATH), 0];
    let pointer = words.as_ptr() as u64;
    let none = ptr::from_ref(&words[1]) as u64;
    call(libc::SYS_execve, [arena.at(PATH), pointer, none, 0, 0, 0])
}
