//! Whole ports and whole VMs that an operator takes again and again under load: at once, for good, and at nobody else's cost.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, yield_now};
use std::time::{Duration, Instant};

use vnplug::{Client, Error, Next, Port, Revoke, Whose};
use vnplug_e2e::Lab;
use vnplug_e2e::attached::uml_spec;
use vnplug_e2e::beside::Ends;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::played::PlayedVm;
use vnplug_e2e::raw::open;
use vnplug_e2e::reading::end_of;
use vnplug_e2e::times::Times;
use vnplug_e2e::traffic::sequence;
use vnplug_ring::control::{Counted, Grant, Message, Open, Opened, REVOKED, RingPlace};
use vnplug_ring::layout::{HEAD, Meta};
use vnplug_ring::{Consumer, Producer};
use vnplug_testing::until;

/// Packets a second.
const LOAD: u64 = 50_000;
const POOL: u64 = 4 << 20;
/// The ports of a VM.
const PORTS: usize = 3;

/// As often as usual, or with `VNPLUG_LONG=1` in the environment as the long run does it.
fn rounds() -> usize {
    match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 1_000,
        None => 50,
    }
}

fn whole(whose: Whose) -> Revoke {
    Revoke {
        whose,
        receiving: true,
        sending: true,
    }
}

fn of_source(all: &[Counted], name: &str) -> u64 {
    value(counted(all, "source"), name)
}

/// Reads on: how many packets, of which none is missing.
fn reads_all(port: &mut Port, over: &AtomicBool) -> u64 {
    let mut next = None;
    let mut read = 0;
    while !over.load(Ordering::Relaxed) {
        match port.next().unwrap() {
            Next::Packet(packet) => {
                let number = sequence(packet.bytes);
                assert_eq!(number, *next.get_or_insert(number), "after {read} packets");
                (next, read) = (Some(number + 1), read + 1);
            }
            _ => drop(port.wait(Some(Duration::from_millis(20))).unwrap()),
        }
    }
    read
}

/// Sends on: how many frames.
fn sends_on(port: &mut Port, over: &AtomicBool) -> u64 {
    let mut sent = 0;
    while !over.load(Ordering::Relaxed) {
        match port.send(&[8; 200]).unwrap() {
            true => sent += 1,
            false => yield_now(),
        }
    }
    sent
}

/// Takes something again and again, beside a reader and a sender that lose nothing. `takes` is told how often it was done and
/// says how long it took.
fn under_load(
    daemon: &Daemon,
    what: &str,
    rounds: usize,
    mut takes: impl FnMut(usize, &mut Client) -> Duration,
) {
    // All of some seconds: a reader that has no processor for a while loses nothing.
    let mut reader = daemon.port("lab").ring_bytes(32 << 20).open().unwrap();
    let sender = daemon.port("lab").transmit(1 << 16).enabled(false);
    let mut sender = sender.open().unwrap();
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let over = AtomicBool::new(false);
    let mut times = Times::default();
    let (read, sent) = scope(|threads| {
        // Who fails here ends them, too: they are waited for in any case.
        let ends = Ends([&over; 2]);
        let reads = threads.spawn(|| reads_all(&mut reader, &over));
        let sends = threads.spawn(|| sends_on(&mut sender, &over));
        for round in 0..rounds {
            times.push(takes(round, &mut operator));
        }
        drop(ends);
        (reads.join().unwrap(), sends.join().unwrap())
    });
    assert!(read > 1_000 && sent > 1_000, "{read} read, {sent} sent");
    assert_eq!(reader.counts().lost, 0, "of {read}");
    let number = sender.number().to_string();
    let all = until(
        "all that the bystander wrote is sent",
        || daemon.audit(),
        |all| {
            let own = all.iter().find(|it| it.kind == "port" && it.name == number);
            value(own.unwrap(), "sent") == sent
        },
    );
    // The fault is real: frames waited in what was taken.
    let dropped = of_source(&all, "send_dropped_revoked");
    assert!(dropped > rounds as u64, "{dropped}");
    eprintln!(
        "{what}, {} times: {:?} in the median, 99 of 100 at most {:?}, the worst {:?}; {read} packets read beside it, \
         {sent} sent, {dropped} that waited dropped",
        rounds,
        times.at(50),
        times.at(99),
        times.at(100)
    );
    times.are_within(Duration::from_millis(10), what);
}

/// What was sent through the source, but for what the bystander sends.
fn others_sent(daemon: &Daemon) -> u64 {
    let all = daemon.counters();
    let ports = all.iter().filter(|it| it.kind == "port");
    of_source(&all, "sent") - ports.map(|it| value(it, "sent")).sum::<u64>()
}

#[test]
fn whole_ports_are_taken_again_and_again_and_others_lose_nothing() {
    let lab = Lab::new().unwrap();
    let source = format!("lab=gen,pps={LOAD}");
    let daemon = Daemon::start(&lab, None, &["--source", &source]).unwrap();
    under_load(&daemon, "a whole port", rounds(), |_, operator| {
        let port = daemon.port("lab").ring_bytes(1 << 20).transmit(1 << 18);
        let mut port = port.open().unwrap();
        let outbox = port.outbox().unwrap();
        while outbox.push(&[7; 1400]).unwrap() {}
        outbox.flush();
        let begun = Instant::now();
        operator.revoke(whole(Whose::Port(port.number()))).unwrap();
        let took = begun.elapsed();
        let sent = others_sent(&daemon);
        let told = end_of(&mut port);
        assert!(
            matches!(&told, Error::Gone(why) if why == REVOKED),
            "{told:?}"
        );
        // What it got ends with what was there then.
        let read = port.counts().received;
        assert!(matches!(port.next(), Err(Error::Gone(_))));
        assert_eq!(port.counts().received, read);
        assert!(matches!(port.send(&[7; 60]), Err(Error::Gone(_))));
        assert_eq!(others_sent(&daemon), sent, "nothing of it is sent later");
        took
    });
}

/// A VM that the test plays.
struct Vm(PlayedVm);

impl Vm {
    fn attach(daemon: &Daemon, name: &str) -> Self {
        let allow = vec![Grant {
            source: "lab".into(),
            filter: String::new(),
        }];
        Self(PlayedVm::attach(daemon, uml_spec(name, POOL, allow)))
    }

    /// Opens a port with frames that wait to be sent.
    fn open(&mut self) -> Opened {
        let opened = self.0.open(Open {
            transmit_bytes: 1 << 17,
            ..open("host:lab", 1 << 16)
        });
        let mut ring = self.0.sender(&opened);
        while ring.push(&Meta::default(), &[7; 1400]) == Ok(true) {}
        ring.publish();
        opened
    }

    /// How far its rings are written.
    fn heads(&self, ports: &[Opened]) -> Vec<u64> {
        let rings = ports.iter().flat_map(|port| &port.rings);
        let head = |place: &RingPlace| {
            let mut head = [0; 8];
            rustix::io::pread(&self.0.file, &mut head, place.offset + HEAD).unwrap();
            u64::from_le_bytes(head)
        };
        rings.map(head).collect()
    }

    /// Hears that its ports are gone, and lets go of them.
    fn lets_go(&mut self, ports: &[Opened]) {
        let mut gone = Vec::new();
        while gone.len() < ports.len() {
            match self.0.agent.next() {
                Some((0, Message::Gone { port, reason })) => {
                    assert_eq!(reason, REVOKED);
                    gone.push(port);
                }
                Some((0, _)) => {}
                other => panic!("{other:?} after {gone:?}"),
            }
        }
        gone.sort_unstable();
        assert_eq!(gone, ports.iter().map(|it| it.port).collect::<Vec<_>>());
        let places = ports.iter();
        let places = places.flat_map(|it| it.rings.iter().chain([&it.transmit]));
        let places = places.copied().collect();
        let released = self.0.agent.ask(&Message::Release(places), 0);
        assert_eq!(released, Message::Done);
    }
}

/// A VM with a port, which reads what comes and sends.
struct InUse {
    vm: Vm,
    port: Opened,
    reader: Consumer,
    sender: Producer,
}

impl InUse {
    fn new(mut vm: Vm) -> Self {
        let port = vm.open();
        let (reader, sender) = (vm.0.reader(&port), vm.0.sender(&port));
        let mut own = Self {
            vm,
            port,
            reader,
            sender,
        };
        own.all_is_taken();
        own
    }

    /// What is there of packets.
    fn reads(&mut self) -> u64 {
        let mut read = 0;
        while self.reader.next().unwrap().is_some() {
            read += 1;
        }
        self.reader.release();
        read
    }

    /// Waits until the daemon has what it sends.
    fn all_is_taken(&mut self) {
        let kick = Message::Kick(vec![self.port.port]).encode(0, 1);
        self.vm.0.agent.send(&kick).unwrap();
        let used = || self.sender.used();
        until("the other VM's frames are taken", used, |used| *used == 0);
    }

    /// It gets packets that were not there yet, and sends one.
    fn goes_on(&mut self) {
        self.reads();
        until(
            "the other VM gets packets",
            || self.reads(),
            |read| *read > 0,
        );
        let pushed = self.sender.push(&Meta::default(), &[7; 60]);
        assert_eq!(pushed, Ok(true));
        self.sender.publish();
        self.all_is_taken();
    }

    /// Frames that were sent for it.
    fn sent(&self, daemon: &Daemon) -> u64 {
        let all = daemon.counters();
        let number = self.port.port.to_string();
        let own = all.iter().find(|it| it.kind == "port" && it.name == number);
        value(own.expect("the other VM has its port"), "sent")
    }
}

#[test]
fn whole_vms_are_taken_again_and_again_and_others_lose_nothing() {
    let lab = Lab::new().unwrap();
    let source = format!("lab=gen,pps={LOAD}");
    let args = [
        "--source",
        &source,
        "--allow-send",
        // So slow that frames wait when it is taken.
        "vm:taken=lab,rate=1M",
        "--allow-send",
        "vm:stays=lab",
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut taken = Vm::attach(&daemon, "taken");
    let mut stays = InUse::new(Vm::attach(&daemon, "stays"));
    let before = stays.sent(&daemon);
    under_load(&daemon, "a whole VM", rounds(), |_, operator| {
        let ports: Vec<Opened> = (0..PORTS).map(|_| taken.open()).collect();
        // The control: its rings are written.
        until(
            "its rings are written",
            || taken.heads(&ports),
            |heads| heads.iter().all(|head| *head > 0),
        );
        let begun = Instant::now();
        operator.revoke(whole(Whose::Vm("taken".into()))).unwrap();
        let took = begun.elapsed();
        let (heads, sent) = (taken.heads(&ports), others_sent(&daemon));
        taken.lets_go(&ports);
        stays.goes_on();
        assert_eq!(taken.heads(&ports), heads, "nothing is written later");
        assert_eq!(others_sent(&daemon), sent, "nothing of it is sent later");
        took
    });
    // All that the other VM sent went out, one in each round.
    until(
        "the other VM's frames are sent",
        || stays.sent(&daemon) - before,
        |sent| *sent == rounds() as u64,
    );
    let ports = daemon.counters();
    let ports = ports.iter().filter(|it| it.kind == "port");
    let left: Vec<&str> = ports.map(|it| it.name.as_str()).collect();
    assert_eq!(left, [stays.port.port.to_string()], "the other VM's");
}
