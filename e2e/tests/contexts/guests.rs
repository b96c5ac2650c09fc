//! 64 guests with ports of their own: who is woken when one of them has news, and how often the daemon wakes when all send.

use std::time::Instant;

use vnplug_e2e::attached::{everything, uml_spec};
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::played::PlayedVm;
use vnplug_e2e::raw::{open, status};
use vnplug_e2e::stopped::Stopped;
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::control::{FilterSpec, Message, Open, Tuning, VmKind};
use vnplug_ring::layout::Meta;
use vnplug_ring::{Bell, Consumer, Producer, Wait};
use vnplug_testing::{eventually, until};

use super::{ALL, news, of, sleeps, teller, threads};

const GUESTS: usize = 64;
const ROUNDS: usize = 100;

fn attach(daemon: &Daemon, guest: usize) -> PlayedVm {
    let mut spec = uml_spec(&format!("g{guest}"), 1 << 20, everything());
    // Its channel is not acknowledged: nothing wakes the daemon but what is looked at here.
    spec.kind = VmKind::Qemu;
    PlayedVm::attach(daemon, spec)
}

/// A program in a guest with two ports, which sleeps until one of them has a packet.
struct Sleeper {
    vm: PlayedVm,
    ports: [u32; 2],
    rings: [Consumer; 2],
}

impl Sleeper {
    fn new(daemon: &Daemon, guest: usize) -> Self {
        let mut vm = attach(daemon, guest);
        let opened = [0, 1].map(|nth| {
            vm.open(Open {
                filter: FilterSpec::Expression(of((2 * guest + nth) as u16)),
                ..open("host:lan0", 1 << 12)
            })
        });
        let rings = [0, 1].map(|nth: usize| vm.reader(&opened[nth]));
        let ports = opened.map(|it| it.port);
        let mut own = Self { vm, ports, rings };
        assert_eq!(own.reads(), [0, 0]);
        own
    }

    /// How many packets each port has; then it sleeps.
    fn reads(&mut self) -> [usize; 2] {
        self.rings.each_mut().map(|ring| {
            let mut read = 0;
            loop {
                while ring.next().unwrap().is_some() {
                    read += 1;
                }
                if ring.arm(1, 0) == Wait::Sleep {
                    return read;
                }
            }
        })
    }

    /// Sleeps until its agent is told to wake it: for which ports.
    fn woken(&mut self) -> Vec<u32> {
        loop {
            match self.vm.agent.next() {
                Some((0, Message::Wake(ports))) => return ports,
                Some((0, _)) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// For which ports it was woken until now, since it was last.
    fn was_woken(&mut self) -> Vec<u32> {
        self.vm.agent.send(&Message::List.encode(9, 1)).unwrap();
        let mut all = Vec::new();
        loop {
            match self.vm.agent.next() {
                Some((0, Message::Wake(ports))) => all.extend(ports),
                Some((0, _)) => {}
                Some((9, Message::Devices(_))) => return all,
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn of_64_guests_the_one_with_packets_is_woken_alone_and_told_which_port() {
    const BUSY: usize = 37;
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let mut teller = teller(&daemon);
    let mut guests: Vec<_> = (0..GUESTS).map(|at| Sleeper::new(&daemon, at)).collect();
    for round in 0..ROUNDS {
        let nth = round % 2;
        assert!(teller.send(&news((2 * BUSY + nth) as u16)).unwrap());
        let busy = &mut guests[BUSY];
        assert_eq!(busy.woken(), [busy.ports[nth]], "round {round}");
        let mut packets = [0, 0];
        packets[nth] = 1;
        assert_eq!(busy.reads(), packets, "round {round}");
    }
    for (at, guest) in guests.iter_mut().enumerate() {
        assert_eq!(guest.was_woken(), [0; 0], "guest {at}");
        assert_eq!(guest.reads(), [0, 0], "guest {at}");
    }
    // The control: each of them can be woken, and is when all have a packet. That is one batch for each.
    let control = threads(daemon.pid(), "vnplugd");
    let before = sleeps(&control);
    for round in 0..ROUNDS {
        assert!(teller.send(&news(ALL)).unwrap());
        for (at, guest) in guests.iter_mut().enumerate() {
            let mut woken = guest.woken();
            while woken.len() < 2 {
                woken.extend(guest.woken());
            }
            woken.sort_unstable();
            assert_eq!(woken, guest.ports, "guest {at}, round {round}");
            assert_eq!(guest.reads(), [1, 1], "guest {at}, round {round}");
        }
    }
    let (woke, batches) = (sleeps(&control) - before, ROUNDS * GUESTS);
    println!("to wake guests {batches} times the daemon's control thread woke {woke} times");
    // Once for all in each round, if it does not run before the last is told of.
    assert!(woke >= 1 && woke <= batches as u64, "{woke}");
}

/// A program in a guest that sends.
struct Speaker {
    vm: PlayedVm,
    port: u32,
    ring: Producer,
}

impl Speaker {
    fn new(daemon: &Daemon, guest: usize) -> Self {
        let mut vm = attach(daemon, guest);
        let opened = vm.open(Open {
            transmit_bytes: 1 << 14,
            tuning: Tuning {
                enabled: false,
                ..Tuning::default()
            },
            ..open("host:wire1", 1 << 12)
        });
        let ring = vm.sender(&opened);
        let port = opened.port;
        Self { vm, port, ring }
    }

    /// Writes a batch: whether the daemon asks to be kicked for it.
    fn writes(&mut self, frames: usize) -> bool {
        for _ in 0..frames {
            assert_eq!(self.ring.push(&Meta::default(), &news(0)), Ok(true));
        }
        self.ring.publish();
        self.ring.bell(0) == Bell::Ring
    }

    fn kicks(&mut self, port: u32) {
        let kick = Message::Kick(vec![port]).encode(0, 1);
        self.vm.agent.send(&kick).unwrap();
    }

    /// Sends a batch: how often it had to kick.
    fn sends(&mut self, frames: usize) -> u64 {
        let asked = self.writes(frames);
        if asked {
            self.kicks(self.port);
        }
        asked.into()
    }

    fn is_taken(&self) {
        until("all is taken", || self.ring.used(), |used| *used == 0);
    }
}

#[test]
fn the_daemon_wakes_at_most_once_for_a_batch_of_64_guests_that_send() {
    const BATCH: usize = 8;
    let (lab, netns) = (Lab::new().unwrap(), Netns::new().unwrap());
    netns.veth("wire0", "wire1").unwrap();
    let grants: Vec<String> = (0..GUESTS).map(|at| format!("vm:g{at}=wire1")).collect();
    let mut args = vec!["--source", "wire1"];
    args.extend(grants.iter().flat_map(|it| ["--allow-send", it.as_str()]));
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let mut guests: Vec<_> = (0..GUESTS).map(|at| Speaker::new(&daemon, at)).collect();
    let [control, queue] = ["vnplugd", "wire1"].map(|name| threads(daemon.pid(), name));
    let rests = || {
        for thread in [&control, &queue] {
            eventually("it sleeps", || status(thread[0], "State").starts_with('S'));
        }
    };
    let round = |guests: &mut [Speaker]| {
        // The batches are there at once, however soon a daemon that ran would take the first.
        let stopped = Stopped::new(&[daemon.pid()]);
        let kicks: u64 = guests.iter_mut().map(|guest| guest.sends(BATCH)).sum();
        drop(stopped);
        guests.iter().for_each(Speaker::is_taken);
        rests();
        kicks
    };
    round(&mut guests);
    let (before, began) = ([sleeps(&control), sleeps(&queue)], Instant::now());
    let kicks: u64 = (0..ROUNDS).map(|_| round(&mut guests)).sum();
    let woke = [sleeps(&control) - before[0], sleeps(&queue) - before[1]];
    let batches = (GUESTS * ROUNDS) as u64;
    println!(
        "for {batches} batches of guests, {kicks} of them with a kick, the control thread woke {} times and that of the \
         queue {} times in {:?}",
        woke[0],
        woke[1],
        began.elapsed()
    );
    // One that never slept would wake for none, and would be kicked by nobody.
    let rounds = ROUNDS as u64;
    assert!(kicks >= rounds && kicks <= batches, "{kicks}");
    // Being stopped is a sleep, too; and of a busy processor's rounds each may be cut in several.
    assert!(
        woke.iter().all(|it| (rounds..=10 * rounds).contains(it)),
        "{woke:?}"
    );

    // Of all of them one sends, until the others are not looked at any more: its kicks bring what it wrote, and nothing of
    // another that kicks for a port that is not its own, or not at all.
    let [silent, busy, ..] = &mut guests[..] else {
        unreachable!("there are more")
    };
    for _ in 0..ROUNDS {
        busy.sends(1);
        busy.is_taken();
        rests();
    }
    assert!(silent.writes(1), "the daemon sleeps, and asks for a kick");
    for _ in 0..10 {
        busy.kicks(silent.port);
        busy.sends(1);
        busy.is_taken();
        rests();
    }
    assert!(silent.ring.used() > 0, "nobody has kicked for it");
    silent.kicks(silent.port);
    silent.is_taken();
}
