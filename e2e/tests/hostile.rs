//! Readers that lie, stop, die or spoil what they share: they cost the others nothing.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use vnplug_e2e::beside::{Ends, beside, bystand, liar, port_of};
use vnplug_e2e::daemon::{Daemon, label, program, value};
use vnplug_e2e::raw::{Raw, open};
use vnplug_ring::control::{Message, Role, VmKind, VmSpec};
use vnplug_ring::layout::{HEAD, LIFE, READ, TAIL, WAKE_AT, WAKE_SEQ};
use vnplug_testing::{Deadline, eventually, until};

#[test]
fn a_reader_that_scribbles_over_everything_is_quarantined_alone() {
    let (liars, stores) = beside(50_000, Duration::from_secs(2), |daemon, enough| {
        let stores = AtomicU64::new(0);
        let mut liars = 0;
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        while !enough.load(Ordering::Relaxed) || stores.load(Ordering::Relaxed) < 1_000_000 {
            let reader = liar(daemon, 1 << 16);
            let deadline = Deadline::new("each liar is in quarantine");
            // A liar is only caught if a frame comes while its tail is impossible: it goes on until
            // then.
            loop {
                let burst = Instant::now();
                while burst.elapsed() < Duration::from_millis(30) {
                    for _ in 0..1000 {
                        state ^= state << 13;
                        state ^= state >> 7;
                        state ^= state << 17;
                        // The header, all words of both sides; records it cannot write.
                        let offset = match state % 8 {
                            0 => state >> 20 & 0x38,
                            1 => [HEAD, HEAD + 8, HEAD + 16, LIFE][(state >> 20) as usize & 3],
                            2 => TAIL,
                            3 => READ,
                            4 => WAKE_AT,
                            5 => WAKE_SEQ,
                            _ => state >> 20 & 0xff8,
                        };
                        reader
                            .region
                            .store_u64(offset, state.rotate_left(17), Ordering::Relaxed);
                        stores.fetch_add(1, Ordering::Relaxed);
                    }
                }
                let counters = daemon.counters();
                let state = label(port_of(&counters, &reader.port.to_string()), "state");
                if state.starts_with("quarantined") {
                    break;
                }
                deadline.check_seen(&state);
            }
            liars += 1;
        }
        (liars, stores.into_inner())
    });
    eprintln!("{stores} stores, {liars} liars in quarantine");
    assert!(liars > 0);
}

#[test]
fn a_tail_ahead_or_backwards_is_a_quarantine_and_the_reason_names_it() {
    beside(20_000, Duration::ZERO, |daemon, _| {
        for lie in [1 << 63, 1 << 40, 1 << 20, 0] {
            let reader = liar(daemon, 1 << 16);
            // The control: honest so far.
            let number = reader.port.to_string();
            assert_eq!(label(port_of(&daemon.counters(), &number), "state"), "open");
            // Backwards is a lie only once the ring has gone round.
            let deadline = Deadline::new(format!("the ring goes round, and tail {lie} is a lie"));
            while lie == 0 && reader.region.load_u64(HEAD, Ordering::Acquire) < 4 << 16 {
                deadline.check();
                let head = reader.region.load_u64(HEAD, Ordering::Acquire);
                reader.region.store_u64(TAIL, head, Ordering::Release);
            }
            loop {
                reader.region.store_u64(TAIL, lie, Ordering::Release);
                let counters = daemon.counters();
                let port = port_of(&counters, &number);
                if label(port, "state").starts_with("quarantined") {
                    break;
                }
                deadline.check_seen(&port);
                thread::sleep(Duration::from_millis(1));
            }
            // The reader sees it, whatever else it wrote.
            assert_eq!(reader.region.load_u64(LIFE, Ordering::Acquire) & 0xff, 3);
        }
    });
}

/// The command line tool as a reader in a process of its own.
fn reader_process(daemon: &Daemon, ring: &str) -> std::process::Child {
    Command::new(program("vnplug").expect("the program is built"))
        .args(["count", "--ring", ring, "lab"])
        .env("VNPLUG_SOCKET", daemon.socket())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a reader starts")
}

fn ports(daemon: &Daemon) -> u64 {
    let counters = daemon.audit();
    counters
        .iter()
        .filter(|counted| counted.kind == "port")
        .count() as u64
}

#[test]
fn readers_killed_at_any_moment_free_their_ports_and_cost_nobody_a_packet() {
    let frees = beside(20_000, Duration::ZERO, |daemon, _| {
        let mut frees = Vec::new();
        let mut state = 12_345_u64;
        let (mut killed, mut opened) = (0, 0);
        let mut longest = Duration::from_millis(8);
        while killed < 200 {
            // Four at a time, each killed at its own moment.
            let mut readers: Vec<_> = (0..4).map(|_| reader_process(daemon, "64K")).collect();
            for reader in &mut readers {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                thread::sleep(longest * (state >> 48) as u32 / (1 << 16));
                reader.kill().expect("it is ours");
                reader.wait().expect("it is ours");
                killed += 1;
            }
            let (begun, deadline) = (Instant::now(), Deadline::new("every port is freed"));
            // Those of the bystanders stay.
            while ports(daemon) > 3 {
                deadline.check();
                thread::sleep(Duration::from_millis(2));
            }
            frees.push(begun.elapsed());
            // On a busy machine it takes readers longer to come to a port.
            let now = value(&daemon.counters()[0], "ports_opened");
            if now == opened {
                longest = (2 * longest).min(Duration::from_secs(1));
            }
            opened = now;
        }
        // The control: many were killed while they had a port, not before.
        assert!(opened > 20, "{opened} ports of 200 readers");
        eprintln!("{opened} ports of 200 readers");
        frees.sort();
        frees
    });
    eprintln!(
        "ports of killed readers are free after {:?}, at most {:?}",
        frees[frees.len() / 2],
        frees[frees.len() - 1]
    );
    // 100 ms is the figure; the machine may be busy.
    assert!(frees[frees.len() / 2] < Duration::from_secs(3), "{frees:?}");
}

#[test]
fn one_stopped_reader_and_one_slow_one_cost_seven_others_nothing() {
    let dropped = beside(20_000, Duration::ZERO, |daemon, _| {
        let mut stopped = reader_process(daemon, "64K");
        let slow = daemon.port("lab").ring_bytes(1 << 16).open();
        let mut slow = slow.expect("a slow reader");
        let others: Vec<_> = (0..4)
            .map(|_| {
                daemon
                    .port("lab")
                    .ring_bytes(16 << 20)
                    .open()
                    .expect("a port")
            })
            .collect();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let over = &over;
            let _ends = Ends([over; 2]);
            let others: Vec<_> = others
                .into_iter()
                .map(|port| scope.spawn(move || bystand(port, over)))
                .collect();
            until("all are there", || ports(daemon), |ports| *ports >= 9);
            let pid = Pid::from_child(&stopped);
            kill_process(pid, Signal::STOP).expect("it is ours");
            let full = || {
                let counters = daemon.audit();
                let ports = counters.iter().filter(|counted| counted.kind == "port");
                ports.filter(|it| value(it, "dropped_full") > 0).count()
            };
            // The control: the stopped and the slow one lose.
            let deadline = Deadline::new("the slow ones lose");
            while full() < 2 {
                deadline.check();
                let _ = slow.next().expect("the slow one's port lives");
                slow.release();
                thread::sleep(Duration::from_millis(5));
            }
            over.store(true, Ordering::Relaxed);
            let others = others.into_iter().map(|other| other.join());
            let others: Vec<_> = others
                .map(|books| books.expect("it reads to the end"))
                .collect();
            assert!(others.iter().all(|books| books.lost == 0));
            let full = full();
            stopped.kill().expect("it is ours");
            stopped.wait().expect("it is ours");
            full
        })
    });
    // Nobody else did.
    assert_eq!(dropped, 2);
}

#[test]
fn a_truncated_pool_costs_its_vm_and_nobody_else() {
    beside(20_000, Duration::ZERO, |daemon, _| {
        let mut operator = vnplug::Client::connect_to(&daemon.socket()).expect("a client");
        let spec = VmSpec {
            name: "truncated".into(),
            kind: VmKind::Qemu,
            pool_bytes: 4 << 20,
            vectors: 0,
            allow: vec![vnplug_ring::control::Grant {
                source: "lab".into(),
                filter: String::new(),
            }],
            owner: 0,
            groups: Vec::new(),
            stays_for: None,
        };
        let ready = operator.attach_vm(spec.clone()).expect("a VM");
        let control = std::path::Path::new(&ready.control_path);
        let mut agent = Raw::connect(control);
        agent.hello(Role::Agent);
        let opened = agent.ask(&Message::Open(open("host:lab", 1 << 16)), 1);
        assert!(matches!(opened, Message::Opened(_)), "{opened:?}");
        // The control: the pool is truncated while a queue's thread writes it.
        let pool = std::fs::File::options().write(true).open(&ready.pool_path);
        pool.expect("the pool")
            .set_len(4096)
            .expect("it is truncated");
        eventually("the VM is dropped", || {
            daemon.counters().iter().all(|counted| counted.kind != "vm")
        });
        assert!(
            daemon.log().contains("pool was truncated"),
            "{}",
            daemon.log()
        );
        // Nothing of it is left, and it may come back.
        let again = operator.attach_vm(spec).expect("the VM comes back");
        assert_eq!(again.control_path, ready.control_path);
        // Never the same file: whoever has the old one open has nothing of the VM's.
        assert_ne!(again.pool_path, ready.pool_path);
        let mut agent = Raw::connect(control);
        agent.hello(Role::Agent);
        operator.detach_vm("truncated").expect("it is detached");
    });
}
