//! A guest that lies with what it posts: nothing foreign on the wire, whatever it names and writes over.

use serde_json::Value;
use vnplug::{Direction, Next, Port};
use vnplug_e2e::attached::{AttachedUml, agent, everything, image};
use vnplug_e2e::daemon::{Daemon, example, value};
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::control::Counted;
use vnplug_ring::counters::label;
use vnplug_testing::{PATIENCE, eventually, until};

use super::SECRET;
use super::frames::{FIRST, LAST, frame};

/// A station that the guest is not.
const FOREIGN: [u8; 6] = [2, 0, 0, 0, 0, 0xee];
/// How many records it posts in a run.
const POSTED: u64 = 20_000;

/// A guest with two wires, on the second of which others have secrets.
struct Scene {
    uml: AttachedUml,
    /// The far end of the first.
    end: Port,
    daemon: Daemon,
    others: (Port, Port, vnplug_e2e::Job, vnplug_e2e::Job),
    _netns: Netns,
    _lab: Lab,
}

/// What came at the far end.
#[derive(Debug, Default)]
struct Seen {
    own: u64,
    of_others: u64,
    secrets: u64,
}

impl Scene {
    fn new(terms: &str) -> Self {
        let lab = Lab::new().unwrap();
        let netns = Netns::new().unwrap();
        let quiet =
            netns.enter(|| std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"));
        quiet.unwrap().unwrap();
        netns.veth("wire0", "wire1").unwrap();
        netns.veth("back0", "back1").unwrap();
        let sources = ["wire0", "wire1", "back0", "back1"];
        let mut args: Vec<&str> = sources.iter().flat_map(|it| ["--source", *it]).collect();
        let grant = format!("vm:uml=wire1{terms}");
        args.extend(["--allow-send", &grant]);
        let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
        let scribble = example("scribble").unwrap();
        let image = image().unwrap().program_at(scribble, "/bin/scribble");
        let uml = AttachedUml::boot(&lab, &daemon, "uml", everything(), image);
        let uml = uml.unwrap_or_else(|error| panic!("{error}"));
        let agent = agent(&uml.guest).unwrap();
        // Another program of the guest, and one of the host.
        let reads = uml
            .guest
            .spawn("exec vnplug count host:back1 2>&1")
            .unwrap();
        let mut reader = daemon.port("back1").open().unwrap();
        let both = |all: &Vec<Counted>| all.iter().filter(|it| it.kind == "port").count() == 2;
        until("both are there", || daemon.counters(), both);
        let mut tells = daemon.port("back0").transmit(1 << 20).open().unwrap();
        let mut secret = frame(LAST, FIRST, 0, 1500);
        secret[14..].fill(SECRET);
        eventually("they have secrets", || {
            for _ in 0..100 {
                tells.send(&secret).unwrap();
            }
            let _ = reader.batch(64).count();
            let all = daemon.counters();
            let ports = all
                .iter()
                .filter(|it| it.kind == "port" && label(it, "owner") == "vm uml");
            reader.counts().received > 500
                && ports.map(|it| value(it, "delivered")).sum::<u64>() > 500
        });
        let end = daemon.port("wire0").transmit(1 << 20).ring_bytes(1 << 24);
        let end = end.direction(Direction::Rx).open().unwrap();
        Self {
            uml,
            end,
            daemon,
            others: (reader, tells, reads, agent),
            _netns: netns,
            _lab: lab,
        }
    }

    /// What the counters of its wire say.
    fn counted(&self, names: [&str; 4]) -> [u64; 4] {
        let all = self.daemon.counters();
        let wire = all
            .iter()
            .find(|it| it.kind == "source" && it.name == "wire1");
        names.map(|name| value(wire.unwrap(), name))
    }

    /// The guest's program lies: what it says, and what came at the far end.
    fn scribbles(&mut self, what: &str, own: usize) -> (Value, Seen) {
        let command = format!("exec scribble host:wire1 {POSTED} {what} {own} 2>&1");
        let job = self.uml.guest.spawn(&command).unwrap();
        let mut seen = Seen::default();
        let is_there = |all: &Vec<Counted>| {
            let mut ports = all.iter().filter(|it| it.kind == "port");
            ports.any(|it| label(it, "device").ends_with("wire1"))
        };
        until("its port is there", || self.daemon.counters(), is_there);
        for number in 0..100 {
            let sent = frame(LAST, FIRST, number, 1000);
            assert!(self.end.send(&sent).unwrap());
        }
        let said = loop {
            seen.look(&mut self.end);
            if job.is_done() {
                break job.wait(PATIENCE).unwrap();
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        };
        assert_eq!(said.status, 0, "{}", said.text());
        // All that is on its way.
        let mut before = u64::MAX;
        eventually("nothing comes any more", || {
            std::thread::sleep(std::time::Duration::from_millis(50));
            seen.look(&mut self.end);
            std::mem::replace(&mut before, seen.own + seen.of_others) == seen.own + seen.of_others
        });
        (serde_json::from_str(&said.text()).unwrap(), seen)
    }
}

impl Seen {
    fn look(&mut self, end: &mut Port) {
        while let Next::Packet(packet) = end.next().unwrap() {
            match packet.bytes.get(6..12) {
                Some(from) if from == FIRST => self.own += 1,
                Some(from) if from == FOREIGN => self.of_others += 1,
                _ => {}
            }
            let is_secret = packet.bytes.windows(8).any(|it| it == [SECRET; 8]);
            self.secrets += u64::from(is_secret);
        }
    }
}

/// Bytes that a posted record has itself.
const OWN: [usize; 2] = [0, 32];
/// The guest's station, and no other one.
const LOCK: &str = ",mac=02:00:00:00:00:01";

#[test]
fn a_guest_that_lies_about_places_sends_nothing_foreign_and_its_port_lives() {
    let mut scene = Scene::new(LOCK);
    for own in OWN {
        let names = [
            "send_taken",
            "send_dropped_place",
            "send_dropped_station",
            "sent",
        ];
        let before = scene.counted(names);
        let (said, seen) = scene.scribbles("places", own);
        let after = scene.counted(names);
        let [taken, places, stations, sent] = [0, 1, 2, 3].map(|at| after[at] - before[at]);
        eprintln!(
            "{own} bytes of its own: {said}, {places} places and {stations} stations refused, {sent} sent: {seen:?}"
        );
        assert_eq!((seen.of_others, seen.secrets), (0, 0));
        assert_eq!(
            (said["life"].as_str(), said["posted"].as_u64()),
            (Some("Open"), Some(POSTED))
        );
        assert_eq!(taken, POSTED);
        // The attack arrives: it names secrets that lie in its machine's own memory, and its other station is met.
        assert!(said["secrets"].as_u64() > Some(100_000), "{said}");
        assert!(places > POSTED / 100 && stations > 20 && sent > POSTED / 100);
    }
    scene.daemon.audit();
    // The control: nobody forbids it the other station, so what was written over in time is sent.
    let mut scene = Scene::new("");
    for own in OWN {
        let (_, seen) = scene.scribbles("places", own);
        assert!(seen.of_others > 20, "{seen:?}");
        assert_eq!(seen.secrets, 0);
    }
    scene.daemon.audit();
}

#[test]
fn a_guest_that_writes_over_its_ring_loses_it_with_a_reason_and_nobody_else_does() {
    let mut scene = Scene::new(LOCK);
    let reasons = |daemon: &Daemon| daemon.log().matches("may not send any more: ").count();
    for round in 0..6 {
        let (before, taken) = (reasons(&scene.daemon), scene.counted(["send_taken"; 4])[0]);
        let (said, seen) = scene.scribbles("all", OWN[round % 2]);
        assert_eq!((seen.of_others, seen.secrets), (0, 0));
        let taken = scene.counted(["send_taken"; 4])[0] - taken;
        let is_over = reasons(&scene.daemon) == before + 1;
        assert!(is_over || taken == POSTED, "{taken} taken: {said}");
    }
    // The control: it was met.
    assert!(reasons(&scene.daemon) > 0);
    // Others, in its machine and beside it, go on.
    let of_guest = |all: &[Counted]| {
        let ports = all
            .iter()
            .filter(|it| it.kind == "port" && label(it, "owner") == "vm uml");
        ports.map(|it| value(it, "delivered")).sum::<u64>()
    };
    let (reader, tells, ..) = &mut scene.others;
    let (before, received) = (of_guest(&scene.daemon.counters()), reader.counts().received);
    eventually("the others go on", || {
        tells.send(&frame(LAST, FIRST, 0, 60)).unwrap();
        let _ = reader.batch(64).count();
        reader.counts().received > received + 10 && of_guest(&scene.daemon.counters()) > before + 10
    });
    scene.daemon.audit();
}
