//! Packet memory that others delete, replace or cut off.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use vnplug_e2e::daemon::{counted, program, value};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::Wire;
use vnplug_ring::control::RingPlace;
use vnplug_testing::{Deadline, eventually};

use crate::{LENT, arena, attach, attach_unlike, counts, epoch, member, process, sees, stat};

/// It would receive into the same memory, and delete it at its end.
#[test]
fn a_second_daemon_needs_a_state_directory_of_its_own() {
    let wire = Wire::new("1500", &["--source", LENT]);
    let vm = attach(&wire, "a");
    let before = (stat(&vm).ino(), epoch(&vm));
    let state = wire.daemon.socket().parent().unwrap().to_owned();
    let second = |args: [&str; 2]| {
        let mut command = std::process::Command::new(program("vnplugd").unwrap());
        command.arg("--socket").arg(state.join("other")).args(args);
        let output = command.output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    let text = second(["--source", "lab=gen,pps=1"]);
    assert!(text.contains("another daemon uses"), "{text}");
    assert!(text.contains("its own --state-dir"), "{text}");
    assert_eq!((stat(&vm).ino(), epoch(&vm)), before);
    let mut port = process(&wire);
    sees(&wire, &mut port, 100);
}

/// Whoever may write another file of the daemon's could give it the name of packet memory.
#[test]
fn a_file_that_was_put_in_the_place_of_packet_memory_is_not_received_into() {
    let mut wire = Wire::new("1500", &["--source", LENT]);
    let vm = attach(&wire, "a");
    let len = stat(&vm).len();
    let own = attach_unlike(&wire, "b", len);
    wire.daemon.kill();
    let pool = Path::new(&own.pool_path);
    let before = std::fs::read(pool).unwrap();
    for link in [
        |pool: &Path, name: &Path| std::fs::hard_link(pool, name),
        |pool: &Path, name: &Path| std::os::unix::fs::symlink(pool, name),
    ] {
        std::fs::remove_file(arena(&vm)).unwrap();
        link(pool, &arena(&vm)).unwrap();
        wire.daemon.launch().unwrap();
        assert_ne!(stat(&vm).ino(), std::fs::metadata(pool).unwrap().ino());
        let text = member(&vm).err().unwrap();
        assert!(text.contains("another file now"), "{text}");
        wire.daemon.kill();
    }
    // But for its header, which each daemon writes.
    let after = std::fs::read(pool).unwrap();
    assert!(before[4096..] == after[4096..]);
}

#[test]
fn a_truncated_file_costs_those_who_read_there_and_nobody_else() {
    truncated(|_| 4096, false);
}

#[test]
fn a_file_that_was_truncated_and_grew_again_is_noticed() {
    truncated(|_| 0, true);
}

#[test]
fn a_file_of_which_the_beginning_stayed_when_it_was_truncated_and_grew_again_is_noticed() {
    truncated(|_| 4096, true);
    truncated(|place| place.offset + place.len - 4096, true);
}

/// Truncates it to what is told of the arena's place.
fn truncated(keep: impl Fn(RingPlace) -> u64, grows: bool) {
    let wire = Wire::new("1500", &["--source", LENT]);
    let vm = attach(&wire, "a");
    let (opened, agent) = member(&vm).unwrap();
    let keep = keep(opened.arenas.places[0]);
    drop(agent);
    let mut own = wire.daemon.port("wire1").open().unwrap();
    sees(&wire, &mut own, 100);
    let file = File::options().write(true).open(arena(&vm)).unwrap();
    if grows {
        file.set_len(keep).unwrap();
        file.set_len(vm.arenas[0].1).unwrap();
        wire.send(&Stream::new("wire0", 10));
        // Counted, and no port gets zeros for frames.
        eventually("it is noticed", || {
            let counters = wire.daemon.counters();
            let source = counted(&counters, "source");
            value(source, "kernel_dropped") > 0
        });
    } else {
        file.set_len(keep).unwrap();
    }
    // Those that are received in this moment are lost.
    let deadline = Deadline::new("it is noticed");
    while !wire.daemon.log().contains("was truncated: detach its VMs") {
        deadline.check();
        wire.send(&Stream::new("wire0", 10));
        std::thread::sleep(Duration::from_millis(100));
    }
    std::thread::sleep(Duration::from_millis(500));
    while own.batch(10_000).count() > 0 {}
    for _ in 0..10 {
        sees(&wire, &mut own, 300);
    }
    let text = member(&vm).err().unwrap();
    assert!(text.contains("detach its VMs and restart"), "{text}");
    // Groups of processes have copies from now on.
    let mut port = wire.daemon.port("wire1").group("other").open().unwrap();
    sees(&wire, &mut port, 100);
    assert_eq!(counts(&wire, &port), (100, 0));
}
