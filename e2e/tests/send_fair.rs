//! Weights and rates of those who send through one wire: whose frames are on it, in what order and how many.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::Duration;

use vnplug::{Client, GrantAction, GrantKind, Next, Port, Ready};
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::stopped::Stopped;
use vnplug_e2e::user::{as_uid, open_to_all};
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::control::Direction;
use vnplug_testing::Deadline;

/// Three users, and the lengths of their frames.
const SENDERS: [(u32, usize); 3] = [(54_001, 200), (54_002, 1514), (54_003, 700)];
/// Bytes of each one's transmit ring: many turns, of up to 256 KiB for all.
const RING: u64 = 16 << 20;

/// A wire, with a port for each at one end, and one that reads the other end.
struct Scene {
    far: Port,
    senders: Vec<Port>,
    operator: Client,
    daemon: Daemon,
    _netns: Netns,
    _lab: Lab,
}

impl Scene {
    /// Each sends on these terms.
    fn new(terms: [&str; 3]) -> Self {
        let (lab, netns) = (Lab::new().unwrap(), Netns::new().unwrap());
        netns.veth("wire0", "wire1").unwrap();
        let config = open_to_all(&lab, "");
        let mut args = [
            "--config", &config, "--source", "wire1", "--source", "wire0",
        ]
        .map(str::to_owned)
        .to_vec();
        for ((uid, _), terms) in SENDERS.iter().zip(terms) {
            args.extend(["--allow".into(), format!("uid:{uid}=wire1")]);
            args.extend(["--allow-send".into(), format!("uid:{uid}=wire1{terms}")]);
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
        let far = daemon.port("wire0").ring_bytes(64 << 20);
        let far = far.direction(Direction::Rx).open().unwrap();
        let open = |(uid, _): &(u32, usize)| {
            let options = daemon.port("wire1").transmit(RING).enabled(false);
            as_uid(*uid, move || options.open().unwrap())
        };
        let senders = SENDERS.iter().map(open).collect();
        let operator = Client::connect_to(&daemon.socket()).unwrap();
        Self {
            far,
            senders,
            operator,
            daemon,
            _netns: netns,
            _lab: lab,
        }
    }

    /// Has all of them fill their rings before the first frame is sent, so that each always has some until its last. The
    /// bytes of each on the wire until the first of them has sent all that it had.
    fn shares(&mut self) -> [f64; 3] {
        let stopped = Stopped::new(&[self.daemon.pid()]);
        let mut written = 0;
        for (at, port) in self.senders.iter_mut().enumerate() {
            let (_, len) = SENDERS[at];
            let outbox = port.outbox().unwrap();
            while outbox.push(&frame(at, len)).unwrap() {
                written += 1;
            }
            outbox.flush();
        }
        drop(stopped);
        // Until nothing comes any more: the wire's other end may lose some, of whomever.
        let mut came: Vec<(usize, usize)> = Vec::new();
        let deadline = Deadline::new("they come");
        loop {
            if let Next::Packet(packet) = self.far.next().unwrap() {
                came.extend(sender(packet.bytes).map(|at| (at, packet.bytes.len())));
                continue;
            }
            let ready = self.far.wait(Some(Duration::from_millis(300))).unwrap();
            if ready == Ready::TimedOut && came.len() > written / 2 {
                break;
            }
            deadline.check_seen(&came.len());
        }
        let last = |of: usize| came.iter().rposition(|(at, _)| *at == of).unwrap();
        let end = (0..3).map(last).min().unwrap();
        let mut bytes = [0.0; 3];
        for (at, len) in &came[..end] {
            bytes[*at] += *len as f64;
        }
        bytes
    }
}

fn frame(sender: usize, len: usize) -> Vec<u8> {
    let mut frame = vec![7; len];
    frame[..12].copy_from_slice(&[2, 0, 0, 0, 9, 9, 2, 0, 0, 0, 8, sender as u8]);
    frame
}

/// Whose frame it is.
fn sender(frame: &[u8]) -> Option<usize> {
    let own = frame[6..11] == [2, 0, 0, 0, 8];
    own.then(|| usize::from(frame[11]))
}

/// The first sender's part of a whole of `weights`, and so on, within ten per cent of each.
fn is_by(weights: [f64; 3], bytes: [f64; 3]) -> bool {
    let (all, whole) = (bytes.iter().sum::<f64>(), weights.iter().sum::<f64>());
    bytes.iter().zip(weights).all(|(bytes, weight)| {
        let share = bytes / all / (weight / whole);
        (0.9..1.1).contains(&share)
    })
}

#[test]
fn who_always_has_more_to_send_has_its_weights_part_of_the_wire() {
    let mut scene = Scene::new(["", "", ""]);
    let bytes = scene.shares();
    assert!(is_by([1.0, 1.0, 1.0], bytes), "{bytes:?}");
    for weights in [[1, 2, 5], [5, 1, 1], [1, 3, 1]] {
        for ((uid, _), weight) in SENDERS.iter().zip(weights) {
            let grant = format!("uid:{uid}=wire1,weight={weight}");
            let set = scene
                .operator
                .change_grant(GrantAction::Set, GrantKind::Send, &grant, false);
            set.unwrap();
        }
        let bytes = scene.shares();
        eprintln!("{weights:?}: {bytes:?}");
        assert!(
            is_by(weights.map(f64::from), bytes),
            "{weights:?} {bytes:?}"
        );
        // The control: it is not as if they were equal.
        assert!(!is_by([1.0, 1.0, 1.0], bytes), "{bytes:?}");
    }
    scene.daemon.audit();
}

/// What is on the wire of two that may send so much and no more, beside one that may send what it likes.
#[test]
fn who_has_a_rate_sends_that_much_and_no_more() {
    const RATES: [f64; 2] = [8e6, 16e6];
    const TIME: Duration = Duration::from_millis(2500);
    let mut scene = Scene::new([",rate=8M", ",rate=16M", ""]);
    let over = AtomicBool::new(false);
    let mut came: Vec<Vec<(u64, usize)>> = vec![Vec::new(); 3];
    let senders = std::mem::take(&mut scene.senders);
    scope(|threads| {
        for (at, mut port) in senders.into_iter().enumerate() {
            let over = &over;
            threads.spawn(move || {
                let frame = frame(at, SENDERS[at].1);
                // Who has a rate always has more than that: a ring holds more than goes meanwhile.
                let most = if at < RATES.len() { usize::MAX } else { 50 };
                while !over.load(Ordering::Relaxed) {
                    let outbox = port.outbox().unwrap();
                    let mut written = 0;
                    while written < most && outbox.push(&frame).unwrap() {
                        written += 1;
                    }
                    outbox.flush();
                    sleep(Duration::from_millis(2));
                }
            });
        }
        let deadline = Deadline::new("the time is over");
        let mut first = None;
        loop {
            let Next::Packet(packet) = scene.far.next().unwrap() else {
                deadline.check();
                scene.far.wait(Some(Duration::from_millis(20))).unwrap();
                continue;
            };
            let (ts_ns, len) = (packet.meta.ts_ns, packet.bytes.len());
            if let Some(at) = sender(packet.bytes) {
                came[at].push((ts_ns, len));
            }
            if ts_ns - *first.get_or_insert(ts_ns) > TIME.as_nanos() as u64 {
                break;
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    let rates = [&came[0], &came[1], &came[2]].map(|it| rates(it));
    eprintln!("bits a second, in all and of the middle window: {rates:.0?}");
    for ((all, window), wanted) in rates.iter().zip(RATES) {
        assert!(all / wanted < 1.05, "{rates:?}");
        assert!((0.95..1.05).contains(&(window / wanted)), "{rates:?}");
    }
    // The control: the wire has room for more.
    assert!(rates[2].0 > 2.0 * RATES[1], "{rates:?}");
}

/// Bits a second of frames by their time: from behind the 64 KiB that were saved up before the first, to the last; and of
/// windows of a quarter of a second the middle one. NB: a daemon that has no processor for longer than what is saved up
/// meanwhile sends less in all, and not more afterwards; the other windows do not know of it.
fn rates(frames: &[(u64, usize)]) -> (f64, f64) {
    const WINDOW_NS: u64 = 250_000_000;
    let mut saved = 0;
    let begin = frames.iter().position(|(_, len)| {
        saved += len;
        saved > 64 << 10
    });
    let frames = &frames[begin.unwrap()..];
    let (first, last) = (frames[0].0, frames.last().unwrap().0);
    let mut windows = vec![0.0; ((last - first) / WINDOW_NS) as usize];
    let mut bits = 0.0;
    for (ts_ns, len) in &frames[1..] {
        bits += *len as f64 * 8.0;
        if let Some(window) = windows.get_mut(((ts_ns - first) / WINDOW_NS) as usize) {
            *window += *len as f64 * 8e9 / WINDOW_NS as f64;
        }
    }
    windows.sort_by(f64::total_cmp);
    (
        bits * 1e9 / (last - first) as f64,
        windows[windows.len() / 2],
    )
}
