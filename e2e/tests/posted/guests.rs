//! A forwarder in a guest: what lies in a pool is sent on from there.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use vnplug::Direction;
use vnplug_e2e::attached::{AttachedUml, agent, everything, image};
use vnplug_e2e::daemon::{Daemon, example, value};
use vnplug_e2e::third_party::build_c;
use vnplug_e2e::{Image, Lab, Netns};
use vnplug_ring::layout::{DATA_OFFSET, SEND_MAGIC, flags};
use vnplug_testing::until;

use super::lent::across;

/// Bytes of a page, at which rings begin.
const PAGE: usize = 4096;

/// The flags of the first record of each transmit ring in the daemon's pools; 0 if nothing was sent there.
fn first_sent(daemon: &Daemon) -> Vec<u16> {
    let pools = fs::read_dir(daemon.pools()).unwrap();
    let files = pools.map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.is_file());
    let mut all = Vec::new();
    for path in files {
        let file = File::open(&path).unwrap();
        let word = |at: u64| {
            let mut word = [0; 8];
            file.read_exact_at(&mut word, at).map(|()| word)
        };
        for page in (0..file.metadata().unwrap().len()).step_by(PAGE) {
            if word(page).is_ok_and(|it| u64::from_le_bytes(it) == SEND_MAGIC) {
                let last = word(page + DATA_OFFSET + 24).unwrap();
                all.push(u16::from_le_bytes([last[0], last[1]]));
            }
        }
    }
    all
}

/// A guest's program carries frames between two wires of the host, both ways.
fn carries(image: Image) {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    netns.veth("back0", "back1").unwrap();
    let sources = ["wire0", "wire1", "back0", "back1"];
    let mut args: Vec<&str> = sources.iter().flat_map(|it| ["--source", *it]).collect();
    for grant in ["vm:uml=wire1", "vm:uml=back1"] {
        args.extend(["--allow-send", grant]);
    }
    let mut daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let uml = AttachedUml::boot(&lab, &daemon, "uml", everything(), image);
    let uml = uml.unwrap_or_else(|error| panic!("{error}"));
    let _agent = agent(&uml.guest).unwrap();
    let end = |name: &str| {
        let options = daemon.port(name).transmit(1 << 20).direction(Direction::Rx);
        options.filter("ether proto 0x88b5").open().unwrap()
    };
    let mut ends = [end("wire0"), end("back0")];
    let forward = "exec forward host:wire1 host:back1 2>&1";
    let forwarder = uml.guest.spawn(forward).unwrap();
    let look = || (daemon.counters(), forwarder.peek(4096));
    let is_there = |(all, _): &(Vec<vnplug::Counted>, _)| {
        all.iter().filter(|it| it.kind == "port").count() == 4
    };
    let _seen = until("the forwarder is there", look, is_there);
    across(&mut ends, 0..200);
    // Each frame lies once in the pool, in the ring in which it came.
    let sent = first_sent(&daemon);
    assert_eq!(sent.len(), 2, "{sent:?}");
    assert!(sent.iter().all(|it| it & flags::POSTED != 0), "{sent:?}");
    let all = daemon.audit();
    let ports = all.iter().filter(|it| it.kind == "port");
    let refused = ports.map(|it| value(it, "send_dropped_place"));
    assert_eq!(refused.sum::<u64>(), 0);
    daemon.kill();
    daemon.launch().unwrap();
    uml.adopt_again(&daemon);
    across(&mut ends, 200..400);
}

#[test]
fn a_forwarder_in_a_guest_posts_what_lies_in_its_pool_and_goes_on_after_a_restart() {
    let forward = example("forward").unwrap();
    carries(image().unwrap().program_at(forward, "/bin/forward"));
}

#[test]
fn so_does_the_one_in_c() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/examples/forward.c");
    let lab = Lab::new().unwrap();
    let forward = build_c(&source, lab.dir(), &[]).unwrap();
    carries(image().unwrap().program_at(forward, "/bin/forward"));
}
